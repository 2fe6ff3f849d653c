"""From options to a schedule: when each request is sent, and with which body.

Comes after `options`, uses `trace`, `arrivals`, `lengths` and `target`, and hands `sender` a
complete list, so that nothing is computed while requests are being sent. Reads the trace file and
does no other IO.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from keystage.loadgen import arrivals, lengths, trace
from keystage.loadgen.options import (
    DEFAULT_CV,
    DEFAULT_DURATION_S,
    MAX_REQUESTS,
    LoadOptions,
    OptionError,
)
from keystage.loadgen.target import Target


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A schedule.

    Attributes:
        times_s: send times, ascending.
        lengths: asked token lengths, one per request.
        bodies: request bodies, one per request.
        duration_s: length of the schedule.
        asked_rate_rps: what was asked for; None for a trace at its own speed.
        asked_cv: what was asked for; None for a trace.
        source: where arrivals and lengths come from, in words.
    """

    times_s: list[float]
    lengths: list[lengths.Length]
    bodies: list[bytes]
    duration_s: float
    asked_rate_rps: float | None
    asked_cv: float | None
    source: str


def plan(options: LoadOptions, target: Target) -> Plan:
    """Makes the schedule of checked options.

    Raises:
        OptionError: if no schedule comes out, or one that is too fast.
        TraceError: if the trace cannot be used.
    """
    try:
        made = (
            _synthetic(options, target)
            if options.trace is None
            else _replayed(options, options.trace, target)
        )
    except arrivals.ArrivalError as error:
        raise OptionError(str(error)) from error
    rate_rps = len(made.times_s) / made.duration_s if made.duration_s > 0 else 0.0
    if rate_rps > options.max_rate_rps:
        raise OptionError(
            f"the schedule's rate {rate_rps:.1f}/s is above --max-rate {options.max_rate_rps:g}"
        )
    return made


def _bodies(target: Target, sizes: list[lengths.Length], seed: int) -> list[bytes]:
    return [target.body(length, seed, index) for index, length in enumerate(sizes)]


def drawn_sizes(options: LoadOptions, target: Target, count: int, seed: int) -> list[lengths.Length]:
    """Token lengths of requests without a trace; where requests have none, the least ones stand for them."""
    if not target.has_lengths:
        return [lengths.Length(1, 1)] * count
    return lengths.drawn(count, seed=seed, divisor=options.scale_lengths, bound_tokens=options.context_tokens)


def _synthetic(options: LoadOptions, target: Target) -> Plan:
    if options.rate_rps is None:
        raise OptionError("--rate is needed without --trace")
    cv = DEFAULT_CV if options.cv is None else options.cv
    duration_s = options.duration_s or DEFAULT_DURATION_S
    times = arrivals.synthetic(options.rate_rps, cv, duration_s, options.seed)
    sizes = drawn_sizes(options, target, len(times), options.seed)
    kind = {0.0: "constant spacing", 1.0: "Poisson arrivals"}.get(cv, f"gamma arrivals of CV {cv:g}")
    if target.has_lengths:
        source = f"{kind}; token lengths of the Azure LLM 2023 conversation trace / {options.scale_lengths:g}"
    else:
        source = f"{kind}; {target.sends}"
    bodies = _bodies(target, sizes, options.seed)
    return Plan(times.tolist(), sizes, bodies, duration_s, options.rate_rps, cv, source)


def _replayed(options: LoadOptions, path: Path, target: Target) -> Plan:
    rows = _wanted(options, path)
    offsets = [row.at_s for row in rows]
    if options.rate_rps is not None:
        times = arrivals.at_rate(offsets, options.rate_rps, options.duration_s)
        how = f"rescaled to {options.rate_rps:g}/s"
        duration_s = len(times) / options.rate_rps
    else:
        speed = options.speed or 1.0
        times = arrivals.at_speed(offsets, speed, options.duration_s)
        how = f"at {speed:g}x speed"
        duration_s = float(times[-1]) if options.duration_s is None else options.duration_s
    sizes = [lengths.Length(1, 1)] * len(times)
    if target.has_lengths:
        sizes = lengths.of_rows(
            rows[: len(times)], divisor=options.scale_lengths, bound_tokens=options.context_tokens
        )
    sizes_from = f"token lengths / {options.scale_lengths:g}" if target.has_lengths else target.sends
    source = f"trace {path.name}, first {len(times)} rows {how}; {sizes_from}"
    bodies = _bodies(target, sizes, options.seed)
    return Plan(times.tolist(), sizes, bodies, duration_s, options.rate_rps, None, source)


def _wanted(options: LoadOptions, path: Path) -> list[trace.TraceRow]:
    """Reads no more of the file than the schedule needs, and refuses what memory would not hold."""
    rows = trace.read(path)
    if options.duration_s is not None and options.rate_rps is not None:
        rows = itertools.islice(rows, max(round(options.rate_rps * options.duration_s), 1))
    elif options.duration_s is not None:
        end_s = options.duration_s * (options.speed or 1.0)
        rows = itertools.takewhile(lambda row: row.at_s <= end_s, rows)
    kept = list(itertools.islice(rows, MAX_REQUESTS + 1))
    if len(kept) > MAX_REQUESTS:
        raise OptionError(f"--trace {path}: more than {MAX_REQUESTS} requests; bound the run with --duration")
    return kept
