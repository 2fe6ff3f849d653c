"""What the plots of a report show, as numbers: few enough to draw, whatever the run's size. Pure.

Comes after `measures`; `plots` (PNG) and `charts` (HTML) draw it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from keystage.loadgen.sender import Row

CDF_POINTS = 400
SPANS = 120
"""Bars and steps over time in one plot."""

_NICE = (1.0, 2.0, 2.5, 5.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Cdf:
    """A cumulative distribution, thinned: at most `CDF_POINTS` points, the first and last kept.

    Attributes:
        values: ascending.
        share: of all requests, failed ones included, 0..1; as many as values.
    """

    values: list[float]
    share: list[float]


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Requests scheduled in one stretch of the run; times in seconds.

    Attributes:
        from_s: begin.
        to_s: end.
        sent: requests sent in it.
        served: requests scheduled in it that were served.
        failed: scheduled in it, and failed.
        median_s: of the latencies of served ones, None if none.
        p99_s: likewise (the largest below 100 of them).
        max_s: likewise.
        lag_max_s: largest send lag of those scheduled in it, 0 if none.
    """

    from_s: float
    to_s: float
    sent: int
    served: int
    failed: int
    median_s: float | None
    p99_s: float | None
    max_s: float | None
    lag_max_s: float


def cdf(values: Sequence[float], failed: int = 0) -> Cdf:
    """Of served values; it ends below 1 where requests failed."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    count = len(ordered)
    if not count:
        return Cdf([], [])
    # Even in rank, and every rank of the last hundredth of the points: the tail is what is looked at.
    even = np.linspace(0, count - 1, CDF_POINTS - CDF_POINTS // 4)
    tail = count - 1 - np.geomspace(1, max(count / 100, 1), CDF_POINTS // 4) + 1
    ranks = np.unique(np.concatenate([even, tail]).round().astype(np.int64))
    return Cdf(ordered[ranks].tolist(), ((ranks + 1) / (count + failed)).tolist())


def spans(rows: Sequence[Row], end_s: float, most: int = SPANS) -> list[Span]:
    """The run in at most `most` stretches of one even length."""
    width_s = nice_step(max(end_s, 1e-3) / most)
    count = max(math.ceil(end_s / width_s - 1e-9), 1)
    scheduled = np.array([row.scheduled_s for row in rows])
    sent = np.array([row.sent_s for row in rows])
    place = np.minimum((scheduled / width_s).astype(np.int64), count - 1)
    sent_in = np.bincount(np.minimum((sent / width_s).astype(np.int64), count - 1), minlength=count)
    ok = np.array([row.is_served for row in rows], dtype=bool)
    latency = np.array([row.last_s for row in rows]) - scheduled
    order = np.lexsort((latency, place))
    edges = np.searchsorted(place[order], np.arange(count + 1))
    made = []
    for k in range(count):
        inside = order[edges[k] : edges[k + 1]]
        served = latency[inside[ok[inside]]]
        made.append(
            Span(
                from_s=k * width_s,
                to_s=(k + 1) * width_s,
                sent=int(sent_in[k]),
                served=len(served),
                failed=len(inside) - len(served),
                median_s=_rank(served, 0.5),
                p99_s=_rank(served, 0.99),
                max_s=_rank(served, 1.0),
                lag_max_s=float((sent[inside] - scheduled[inside]).max(initial=0.0)),
            )
        )
    return made


def _rank(ordered: np.typing.NDArray[np.float64], probability: float) -> float | None:
    if not len(ordered):
        return None
    return float(ordered[max(math.ceil(probability * len(ordered)) - 1, 0)])


def nice_step(least: float) -> float:
    """Smallest 1, 2, 2.5 or 5 times a power of ten that is at least this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((factor * power for factor in _NICE if factor * power >= least * (1 - 1e-9)), 10 * power)


def ticks(high: float, about: int = 5) -> list[float]:
    """Even marks from 0 to at least `high`."""
    step = nice_step(max(high, 1e-9) / about)
    return [k * step for k in range(math.ceil(high / step - 1e-9) + 1)]
