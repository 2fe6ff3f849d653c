"""What two runs differ in, measure by measure, with intervals and verdicts. Pure.

Comes after `measures` and uses `resampling` and `intervals`; `compare` reads the runs and asks.

Family-wise error: with m intervals formed, each has the error alpha / m (Bonferroni), so that two runs of
one system are called different in any of them with at most alpha. A verdict says what B is beside A:
`better`, `worse`, `no difference` (the interval holds 0: none was found, not: there is none), `too few data`
and `undefined` (a percentile that falls on failed requests, or a mean that is the better one of a run that
failed more: slow requests that are lost leave a lower mean).

Shares of failed requests: an exact interval, never too narrow for independent requests; since failures
come in clumps it is widened to the block bootstrap's where that one reaches further. A replicate that drew no
request at all has no share and says nothing. So few requests that even none against all could not be
told apart are `too few data`, and so is an interval that has no end on either side.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from keystage.loadgen import measures, resampling
from keystage.loadgen.intervals import share_difference
from keystage.loadgen.measures import Slo
from keystage.loadgen.resampling import Blocks, Counts, Floats, Sample, Weights
from keystage.loadgen.sender import Row

TIMES = ("latency", "ttft", "tpot")
SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
METRICS = (*(f"{time}_{what}" for time in TIMES for what in (*SHARES, "mean")), "goodput", "failure_share")

TAIL_REQUESTS = 10
"""Requests on either side of a percentile, in both runs, below which nothing is said of it: 1,000 for p99."""

MEAN_REQUESTS = 20

ALPHA = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One run.

    Attributes:
        rows: in the order of the schedule, at least one.
        span_s: length of the schedule.
        streams: whether answers have a first token.
    """

    rows: Sequence[Row]
    span_s: float
    streams: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One measure.

    Attributes:
        metric: of `METRICS`.
        unit: `s`, `requests/s` or `` (a share).
        a: of the one run, None where it has none.
        b: of the other.
        difference: b - a.
        relative: difference / a, None at a = 0.
        low: the difference lies between, but for the error stated; None for no bound.
        high: likewise.
        verdict: see the module.
        because: in words, for `too few data` and `undefined`.
    """

    metric: str
    unit: str
    a: float | None
    b: float | None
    difference: float | None = None
    relative: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str = "too few data"
    because: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs beside each other.

    Attributes:
        a: the one run.
        b: the other.
        requests: in a and b.
        confidence: that no interval misses, all together.
        intervals: formed; each has the error (1 - confidence) / intervals.
        blocks: how time was cut.
        replicates: of the bootstrap.
        seed: of the bootstrap.
        slo: what goodput means.
        lines: one per measure.
        notes: what the reader must know.
    """

    a: str
    b: str
    requests: tuple[int, int]
    confidence: float
    intervals: int
    blocks: Blocks
    replicates: int
    seed: int
    slo: Slo
    lines: list[Line]
    notes: list[str]


def wanted(names: Sequence[str]) -> tuple[str, ...]:
    """Metrics named, whole or by group (`latency`); all if none is.

    Raises:
        ValueError: a name that is none.
    """
    chosen = []
    for name in names:
        found = [metric for metric in METRICS if metric == name or metric.startswith(f"{name}_")]
        if not found or name == "failure":
            raise ValueError(f"--metric {name!r} is none of {', '.join((*TIMES, *METRICS))}")
        chosen += found
    return tuple(metric for metric in METRICS if metric in chosen) or METRICS


def compared(
    a: Side,
    b: Side,
    *,
    names: tuple[str, str],
    slo: Slo,
    is_paired: bool,
    metrics: Sequence[str] = METRICS,
    alpha: float = ALPHA,
    block_s: float | None = None,
    seed: int = 0,
    replicates: int = resampling.REPLICATES,
) -> Comparison:
    """Compares two runs.

    Args:
        a: the one.
        b: the other.
        names: what they are called.
        slo: what goodput means; without bounds there is none.
        is_paired: both had one plan, request by request.
        metrics: of `METRICS`.
        alpha: error of all intervals together.
        block_s: length of a block of the bootstrap, derived if None.
        seed: of the bootstrap.
        replicates: of the bootstrap.
    """
    before, after = (_sample(side, measures.latency_s, a.span_s) for side in (a, b))
    blocks = resampling.cut(before, after, a.span_s, is_paired=is_paired, block_s=block_s)
    weights = Weights(blocks, seed, replicates)
    jobs = _jobs(a, b, slo, metrics, weights, blocks.too_few)
    formed = sum(job.differences is not None for job in jobs)
    lines = [_judged(job, alpha / max(formed, 1), blocks) for job in jobs]
    return Comparison(
        a=names[0],
        b=names[1],
        requests=(len(a.rows), len(b.rows)),
        confidence=1 - alpha,
        intervals=formed,
        blocks=blocks,
        replicates=replicates,
        seed=seed,
        slo=slo,
        lines=lines,
        notes=[],
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """A measure before its interval: the error of each is known when all are counted."""

    line: Line
    higher_is_better: bool = False
    differences: Floats | None = None
    shares: tuple[tuple[int, int], tuple[int, int]] | None = None
    more_failed: str = ""


def _sample(side: Side, of: Callable[[Row], float | None], span_s: float) -> Sample:
    """A measure of each request that has it; failed ones are infinitely late. Times are those of `span_s`."""
    taken = [(row.scheduled_s, of(row) if row.is_served else math.inf) for row in side.rows]
    kept = [(at_s, value) for at_s, value in taken if value is not None]
    made = np.array(kept, dtype=np.float64).reshape(-1, 2)
    return Sample(made[:, 0] * (span_s / side.span_s), made[:, 1])


def _jobs(a: Side, b: Side, slo: Slo, metrics: Sequence[str], weights: Weights, too_few: str) -> list[_Job]:
    made: list[_Job] = []
    of = {"latency": measures.latency_s, "ttft": measures.ttft_s, "tpot": measures.tpot_s}
    for name in TIMES:
        asked = [metric for metric in metrics if metric.startswith(f"{name}_")]
        if asked and (name == "latency" or (a.streams and b.streams)):
            pair = (_sample(a, of[name], a.span_s), _sample(b, of[name], a.span_s))
            made += _times(asked, *pair, weights, too_few)
    if "goodput" in metrics and slo.is_set:
        made.append(_goodput(a, b, slo, weights, too_few))
    if "failure_share" in metrics:
        made.append(_failures(a, b, weights, too_few))
    return made


def _times(asked: Sequence[str], a: Sample, b: Sample, weights: Weights, too_few: str) -> list[_Job]:
    ranked = [metric for metric in asked if metric.rpartition("_")[2] in SHARES]
    shares = [SHARES[metric.rpartition("_")[2]] for metric in ranked]
    spread: Floats | None = None
    if ranked and not too_few and len(a.values) and len(b.values):

        def of(sample: Sample, drawn: Counts, blocks: Blocks) -> Floats:
            return resampling.quantiles(sample, drawn, blocks, shares)

        spread = resampling.spread(a, b, weights, of)
    made = []
    for metric in asked:
        if metric in ranked:
            k = ranked.index(metric)
            points = (_rank(a.values, shares[k]), _rank(b.values, shares[k]))
            reason = too_few or _too_few_ranks(a.values, b.values, shares[k])
            differences = None if spread is None else spread[:, k]
        else:
            points = (_mean(a.values), _mean(b.values))
            served = min(int(np.isfinite(s.values).sum()) for s in (a, b))
            reason = too_few or (
                f"{served} served requests, at least {MEAN_REQUESTS}" if served < MEAN_REQUESTS else ""
            )
            differences = None if too_few else resampling.spread(a, b, weights, resampling.means)
        job = _time_job(metric, points, reason, differences)
        made.append(job if metric in ranked else dataclasses.replace(job, more_failed=_more_failed(a, b)))
    return made


def _time_job(
    metric: str, points: tuple[float | None, float | None], reason: str, differences: Floats | None
) -> _Job:
    line = _line(metric, "s", *points)
    if reason:
        return _Job(dataclasses.replace(line, because=reason))
    if line.difference is None:
        who = " and ".join(name for name, point in zip("AB", points, strict=True) if point is None)
        told = f"it falls on failed requests in {who}: see failure_share"
        return _Job(dataclasses.replace(line, verdict="undefined", because=told))
    return _Job(line, differences=differences)


def _line(metric: str, unit: str, a: float | None, b: float | None) -> Line:
    if a is None or b is None:
        return Line(metric, unit, a, b)
    return Line(metric, unit, a, b, b - a, (b - a) / a if a else None)


def _rank(values: Floats, share: float) -> float | None:
    failed = int(np.isinf(values).sum())
    if len(values) == failed:
        return None
    place = max(math.ceil(share * len(values) - 1e-9), 1) - 1
    found = float(np.partition(values, place)[place])
    return found if math.isfinite(found) else None


def _more_failed(a: Sample, b: Sample) -> str:
    """Which run lost the larger share, empty if neither: a mean leaves out what was lost."""
    lost = [float(np.isinf(s.values).mean()) if len(s.values) else 0.0 for s in (a, b)]
    return "" if lost[0] == lost[1] else "AB"[lost[1] > lost[0]]


def _mean(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _too_few_ranks(a: Floats, b: Floats, share: float) -> str:
    count = min(len(a), len(b))
    needed = math.ceil(TAIL_REQUESTS / min(share, 1 - share) - 1e-9)
    return f"{count} requests, at least {needed}" if count < needed else ""


def _goodput(a: Side, b: Side, slo: Slo, weights: Weights, too_few: str) -> _Job:
    met = [_sample(side, lambda row: float(measures.meets(row, slo)), a.span_s) for side in (a, b)]
    lasted_s = [measures.makespan_s(side.rows, side.span_s) for side in (a, b)]
    kept = [Sample(s.at_s, np.where(np.isinf(s.values), 0.0, s.values)) for s in met]
    points = [float(s.values.sum()) / lasted for s, lasted in zip(kept, lasted_s, strict=True)]
    line = _line("goodput", "requests/s", *points)
    if too_few:
        return _Job(dataclasses.replace(line, because=too_few), higher_is_better=True)
    before, after = (Sample(s.at_s, s.values / lasted) for s, lasted in zip(kept, lasted_s, strict=True))
    return _Job(line, True, resampling.spread(before, after, weights, resampling.totals))


def _failures(a: Side, b: Side, weights: Weights, too_few: str) -> _Job:
    lost = [sum(not row.is_served for row in side.rows) for side in (a, b)]
    counts = [len(side.rows) for side in (a, b)]
    line = _line("failure_share", "", lost[0] / counts[0], lost[1] / counts[1])
    if too_few:
        return _Job(dataclasses.replace(line, because=too_few))
    failed = [_sample(side, lambda _: 0.0, a.span_s) for side in (a, b)]
    before, after = (Sample(s.at_s, np.isinf(s.values).astype(np.float64)) for s in failed)
    spread = resampling.spread(before, after, weights, resampling.means)
    drawn = spread[~np.isnan(spread)]
    return _Job(line, False, drawn if len(drawn) else spread, ((lost[0], counts[0]), (lost[1], counts[1])))


def _judged(job: _Job, alpha: float, blocks: Blocks) -> Line:
    line = job.line
    if job.differences is None or line.difference is None:
        return line
    low, high = resampling.interval(job.differences, line.difference, alpha, blocks)
    if job.shares is not None:
        (_, count_a), (_, count_b) = job.shares
        if share_difference((0, count_a), (count_b, count_b), alpha)[0] <= 0:
            told = f"{count_a} and {count_b} requests: even none failed against all failed would be no proof"
            return dataclasses.replace(line, verdict="too few data", because=told)
        exact = share_difference(*job.shares, alpha)
        low, high = min(low, exact[0]), max(high, exact[1])
    if math.isinf(low) and math.isinf(high):
        told = f"no end on either side: most requests fall into a few of {blocks.count} blocks, or failed"
        return dataclasses.replace(line, verdict="too few data", because=told)
    verdict = "no difference"
    if low > 0 or high < 0:
        verdict = "better" if (low > 0) == job.higher_is_better else "worse"
    if (verdict == "better" and job.more_failed == "B") or (verdict == "worse" and job.more_failed == "A"):
        told = f"a mean is of served requests, and {job.more_failed} failed more: see failure_share"
        return dataclasses.replace(line, verdict="undefined", because=told)
    return dataclasses.replace(
        line,
        low=low if math.isfinite(low) else None,
        high=high if math.isfinite(high) else None,
        verdict=verdict,
    )
