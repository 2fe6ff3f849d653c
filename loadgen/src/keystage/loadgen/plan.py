"""From options to a schedule: when each request is sent, where to, and with which body.

Comes after `options`, uses `arrivals_process`, `plan_trace`, `lengths` and `target`, and hands the
sender a complete schedule, whatever the target's speed. Reads the trace file and does no other IO.

Memory: a planned request takes 21 bytes (time 8, lengths 9, target 4): 420 MB for the most there may
be, 20,000,000. Bodies are made when they are asked for, from the seed and the request's index, and are
not kept.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Sequence
from typing import overload

from keystage.loadgen import lengths, plan_trace
from keystage.loadgen.arrivals import ArrivalError, Floats
from keystage.loadgen.arrivals_files import with_files
from keystage.loadgen.arrivals_process import Process, gamma
from keystage.loadgen.arrivals_spec import resolved
from keystage.loadgen.options import DEFAULT_CV, DEFAULT_DURATION_S, LoadOptions, OptionError
from keystage.loadgen.target import Target


class Bodies(Sequence[bytes]):
    """Request bodies, made one at a time: the same index gives the same body. Slices are made as lazily."""

    __slots__ = ("_indices", "_seed", "_sizes", "_target")

    def __init__(
        self, target: Target, sizes: Sequence[lengths.Length], seed: int, indices: range | None = None
    ) -> None:
        """Bodies of a run.

        Args:
            target: writes them.
            sizes: length of each request of the run; begun again where there are more requests.
            seed: of the run.
            indices: which requests; as many as sizes if None.
        """
        self._target, self._sizes, self._seed = target, sizes, seed
        self._indices = range(len(sizes)) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Bodies: ...

    def __getitem__(self, index: int | slice) -> bytes | Bodies:
        if isinstance(index, slice):
            return Bodies(self._target, self._sizes, self._seed, self._indices[index])
        place = self._indices[index]
        return self._target.body(self._sizes[place % len(self._sizes)], self._seed, place)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A schedule of n requests.

    Attributes:
        times_s: send times, ascending, float64, shape (n,).
        lengths: asked token lengths, one per request.
        bodies: request bodies, one per request.
        duration_s: length of the schedule.
        asked_rate_rps: what was asked for; None for a trace at its own speed.
        asked_cv: what was asked for; None where that is not one number (a trace, a sum, a profile).
        source: where arrivals and lengths come from, in words.
        addresses: base addresses of the pipelines, as `Target.base_url`; empty for the target's own.
        targets: index into addresses, one per request.
        notes: what the reader of the report must know of it.
    """

    times_s: Floats
    lengths: Sequence[lengths.Length]
    bodies: Sequence[bytes]
    duration_s: float
    asked_rate_rps: float | None
    asked_cv: float | None
    source: str
    addresses: tuple[str, ...] = ()
    targets: Sequence[int] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Every request goes to address 0 where nothing else is said."""
        if not self.targets:
            object.__setattr__(self, "targets", array.array("i", bytes(4 * len(self.times_s))))
        assert len(self.times_s) == len(self.lengths) == len(self.bodies) == len(self.targets)


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
            else _replayed(options, plan_trace.replayed(options, options.trace, target), target)
        )
    except ArrivalError as error:
        flag = "" if options.arrivals is None else "--arrivals "
        raise OptionError(f"{flag}{error}") from error
    rate_rps = len(made.times_s) / made.duration_s if made.duration_s > 0 else 0.0
    if rate_rps > options.max_rate_rps:
        raise OptionError(
            f"the schedule's rate {rate_rps:.1f}/s is above --max-rate {options.max_rate_rps:g}"
        )
    return made


def drawn_sizes(options: LoadOptions, target: Target, count: int, seed: int) -> Sequence[lengths.Length]:
    """Token lengths of requests without a trace; where requests have none, the least ones stand for them."""
    if not target.has_lengths:
        return lengths.same(lengths.Length(1, 1), count)
    return lengths.drawn(count, seed=seed, divisor=options.scale_lengths, bound_tokens=options.context_tokens)


def process_of(options: LoadOptions) -> Process:
    """The arrival process of `--arrivals`, or of `--cv`, with its files read.

    Raises:
        ArrivalError: a specification or file that cannot be used.
    """
    if options.arrivals is None:
        return gamma(DEFAULT_CV if options.cv is None else options.cv)
    return with_files(resolved(options.arrivals, options.rate_rps, is_search=options.search_rate))


def _synthetic(options: LoadOptions, target: Target) -> Plan:
    if options.rate_rps is None and options.arrivals is None:
        raise OptionError("--rate is needed without --trace")
    process = process_of(options)
    duration_s = options.duration_s or process.own_duration_s(options.rate_rps) or DEFAULT_DURATION_S
    times = process.times(options.rate_rps, duration_s, options.seed)
    sizes = drawn_sizes(options, target, len(times), options.seed)
    if target.has_lengths:
        sized = f"token lengths of the Azure LLM 2023 conversation trace / {options.scale_lengths:g}"
    else:
        sized = target.sends
    return Plan(
        times,
        sizes,
        Bodies(target, sizes, options.seed),
        duration_s,
        process.asked_rate_rps(options.rate_rps, duration_s),
        process.cv,
        f"{process.description}; {sized}",
        (target.base_url,),
        notes=process.early_ends(options.rate_rps, duration_s),
    )


def _replayed(options: LoadOptions, taken: plan_trace.Replayed, target: Target) -> Plan:
    sizes: Sequence[lengths.Length]
    sized = f"token lengths / {options.scale_lengths:g}"
    if not target.has_lengths:
        sizes, sized = lengths.same(lengths.Length(1, 1), len(taken.times_s)), target.sends
    elif taken.context_tokens is None or taken.generated_tokens is None:
        sizes = drawn_sizes(options, target, len(taken.times_s), options.seed)
        sized = f"token lengths of the Azure LLM 2023 conversation trace / {options.scale_lengths:g}"
    else:
        sizes = lengths.fitted(
            taken.context_tokens,
            taken.generated_tokens,
            divisor=options.scale_lengths,
            bound_tokens=options.context_tokens,
        )
    return Plan(
        taken.times_s,
        sizes,
        Bodies(target, sizes, options.seed),
        taken.duration_s,
        options.rate_rps,
        None,
        f"{taken.source}; {sized}",
        taken.addresses,
        taken.targets,
        taken.notes,
    )
