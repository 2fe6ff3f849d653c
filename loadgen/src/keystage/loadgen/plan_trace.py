"""A trace's part of a plan: which invocations are sent, when, and to which pipeline.

Comes after `traces` and before `plan`. Invocations are read block by block, no more of them than
the schedule needs, and kept as columns.

The speed divides times; the rate takes the first round(rate * duration) arrivals and stretches them to
that rate, the shape kept. Times count from the start of the trace or of `--from`, so that minutes stay
minutes; a trace that begins with whole minutes without an arrival begins after them.
"""

from __future__ import annotations

import array
import dataclasses
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystage.loadgen import arrivals
from keystage.loadgen.arrivals import MAX_ARRIVALS, Floats
from keystage.loadgen.mapping import Mapping, MappingError, mapping, unseen
from keystage.loadgen.options import DEFAULT_WITHIN, LoadOptions, OptionError, TooFewArrivalsError
from keystage.loadgen.target import Target
from keystage.loadgen.traces import Selection, Trace, open_trace
from keystage.loadgen.traces.model import Block

Ints = npt.NDArray[np.int32]

_MINUTE_S = 60.0
_MOST_TOKENS = 2**31 - 1
_SILENT_RATIO = 0.01
"""Share of a run that may be silent at its end without a word: no arrivals reach the very end."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """What is sent of a trace.

    Attributes:
        times_s: send times, ascending, shape (n,).
        duration_s: length of the schedule.
        context_tokens: shape (n,); None for a trace of functions, so generated_tokens.
        generated_tokens: see context_tokens.
        targets: index into addresses, shape (n,).
        addresses: base addresses of the pipelines.
        source: in words.
        notes: what the reader must know.
    """

    times_s: Floats
    duration_s: float
    context_tokens: Ints | None
    generated_tokens: Ints | None
    targets: array.array[int]
    addresses: tuple[str, ...]
    source: str
    notes: tuple[str, ...]


class _Columns:
    """Invocations as columns, in parts as they are read."""

    def __init__(self, mapped: Mapping | None) -> None:
        self._mapped = mapped
        self._target_of: dict[str, int] = {}
        self.count = 0
        self.is_whole = False  # the file ended before the schedule did
        self.at_s: list[Floats] = []
        self.context: list[Ints] = []
        self.generated: list[Ints] = []
        self.targets: list[Ints] = []

    @property
    def functions(self) -> set[str]:
        """Those that were called."""
        return set(self._target_of)

    def add(self, block: Block, count: int) -> None:
        """The first `count` invocations of a block."""
        self.count += count
        self.at_s.append(block.at_s[:count])
        codes = block.function[:count]
        targets = np.zeros(len(block.functions), np.int32)
        for code in np.unique(codes).tolist():
            targets[code] = self._target(block.functions[code].name)
        self.targets.append(targets[codes])
        if block.context_tokens is not None and block.generated_tokens is not None:
            for kept, column in (
                (self.context, block.context_tokens),
                (self.generated, block.generated_tokens),
            ):
                kept.append(np.minimum(column[:count], _MOST_TOKENS).astype(np.int32))

    def _target(self, function: str) -> int:
        found = self._target_of.get(function)
        if found is None:
            found = 0 if self._mapped is None else self._mapped.target(function)
            self._target_of[function] = found
        return found


def selection_of(options: LoadOptions) -> Selection:
    """Which part of the trace is asked for."""
    return Selection(
        functions=options.functions,
        apps=options.apps,
        triggers=options.triggers,
        top=options.top,
        from_s=options.from_s or 0.0,
        to_s=options.to_s,
    )


def replayed(options: LoadOptions, path: Path, target: Target) -> Replayed:
    """Reads what a run sends of a trace.

    Raises:
        OptionError: nothing is selected, too much, or its functions cannot be mapped.
        ArrivalError: the rate cannot be reached.
        TraceError: the file cannot be used.
    """
    trace = open_trace(path, kind=options.trace_kind)
    if options.within is not None and trace.facts.minutes is None:
        raise OptionError(
            f"--within {options.within} turns counts per minute into arrivals; {path.name} is of kind "
            f"{trace.kind} and has a time in each row"
        )
    try:
        mapped = mapping(options.mapping) if options.mapping else None
        columns = _read(options, trace, mapped)
    except MappingError as error:
        raise OptionError(str(error)) from error
    if not columns.count:
        raise OptionError(f"--trace {path}: no invocation is selected, or none within --duration")
    times, duration_s, how = _scheduled(options, columns)
    count = len(times)
    wanted = 0 if options.rate_rps is None else round(options.rate_rps * (options.duration_s or 0.0))
    if options.search_rate and count < wanted:
        raise TooFewArrivalsError(
            count,
            f"--trace {path} has {count} invocations, a window of {options.duration_s:g} s at "
            f"{options.rate_rps:g}/s takes {wanted}: take a shorter --duration or a lower --rate",
        )
    context, generated = (
        np.concatenate(parts)[:count] if parts else None for parts in (columns.context, columns.generated)
    )
    notes = [f"trace: {told}" for told in trace.facts.notes.values()]
    if count < wanted:
        notes.append(f"trace: its {count} invocations last {duration_s:.4g} s at this rate, not --duration")
    if options.rate_rps is None and columns.is_whole and times[-1] < (1 - _SILENT_RATIO) * duration_s:
        notes.append(
            f"trace: its last invocation is at {times[-1]:.4g} s at {options.speed or 1.0:g}x speed; "
            f"nothing is sent from there to --duration ({duration_s:g} s)"
        )
    if mapped is not None and (missing := unseen(mapped, columns.functions)):
        notes.append(missing)
    whose = f", functions mapped to {len(mapped.pipelines)} pipelines" if mapped is not None else ""
    return Replayed(
        times,
        duration_s,
        context,
        generated,
        array.array("i", np.concatenate(columns.targets)[:count].tobytes()),
        (target.base_url,) if mapped is None else mapped.addresses(target.base_url),
        f"trace {path.name} ({trace.kind}), first {count} rows {how}{whose}",
        tuple(notes),
    )


def _read(options: LoadOptions, trace: Trace, mapped: Mapping | None) -> _Columns:
    """Reads no more of the file than the schedule needs, and refuses what memory would not hold."""
    wanted, end_s = MAX_ARRIVALS + 1, math.inf
    if options.duration_s is not None and options.rate_rps is not None:
        wanted = min(max(round(options.rate_rps * options.duration_s), 1), wanted)
    elif options.duration_s is not None:
        end_s = options.duration_s * (options.speed or 1.0)
    within = DEFAULT_WITHIN if options.within is None else options.within
    columns = _Columns(mapped)
    for block in trace.blocks(selection_of(options), within=within, seed=options.seed):
        if mapped is not None and not block.functions[int(block.function[0])].name:
            raise OptionError(f"--map needs a trace of functions, got one of kind {trace.kind}")
        if not columns.count:
            end_s += _skipped_s(options, float(block.at_s[0]))
        count = min(int(np.searchsorted(block.at_s, end_s, side="left")), wanted - columns.count)
        columns.add(block, count)
        if columns.count > MAX_ARRIVALS:
            raise OptionError(
                f"--trace {trace.path}: more than {MAX_ARRIVALS} requests; bound the run with --duration"
            )
        if count < len(block.at_s) or columns.count == wanted:
            break
    else:
        columns.is_whole = True
    return columns


def _skipped_s(options: LoadOptions, first_s: float) -> float:
    """Silent minutes before the first invocation, left out where no window was asked for."""
    return _MINUTE_S * (first_s // _MINUTE_S) if options.from_s is None else 0.0


def _scheduled(options: LoadOptions, columns: _Columns) -> tuple[Floats, float, str]:
    """Times, the schedule's length, and how it was made, in words."""
    offsets = np.concatenate(columns.at_s)
    skipped_s = _skipped_s(options, float(offsets[0]))
    offsets = offsets - skipped_s
    silent = f", {skipped_s / _MINUTE_S:.0f} silent minutes before them left out" if skipped_s else ""
    if options.rate_rps is not None:
        times = arrivals.at_rate(offsets, options.rate_rps, options.duration_s)
        return times, len(times) / options.rate_rps, f"rescaled to {options.rate_rps:g}/s{silent}"
    speed = options.speed or 1.0
    times = offsets / speed
    duration_s = float(times[-1]) if options.duration_s is None else options.duration_s
    return times, duration_s, f"at {speed:g}x speed{silent}"
