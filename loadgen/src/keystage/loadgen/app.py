"""The load generator's entries: `replay`, `load` (the command) and `demo` (what `make run` does).

Ties the flow together: options -> plan -> `running` (sender beside monitor, report) -> table, JSON, plots.
Nothing is measured here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from keystage.loadgen import capacity, running, search, table
from keystage.loadgen import plan as planning
from keystage.loadgen.monitor import Credentials
from keystage.loadgen.option_checks import check
from keystage.loadgen.options import LoadOptions, OptionError
from keystage.loadgen.report import Report, to_json
from keystage.loadgen.sender import Row, client
from keystage.loadgen.sending.processes import SenderError
from keystage.loadgen.starts import ReplicaStart
from keystage.loadgen.target import Target, TargetKind
from keystage.loadgen.traces import TraceError, open_trace

DEMO_CV = 4.0
"""Bursty: the CV NeuStream evaluates at. (The conversation trace has 1.09, the code trace 13.2.)"""

DEMO_LOAD_RATIO = 0.6
"""Share of the measured capacity: bursts queue up, and the queue empties again."""

DEMO_MIN_REQUESTS = 40
"""A slow machine gets a longer replay rather than a report over a handful of requests."""

UNLOADED_REQUESTS = 12
CAPACITY_CLIENTS = 16
RECORDING_CLIENTS = 4
"""A recording is about a second of work for two cores: sixteen at once would all end after the window."""
CAPACITY_S = 12.0
CAPACITY_MOST_S = 90.0

PLAIN_WIDTH = 120

StartsSince: TypeAlias = Callable[[float], Sequence[ReplicaStart]]
"""Starts decided since a moment (Unix seconds)."""

EXIT_OK, EXIT_NOTHING_SERVED, EXIT_BAD_INPUT, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


def console(*, stderr: bool = False) -> Console:
    """A console that takes brackets in names and error messages literally."""
    shown = Console(stderr=stderr, markup=False, highlight=False)
    if not shown.is_terminal:
        shown.width = PLAIN_WIDTH
    return shown


def replay(options: LoadOptions, out: Console | None = None) -> Report:
    """Replays one schedule and writes report and plots to `options.out`.

    Args:
        options: see `LoadOptions`.
        out: where progress is shown; nowhere if None.

    Raises:
        OptionError: options out of bounds or in contradiction.
        TraceError: a trace that cannot be used.
    """
    check(options)
    target = target_of(options)
    if options.search_rate:
        return _searched(options, target, out)
    plan = None if options.closed_loop is not None else planning.plan(options, target)
    return asyncio.run(running.run(options, target, plan, None, out))


def _searched(options: LoadOptions, target: Target, out: Console | None) -> Report:
    """Looks for the highest rate that meets the SLO; the report is that of the best window."""
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)

    def measure(window: LoadOptions) -> Report:
        plan = planning.plan(window, target)
        return asyncio.run(running.run(dataclasses.replace(window, out=None), target, plan, None, None))

    found, made = search.run(options, measure, out.print if out is not None else lambda _: None)
    if options.out is not None:
        search.write(found, options.out)
        running.write(made, options.out)
    return made


def load(options: LoadOptions, *, as_json: bool = False) -> int:
    """The command `keystage load`: replays, prints the report, and returns the exit code.

    0 if anything was served (failures are in the report), 1 if nothing was or the report could not be
    written, 2 for bad input, 3 if the run is no measurement (`validity`; the report is written all the same),
    130 after Ctrl-C or SIGTERM (what was measured until then is written, and marked as no measurement).
    """
    out = console(stderr=as_json)
    try:
        with _term_as_interrupt():
            made = replay(options, out)
    except (OptionError, TraceError) as error:
        _complain(f"{error}")
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except SenderError as error:
        _complain(f"nothing was sent: {error}")
        return EXIT_NOTHING_SERVED
    except OSError as error:
        _complain(f"--out {options.out}: {error}")
        return EXIT_NOTHING_SERVED
    if as_json:
        sys.stdout.write(f"{to_json(made).decode()}\n")
    else:
        table.show(made, out)
        _tell_files(options, out)
    if not made.requests.served:
        return EXIT_NOTHING_SERVED
    return EXIT_OK if made.valid else EXIT_INVALID


@contextlib.contextmanager
def _term_as_interrupt() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does: so a container that is stopped leaves what was measured.

    As the first process of a container it would else be ignored, and the process killed in the end.
    """
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or not heeds:
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(told: str) -> None:
    """One line, whatever the width: it is read in logs too."""
    Console(stderr=True, markup=False, highlight=False).print(f"error: {told}", soft_wrap=True)


def demo(
    gateway_url: str,
    pipeline: str,
    trace: Path | None = None,
    duration_s: float = 60.0,
    seed: int = 0,
    *,
    target: TargetKind = "openai",
    context_tokens: int = 2048,
    byte_tokens: bool = False,
    mask: str = "[MASK]",
    bodies: Path | None = None,
    credentials: Credentials | None = None,
    out: Path = Path("out"),
    notes: tuple[str, ...] = (),
    starts: StartsSince | None = None,
) -> Report:
    """What `make run` does once the pipeline is up.

    Measures unloaded latency and capacity with requests of the same sizes, sets the rate to 60 % of
    that capacity, replays a trace or gamma arrivals of CV 4, writes the report and prints it.

    Args:
        gateway_url: address of the gateway.
        pipeline: name of the pipeline.
        trace: of any kind in `traces.KINDS`, or None.
        duration_s: length of the replay; longer where the rate gives fewer than 40 requests.
        seed: seed of everything drawn.
        target: what kind of requests the pipeline serves.
        context_tokens: tokens the model admits.
        byte_tokens: whether a token is a byte (a pipeline without a tokenizer).
        mask: what stands for a missing word, for a pipeline that fills masks.
        bodies: file with a JSON body a line, for a stream program.
        credentials: of the gateway, for its list of functions.
        out: folder of the report.
        notes: shown in the report, for example a cap on replicas.
        starts: tells the starts of replicas since a moment, asked after the replay; None: nobody tells.

    Raises:
        TraceError: a trace that cannot be used; found before anything is sent.
        TargetError: the pipeline does not serve.
    """
    shown = console()
    options = LoadOptions(
        url=f"{gateway_url.rstrip('/')}/function/{pipeline}",
        target=target,
        trace=trace,
        cv=DEMO_CV if trace is None else None,
        rate_rps=1.0,
        duration_s=duration_s,
        seed=seed,
        context_tokens=context_tokens,
        byte_tokens=byte_tokens,
        mask=mask,
        bodies=bodies,
        credentials=credentials,
        out=out,
    )
    check(options)
    if trace is not None:
        for _ in open_trace(trace).blocks():
            pass
    made = asyncio.run(_demo(options, target_of(options), shown, list(notes), starts))
    table.show(made, shown)
    _tell_files(options, shown)
    return made


def target_of(options: LoadOptions) -> Target:
    """Where and how the options' requests go.

    Raises:
        OptionError: a file of bodies that cannot be read, or holds none.
    """
    return Target(
        options.target,
        options.url.rstrip("/"),
        options.model,
        options.temperature,
        options.body_bytes,
        options.byte_tokens,
        options.mask,
        () if options.bodies is None else read_bodies(options.bodies),
    )


def read_bodies(file: Path) -> tuple[bytes, ...]:
    """The bodies in a file, one a line.

    Raises:
        OptionError: it cannot be read, or holds none.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise OptionError(f"--bodies {file}: {error.strerror}") from error
    bodies = tuple(line for line in lines if line.strip())
    if not bodies:
        raise OptionError(f"--bodies {file}: holds no body")
    return bodies


async def _demo(
    options: LoadOptions, target: Target, shown: Console, notes: list[str], starts: StartsSince | None
) -> Report:
    begun_s = time.time()
    before = await _measure_idle(options, target, shown)
    rate_rps = DEMO_LOAD_RATIO * before.capacity.requests_per_s
    duration_s = options.duration_s or 0.0
    if rate_rps * duration_s < DEMO_MIN_REQUESTS:
        longer_s = DEMO_MIN_REQUESTS / rate_rps
        notes.append(
            f"replay lasts {longer_s:.0f} s instead of {duration_s:.0f} s, for {DEMO_MIN_REQUESTS} requests"
        )
        duration_s = longer_s
    notes.append(f"rate is {100 * DEMO_LOAD_RATIO:.0f} % of the capacity measured just before")
    options = dataclasses.replace(options, rate_rps=rate_rps, duration_s=duration_s)
    plan = planning.plan(options, target)
    shown.print(f"replaying {len(plan.times_s)} requests over {plan.duration_s:.0f} s: {plan.source}")
    told = (lambda: starts(begun_s)) if starts is not None else list
    return await running.run(options, target, plan, before, shown, notes, told)


async def _measure_idle(options: LoadOptions, target: Target, shown: Console) -> running.Before:
    """Unloaded latency and capacity, with token lengths of another seed than the replay's."""
    count = 256
    sizes = planning.drawn_sizes(options, target, count, options.seed + 1)
    bodies = [target.body(length, options.seed + 1, index) for index, length in enumerate(sizes)]
    async with client(options.timeout_s) as session:
        shown.print(f"measuring unloaded latency: {UNLOADED_REQUESTS} requests, one at a time")
        alone = await capacity.unloaded(session, target, bodies[: UNLOADED_REQUESTS + 1])
        clients, window_s = _closed_loop(target, alone)
        shown.print(f"measuring capacity: {clients} clients for {window_s:.0f} s")
        able = await capacity.capacity(
            session, target, bodies[UNLOADED_REQUESTS:], concurrency=clients, duration_s=window_s
        )
    tokens = f", {able.output_tokens_per_s:.0f} tokens/s" if able.output_tokens_per_s else ""
    shown.print(f"capacity {able.requests_per_s:.2f} requests/s{tokens}")
    return running.Before(alone, able)


def _closed_loop(target: Target, alone: list[Row]) -> tuple[int, float]:
    """Clients and seconds of the capacity measurement; slow answers get the time for two rounds."""
    clients = RECORDING_CLIENTS if target.kind == "transcriptions" else CAPACITY_CLIENTS
    if target.is_streaming:
        return clients, CAPACITY_S
    typical_s = statistics.median(row.last_s - row.sent_s for row in alone)
    return clients, min(max(CAPACITY_S, 2 * clients * typical_s), CAPACITY_MOST_S)


def _tell_files(options: LoadOptions, shown: Console) -> None:
    if options.out is not None:
        shown.print(f"report, requests and plots are in {options.out.resolve()}")
