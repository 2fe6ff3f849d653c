"""Runs one target in this process: `python -m fuzz.child TARGET FOLDER SECONDS SEED [INPUT]`.

With atheris the search is guided by coverage: libFuzzer keeps what reaches new branches. Without it (no wheel
for this machine) or for targets that fork, inputs are the corpus changed at random. Both ways count the same:
`FOLDER/stats.json` says how many inputs ran, the slowest one and the growth of resident memory; an input that
crashes, hangs or takes too much memory is written to `FOLDER/crash-*` or alike, and ends the process.

Bounds: seconds of processor time per input by an alarm, resident memory after each input, address space by
RLIMIT_AS, so that memory which a length field asks for is refused even where nobody touches it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

from fuzz.mutate import mutator
from fuzz.target import MOST_INPUT_BYTES, Ready, Target
from fuzz.targets import named

try:
    import atheris
except ImportError:  # pragma: no cover  # only where there is no wheel
    atheris = None

TELL_S = 0.5
WALL_RATIO = 12
"""An input may take so many times its bound of processor time where others use the machine too."""
MOST_CORPUS = 5000
_PAGE = resource.getpagesize()


class Hang(BaseException):
    """An input took longer than its bound; no `except Exception` may swallow it."""


class MemoryGrown(Exception):
    """Resident memory grew beyond the bound."""


def _statm() -> tuple[int, int]:
    total, resident, *_ = Path("/proc/self/statm").read_bytes().split()
    return int(total) * _PAGE, int(resident) * _PAGE


class Watch:
    """Runs inputs within the bounds and counts."""

    def __init__(self, target: Target, ready: Ready, folder: Path) -> None:
        self._target, self._ready, self._folder = target, ready, folder
        self._begun_bytes = _statm()[1]
        self._told_s = 0.0
        self.executions = self.taken = 0
        self.slowest_s, self.slowest, self.growth_bytes = 0.0, b"", 0
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, self._too_long)

    def run(self, data: bytes) -> None:
        """One input. Whatever it raises has been written down."""
        begun_s = time.perf_counter()
        self._bound(self._target.input_s)
        try:
            taken = self._ready.answer(data)
        except Hang:
            self.fail("hang", data)
            raise
        except MemoryError:
            self.fail("memory", data)
            raise
        except BaseException:
            self.fail("crash", data)
            raise
        finally:
            self._bound(0)
        took_s = time.perf_counter() - begun_s
        self.executions += 1
        self.taken += taken
        if took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, data
        if self.executions % 16 == 0 or took_s > 0.01:
            self._weigh(data, begun_s + took_s)

    def _weigh(self, data: bytes, now_s: float) -> None:
        growth = _statm()[1] - self._begun_bytes
        self.growth_bytes = max(self.growth_bytes, growth)
        if growth > self._target.growth_bytes:
            error = MemoryGrown(f"{growth >> 20} MiB more than at the start")
            self.fail("memory", data, error)
            raise error
        if now_s - self._told_s > TELL_S:
            self._told_s = now_s
            self.tell()

    def tell(self) -> None:
        """Writes the figures down."""
        stats = {
            "executions": self.executions,
            "taken": self.taken,
            "slowest_s": round(self.slowest_s, 4),
            "slowest": repr(self.slowest[:60]),
            "growth_bytes": self.growth_bytes,
        }
        partial = self._folder / "stats.partial"
        partial.write_text(json.dumps(stats))
        partial.replace(self._folder / "stats.json")

    def fail(self, kind: str, data: bytes, error: BaseException | None = None) -> None:
        """Keeps the input, and says why it failed."""
        self._bound(0)
        name = f"{kind}-{hashlib.sha256(data).hexdigest()[:16]}"
        (self._folder / name).write_bytes(data)
        said = traceback.format_exc() if error is None else f"{type(error).__name__}: {error}"
        (self._folder / f"{name}.txt").write_text(f"{data[:2000]!r}\n\n{said}", errors="backslashreplace")
        self.tell()

    @staticmethod
    def _bound(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, WALL_RATIO * seconds)

    def _too_long(self, signum: int, frame: FrameType | None) -> None:
        raise Hang(
            f"more than {self._target.input_s:g} s of processor time, or {WALL_RATIO} times as long in all"
        )


def limit_address_space(target: Target) -> None:
    """Beyond what is mapped now, four times what may become resident."""
    most = _statm()[0] + 4 * target.growth_bytes + (1 << 30 if atheris is not None else 0)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def blind(watch: Watch, target: Target, ready: Ready, corpus: Path, seconds: float, seed: int) -> None:
    """Changes what is in the corpus at random until the time is over; some inputs that are taken are kept."""
    rng = random.Random(seed)
    change = ready.change or mutator(target.form, target.words)
    pool = [*ready.seeds, *target.regressions().values()]
    pool += [path.read_bytes() for path in sorted(corpus.iterdir())][:MOST_CORPUS]
    until_s = time.monotonic() + seconds
    for data in pool:
        if time.monotonic() < until_s:
            watch.run(data)
    while time.monotonic() < until_s:
        data = change(rng.choice(pool), rng)[:MOST_INPUT_BYTES]
        taken = watch.taken
        watch.run(data)
        if watch.taken > taken and len(pool) < MOST_CORPUS and rng.random() < 0.02:
            pool.append(data)
            (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def guided(watch: Watch, target: Target, corpus: Path, seconds: float, seed: int) -> None:
    """libFuzzer's loop; it does not come back."""
    change = mutator(target.form, target.words)

    def custom(data: bytes, most: int, number: int) -> bytes:
        rng = random.Random(number)
        if rng.random() < 0.25:
            return bytes(atheris.Mutate(data, most))
        return change(data, rng)[:most]

    arguments = [
        "fuzz",
        f"-max_total_time={max(1, round(seconds))}",
        f"-seed={seed}",
        f"-max_len={MOST_INPUT_BYTES}",
        f"-artifact_prefix={corpus.parent}/libfuzzer-",
        # Ours are stricter; its own would end the process without a word of Python's.
        "-timeout=0",
        "-rss_limit_mb=0",
        "-handle_alrm=0",
        "-verbosity=0",
        "-len_control=0",
        str(corpus),
    ]
    atheris.Setup(arguments, watch.run, custom_mutator=custom)
    atheris.Fuzz()


def main() -> int:
    """Runs the target for the seconds, or one input of it."""
    name, folder, seconds, seed = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    target = named(name)
    logging.disable(logging.CRITICAL)
    scratch, corpus = folder / "scratch", folder / "corpus"
    for made in (scratch, corpus):
        made.mkdir(parents=True, exist_ok=True)
    is_guided = atheris is not None and not target.is_forking and len(sys.argv) <= 5
    instrument = (
        atheris.instrument_imports(include=["keystage"], enable_loader_override=False) if is_guided else None
    )
    with instrument or contextlib.nullcontext():
        ready = target.ready(scratch)
    if target.is_forking:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    else:
        limit_address_space(target)
    watch = Watch(target, ready, folder)
    if len(sys.argv) > 5:
        watch.run(Path(sys.argv[5]).read_bytes())
        print(f"{watch.slowest_s:.3f} s, {'taken' if watch.taken else 'refused'}")
        return 0
    if is_guided:
        for data in (*ready.seeds, *target.regressions().values()):
            watch.run(data)
            (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        guided(watch, target, corpus, seconds, seed)
    else:
        blind(watch, target, ready, corpus, seconds, seed)
    watch.tell()
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except BaseException:  # noqa: BLE001  # said, and ended at once: modules under test may hold threads
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
