"""Shares the time out over the targets, one process each, and prints what came of it: `python -m fuzz`.

    --seconds N      in all (600); a quarter of it is the HTTP APIs'
    --only A,B       targets by name or by their first letters
    --corpus DIR     where corpora are kept and grow (.keystage/fuzz of the checkout)
    --seed N         of every target; a new one each time by default
    --no-http        parsers alone
    --list           names and what they are
    --again TARGET FILE   one input once more, with the traceback

Exit code 1: a crash, a hang, unbounded memory, or an API that does not conform. The input lies in the
target's
folder; put it into `tests/fuzz/regressions/TARGET/` with the fix.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fuzz.target import Target
from fuzz.targets import ITSELF, TARGETS

TESTS = Path(__file__).resolve().parent.parent
CORPUS = TESTS.parent / ".keystage" / "fuzz"
HTTP_RATIO = 0.25
START_S = 60.0
"""Beyond its seconds, for imports on a busy machine; a target that takes longer hangs outside of Python."""
FAULTS = ("crash", "hang", "memory")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a target.

    Attributes:
        name: of it.
        executions: inputs.
        taken: those that were not refused.
        seconds: with the start.
        faults: files with inputs that were answered wrongly, with what was said.
        slowest_s: of one input.
        growth_bytes: of resident memory.
    """

    name: str
    executions: int
    taken: int
    seconds: float
    faults: tuple[str, ...]
    slowest_s: float
    growth_bytes: int


def run(target: Target, corpus: Path, seconds: float, seed: int) -> Outcome:
    """One target in a process of its own, with its corpus."""
    folder = corpus / target.name
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / "stats.json", *(path for kind in FAULTS for path in folder.glob(f"{kind}-*"))):
        old.unlink(missing_ok=True)
    begun_s = time.monotonic()
    log = folder / "log"
    with log.open("wb") as out:
        program = subprocess.Popen(
            [sys.executable, "-m", "fuzz.child", target.name, str(folder), f"{seconds:.1f}", str(seed)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=TESTS, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
        )  # fmt: skip
        try:
            code = program.wait(seconds + 12 * target.input_s + START_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if program.poll() is None:
                program.kill()
                program.wait()
    faults = [
        path.read_text(errors="replace") for kind in FAULTS for path in sorted(folder.glob(f"{kind}-*.txt"))
    ]
    tail = log.read_text(errors="replace")[-3000:]
    if code is None:
        faults.append(f"it did not end within {START_S:g} s of its time; its log ends:\n{tail}")
    elif code != 0 and not faults:
        faults.append(f"exit code {code}; its log ends:\n{tail}")
    try:
        stats = json.loads((folder / "stats.json").read_bytes())
    except (OSError, ValueError):
        stats = {"executions": 0, "taken": 0, "slowest_s": 0.0, "growth_bytes": 0}
    return Outcome(
        target.name, stats["executions"], stats["taken"], time.monotonic() - begun_s, tuple(faults),
        stats["slowest_s"], stats["growth_bytes"],
    )  # fmt: skip


def chosen(only: str) -> list[Target]:
    """The targets that are asked for.

    Raises:
        SystemExit: a word fits none.
    """
    words = [word.strip() for word in only.split(",") if word.strip()]
    known = (*TARGETS, *ITSELF) if words else TARGETS
    lost = [word for word in words if not any(target.name.startswith(word) for target in known)]
    if lost:
        sys.exit(f"fuzz: no target begins with {', '.join(lost)}; --list shows them")
    return [target for target in known if not words or any(target.name.startswith(word) for word in words)]


def line(outcome: Outcome) -> str:
    """A row of the table."""
    return (
        f"{outcome.name:24} {outcome.executions:>10} {outcome.taken:>9} {outcome.seconds:>8.1f} "
        f"{len(outcome.faults):>7} {outcome.slowest_s:>10.3f} {outcome.growth_bytes / (1 << 20):>9.1f}"
    )


HEAD = (
    f"{'target':24} {'executions':>10} {'taken':>9} {'seconds':>8} {'crashes':>7} {'slowest s':>10} "
    f"{'MiB more':>9}"
)


def parsers(targets: Sequence[Target], corpus: Path, seconds: float, seed: int) -> list[Outcome]:
    """All targets one after another; what one did not use is the others'."""
    outcomes = []
    until_s = time.monotonic() + seconds
    for number, target in enumerate(targets):
        left_s, shares = until_s - time.monotonic(), sum(one.share for one in targets[number:])
        share_s = left_s * target.share / shares
        start_s = 1.5  # imports, by and large
        outcome = run(target, corpus, max(1.0, share_s - start_s), seed)
        outcomes.append(outcome)
        print(line(outcome), flush=True)
    return outcomes


def main() -> int:
    """Runs it all; the exit code."""
    options = argparse.ArgumentParser(
        prog="python -m fuzz", description="hostile input for every parser and API"
    )
    options.add_argument("--seconds", type=float, default=600.0)
    options.add_argument("--only", default="")
    options.add_argument("--corpus", type=Path, default=CORPUS)
    options.add_argument("--seed", type=int, default=None)
    options.add_argument("--no-http", action="store_true")
    options.add_argument("--list", action="store_true")
    options.add_argument("--again", nargs=2, metavar=("TARGET", "FILE"))
    given = options.parse_args()
    corpus = given.corpus.absolute()
    if given.list:
        print("\n".join(f"{target.name:24} {target.form:8} {target.place}" for target in TARGETS))
        return 0
    if given.again:
        name, file = given.again
        command = [
            sys.executable,
            "-m",
            "fuzz.child",
            name,
            str(corpus / name),
            "1",
            "1",
            str(Path(file).absolute()),
        ]
        return subprocess.run(command, cwd=TESTS, check=False).returncode
    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    targets = chosen(given.only)
    has_http = not given.no_http and not given.only
    guided = importlib.util.find_spec("atheris") is not None
    how = "guided by coverage" if guided else "at random (atheris is not installed here)"
    print(
        f"{len(targets)} targets in {given.seconds:g} s, {how}, seed {seed}, corpus in {corpus}\n{HEAD}",
        flush=True,
    )
    begun_s = time.monotonic()
    parser_s = given.seconds * (1 - HTTP_RATIO) if has_http else given.seconds
    outcomes = parsers(targets, corpus, parser_s, seed)
    if has_http:
        from fuzz.http_apis import apis

        left_s = max(30.0, given.seconds - (time.monotonic() - begun_s))
        for outcome in apis(corpus, left_s, seed):
            outcomes.append(outcome)
            print(line(outcome), flush=True)
    for outcome in outcomes:
        for fault in outcome.faults:
            print(f"\n{outcome.name}:\n{fault[-6000:]}")
    bad = sum(len(outcome.faults) for outcome in outcomes)
    count = sum(outcome.executions for outcome in outcomes)
    print(
        f"\n{count} inputs in {time.monotonic() - begun_s:.0f} s: "
        f"{bad} crashes, hangs or memory without bound"
    )
    return 1 if bad else 0
