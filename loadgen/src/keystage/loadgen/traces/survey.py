"""What a trace looks like: one pass over its blocks, in memory that does not grow with its rows.

Definitions. Rate: invocations over the window, where the window is known (2019: the minute columns),
else (n - 1) over the time from first to last. CV of gaps: standard deviation over mean of the
inter-arrival times, all functions merged. CV of counts and index of dispersion (variance over mean;
1 for a Poisson process at every scale): of the numbers of arrivals in adjoining whole bins of a
scale. For 2019 everything below a minute, the peak second too, depends on how counts became
arrivals; what is at a minute and above is the file's own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from keystage.loadgen.traces.model import Block, Floats, Function, Selection
from keystage.loadgen.traces.moments import Bins, Digest, Moments, Series
from keystage.loadgen.traces.opening import POISSON, Trace

SCALES_S = (1.0, 10.0, 60.0, 600.0)
PROBABILITIES = (0.0, 0.01, 0.05, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 0.999, 1.0)
GAP_EDGES_S: Floats = np.logspace(-7, 6, 13 * 10 + 1)
TOP = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """Counts of arrivals in bins of one width.

    Attributes:
        scale_s: width of a bin.
        bins: whole bins.
        mean: arrivals a bin.
        cv: coefficient of variation of the counts; None below two bins.
        dispersion: variance over mean; None below two bins.
        peak: most arrivals in a bin, a broken one at the end included.
        peak_at_s: where that bin starts.
    """

    scale_s: float
    bins: int
    mean: float
    cv: float | None
    dispersion: float | None
    peak: int
    peak_at_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution: count, mean, and (probability, value) pairs, values to three digits."""

    count: int
    mean: float
    at: tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TopFunction:
    """One of the functions with most invocations."""

    function: str
    app: str
    trigger: str
    invocations: int
    share_ratio: float
    rate_rps: float | None


@dataclasses.dataclass(frozen=True)
class Survey:
    """What a trace looks like; JSON comes from `document`.

    Attributes:
        path: the file.
        kind: its format.
        attribution: whom to cite.
        arrivals: where the times come from, in words.
        notes: repairs and peculiarities.
        rows: invocations selected.
        first_s: time of the first, from the start of the trace or window; None without rows.
        last_s: of the last.
        window_s: length that rates refer to.
        rate_rps: mean arrivals a second; None where there is no window.
        gap_cv: CV of inter-arrival times; None below two gaps.
        functions: different functions that were invoked; 0 in traces of requests.
        apps: different apps, likewise.
        triggers: invocations by trigger.
        scales: counts at SCALES_S.
        duration_s, memory_mb, context_tokens, generated_tokens: over invocations; None if unknown.
        top: the functions with most invocations.
        series: counts over time, for plots.
        gap_counts: gaps in GAP_EDGES_S, for plots.
        ranked: invocations by function, descending, for plots.
    """

    path: str
    kind: str
    attribution: str
    arrivals: str
    notes: tuple[str, ...]
    rows: int
    first_s: float | None
    last_s: float | None
    window_s: float
    rate_rps: float | None
    gap_cv: float | None
    functions: int
    apps: int
    triggers: dict[str, int]
    scales: tuple[Scale, ...]
    duration_s: Quantiles | None
    memory_mb: Quantiles | None
    context_tokens: Quantiles | None
    generated_tokens: Quantiles | None
    top: tuple[TopFunction, ...]
    series: Series
    gap_counts: npt.NDArray[np.int64]
    ranked: npt.NDArray[np.int64]

    def document(self) -> dict[str, object]:
        """All but what is for plots, in plain types."""
        plain: dict[str, object] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("series", "gap_counts", "ranked"):
                continue
            if isinstance(value, tuple):
                plain[field.name] = [v if isinstance(v, str) else dataclasses.asdict(v) for v in value]
            else:
                plain[field.name] = dataclasses.asdict(value) if isinstance(value, Quantiles) else value
        return plain


class _Pass:
    """What one pass gathers."""

    def __init__(self, from_s: float | None) -> None:
        self.rows = 0
        self.first_s: float | None = None
        self.last_s = 0.0
        self.gaps = Moments()
        self.gap_counts = np.zeros(len(GAP_EDGES_S) + 1, np.int64)
        self.by_code = np.zeros(0, np.int64)
        self.functions: list[Function] = []
        self.digests = {name: Digest() for name in ("duration_s", "context_tokens", "generated_tokens")}
        self._from_s = from_s
        self.bins: list[Bins] = []
        self.series: Series = Series(0.0)

    def add(self, block: Block) -> None:
        """Takes a block with at least one row."""
        at_s = block.at_s
        if self.first_s is None:
            self.first_s = float(at_s[0])
            start_s = self.first_s if self._from_s is None else self._from_s
            self.bins = [Bins(scale_s, start_s) for scale_s in SCALES_S]
            self.series = Series(start_s)
            gaps = np.diff(at_s)
        else:
            gaps = np.diff(at_s, prepend=self.last_s)
        self.last_s = float(at_s[-1])
        self.rows += len(at_s)
        self.gaps.add(gaps)
        places = np.searchsorted(GAP_EDGES_S, gaps, side="right")
        self.gap_counts += np.bincount(places, minlength=len(self.gap_counts))
        for bins in self.bins:
            bins.add(at_s)
        self.series.add(at_s)
        counts = np.bincount(block.function, minlength=len(self.by_code))
        counts[: len(self.by_code)] += self.by_code
        self.by_code, self.functions = counts, block.functions
        for name, digest in self.digests.items():
            column = getattr(block, name)
            if column is not None:
                digest.add(column[~np.isnan(column)] if column.dtype == np.float64 else column)


def survey(
    trace: Trace, selection: Selection | None = None, *, within: str = POISSON, seed: int = 0
) -> Survey:
    """Reads the selected part of a trace once (twice for the top functions) and describes it.

    Raises:
        ValueError: an unknown `within`.
        TraceError: a file that cannot be used.
    """
    selection = selection or Selection()
    end_s = trace.span_s
    if end_s is not None:
        end_s = max((end_s if selection.to_s is None else min(selection.to_s, end_s)) - selection.from_s, 0.0)
    seen = _Pass(None if end_s is None else 0.0)
    for block in trace.blocks(selection, within=within, seed=seed):
        seen.add(block)
    first_s = seen.first_s
    if end_s is None:
        window_s = 0.0 if first_s is None else seen.last_s - first_s
        counted = seen.rows - 1
        end_s = seen.last_s
    else:
        window_s, counted = end_s, seen.rows
    for bins in seen.bins:
        bins.close(end_s)
    is_drawn = trace.facts.minutes is not None
    by_name = _by_name(seen)
    return Survey(
        path=str(trace.path),
        kind=trace.kind,
        attribution=trace.facts.attribution,
        arrivals=f"{within} within each minute, seed {seed}" if is_drawn else "times of the file",
        notes=tuple(trace.facts.notes.values()),
        rows=seen.rows,
        first_s=first_s,
        last_s=None if first_s is None else seen.last_s,
        window_s=window_s,
        rate_rps=counted / window_s if window_s > 0 else None,
        gap_cv=seen.gaps.cv,
        functions=len(by_name),
        apps=len({function.app for function, _ in by_name.values()}),
        triggers=_by_trigger(seen),
        scales=tuple(_scale(bins) for bins in seen.bins),
        duration_s=_quantiles(seen.digests["duration_s"]),
        memory_mb=_quantiles(_memory(seen)),
        context_tokens=_quantiles(seen.digests["context_tokens"]),
        generated_tokens=_quantiles(seen.digests["generated_tokens"]),
        top=_top(by_name, seen.rows, window_s),
        series=seen.series,
        gap_counts=seen.gap_counts,
        ranked=np.array(sorted((count for _, count in by_name.values()), reverse=True), np.int64),
    )


def _scale(bins: Bins) -> Scale:
    moments = bins.moments
    return Scale(
        bins.width_s, moments.count, moments.mean, moments.cv, moments.dispersion, bins.peak, bins.peak_at_s
    )


def _quantiles(digest: Digest) -> Quantiles | None:
    if not digest.count:
        return None
    values = digest.quantiles(PROBABILITIES)
    return Quantiles(digest.count, digest.mean, tuple(zip(PROBABILITIES, values, strict=True)))


def _memory(seen: _Pass) -> Digest:
    digest = Digest()
    known = [
        (function.memory_mb, count)
        for function, count in zip(seen.functions, seen.by_code.tolist(), strict=False)
        if function.memory_mb is not None and count
    ]
    if known:
        values, weights = zip(*known, strict=True)
        digest.add(np.array(values, np.float64), np.array(weights, np.int64))
    return digest


def _by_name(seen: _Pass) -> dict[str, tuple[Function, int]]:
    found: dict[str, tuple[Function, int]] = {}
    for function, count in zip(seen.functions, seen.by_code.tolist(), strict=False):
        if function.name and count:
            before = found.get(function.name, (function, 0))
            found[function.name] = (before[0], before[1] + count)
    return found


def _by_trigger(seen: _Pass) -> dict[str, int]:
    found: Counter[str] = Counter()
    for function, count in zip(seen.functions, seen.by_code.tolist(), strict=False):
        if function.trigger:
            found[function.trigger] += count
    return dict(found.most_common())


def _top(by_name: dict[str, tuple[Function, int]], rows: int, window_s: float) -> tuple[TopFunction, ...]:
    ranked: Sequence[tuple[Function, int]] = sorted(
        by_name.values(), key=lambda entry: (-entry[1], entry[0].name)
    )
    return tuple(
        TopFunction(
            function.name,
            function.app,
            function.trigger,
            count,
            count / rows,
            count / window_s if window_s > 0 else None,
        )
        for function, count in ranked[:TOP]
    )
