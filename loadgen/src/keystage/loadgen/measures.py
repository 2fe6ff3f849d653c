"""Summaries of rows: percentiles, SLO attainment, goodput, failures. Pure.

Comes after `sender` and before `report`.

How failures count: a failed request is a request that took for ever. It stays in the count of
every percentile table as infinitely late, so a percentile that falls on a failure has no value
(null in JSON, `failed` in the table), and it meets no SLO. Mean and maximum are over served
requests, and the table says so.

Latency and TTFT count from the *scheduled* time, so a generator that lags behind its schedule
cannot make the system look better; the lag itself is reported beside them.
TPOT = (last - first) / (output tokens - 1), for answers of two tokens and more.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

from keystage.loadgen.sender import Row

SLO_SCALES = (1.0, 1.5, 2.0, 3.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Percentiles:
    """Distribution of one measure in seconds.

    Attributes:
        count: requests it is over, failed ones included.
        failed: how many of them failed (counted as infinitely late).
        p50: nearest-rank percentile, None where it falls on a failure or count is 0; so the others.
        p90: as p50.
        p95: as p50.
        p99: as p50.
        p999: as p50, of 99.9 %.
        mean: over served requests, None if there are none.
        max: over served requests, None if there are none.
    """

    count: int
    failed: int
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p999: float | None
    mean: float | None
    max: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer keeps; None is no bound.

    Attributes:
        ttft_s: time to first token.
        tpot_s: time per output token after the first.
        latency_s: whole answer.
        source: `given`, or how it was derived.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None
    source: str = "given"

    @property
    def is_set(self) -> bool:
        """Whether there is any bound."""
        return any(bound is not None for bound in (self.ttft_s, self.tpot_s, self.latency_s))


@dataclasses.dataclass(frozen=True, slots=True)
class Attainment:
    """How many requests met the SLO times `scale`.

    Attributes:
        scale: factor on every bound.
        met: requests that met it.
        attainment_ratio: met / sent; failures are in the denominator.
        goodput_rps: met / makespan.
    """

    scale: float
    met: int
    attainment_ratio: float
    goodput_rps: float


def latency_s(row: Row) -> float:
    """From the scheduled time to the last token."""
    return row.last_s - row.scheduled_s


def ttft_s(row: Row) -> float | None:
    """From the scheduled time to the first token."""
    return None if row.first_s is None else row.first_s - row.scheduled_s


def tpot_s(row: Row) -> float | None:
    """Time per token after the first; None for answers of one token."""
    if row.first_s is None or row.output_tokens < 2:
        return None
    return (row.last_s - row.first_s) / (row.output_tokens - 1)


def percentiles(values: Iterable[float], failed: int = 0) -> Percentiles:
    """Nearest-rank percentiles of served values and `failed` infinite ones, exact: all values are sorted."""
    ordered = sorted(values)
    count = len(ordered) + failed

    def rank(probability: float) -> float | None:
        place = max(math.ceil(probability * count) - 1, 0)
        return ordered[place] if place < len(ordered) else None

    return Percentiles(
        count=count,
        failed=failed,
        p50=rank(0.50),
        p90=rank(0.90),
        p95=rank(0.95),
        p99=rank(0.99),
        p999=rank(0.999),
        mean=sum(ordered) / len(ordered) if ordered else None,
        max=ordered[-1] if ordered else None,
    )


def latencies(rows: Sequence[Row]) -> Percentiles:
    """Of whole answers."""
    return percentiles((latency_s(row) for row in rows if row.is_served), _failures(rows))


def ttfts(rows: Sequence[Row]) -> Percentiles:
    """Of first tokens."""
    served = (ttft_s(row) for row in rows if row.is_served)
    return percentiles((value for value in served if value is not None), _failures(rows))


def tpots(rows: Sequence[Row]) -> Percentiles:
    """Of tokens after the first; answers of one token have none and are not counted."""
    served = (tpot_s(row) for row in rows if row.is_served)
    return percentiles((value for value in served if value is not None), _failures(rows))


def lags(rows: Sequence[Row]) -> Percentiles:
    """Of actual send minus scheduled time, over all requests, failed ones too."""
    return percentiles(row.sent_s - row.scheduled_s for row in rows)


def _failures(rows: Sequence[Row]) -> int:
    return sum(not row.is_served for row in rows)


def statuses(rows: Sequence[Row]) -> dict[str, int]:
    """Requests by HTTP status; `none` where no answer came."""
    counted = collections.Counter(str(row.status) if row.status else "none" for row in rows)
    return dict(sorted(counted.items()))


def errors(rows: Sequence[Row]) -> dict[str, int]:
    """Failed requests by class of error."""
    return dict(collections.Counter(row.error_class for row in rows if row.error).most_common())


def makespan_s(rows: Sequence[Row], duration_s: float) -> float:
    """From the start to the last answer, and at least the schedule's duration."""
    return max([duration_s, *(row.last_s for row in rows)])


def meets(row: Row, slo: Slo, scale: float = 1.0) -> bool:
    """Whether a request was served within every bound times `scale`."""
    if not row.is_served:
        return False
    pairs = (
        (ttft_s(row), slo.ttft_s),
        (tpot_s(row), slo.tpot_s),
        (latency_s(row), slo.latency_s),
    )
    return all(bound is None or value is None or value <= bound * scale for value, bound in pairs)


def attainments(rows: Sequence[Row], slo: Slo, duration_s: float) -> list[Attainment]:
    """Attainment and goodput at every scale; empty without an SLO or rows."""
    if not slo.is_set or not rows:
        return []
    span_s = makespan_s(rows, duration_s)
    counts = [(scale, sum(meets(row, slo, scale) for row in rows)) for scale in SLO_SCALES]
    return [Attainment(scale, met, met / len(rows), met / span_s) for scale, met in counts]


def derived_slo(unloaded: Sequence[Row], *, streaming: bool) -> Slo:
    """An SLO from unloaded latencies: 1x is their 90th percentile.

    So scale s means "s times what an idle system takes", the meaning of SLO scale in NeuStream's
    evaluation.
    """
    source = f"90th percentile of {len(unloaded)} requests sent one at a time to the idle system"
    if streaming:
        return Slo(ttft_s=ttfts(unloaded).p90, tpot_s=tpots(unloaded).p90, source=source)
    return Slo(latency_s=latencies(unloaded).p90, source=source)
