"""How often `compare` calls two runs of one system different, and how often it finds what is there.

200 seeded trials each. With a true share of 5 %, at most 21 of 200 are called in 99.9 % of all series
(binomial), so the bound below is what may be seen where the stated share holds; trials are seeded, so a
series never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scipy import stats
from support.load_reports import queued, rows, side, times

from keystage.loadgen.comparison import Comparison, compared
from keystage.loadgen.measures import Slo
from keystage.loadgen.sender import Row

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRIALS = 200
FIRST_SEED = 10_000
MOST_FALSE = int(stats.binom.ppf(0.999, TRIALS, 0.05))
SPAN_S = 600.0

Pair = Callable[[int], tuple[list[Row], list[Row]]]


def independent(trial: int) -> tuple[list[Row], list[Row]]:
    """1,000 requests each, two plans."""
    return rows(4 * trial, 1000), rows(4 * trial + 2, 1000)


def one_queue(trial: int) -> tuple[list[Row], list[Row]]:
    """A server that is busy half of the time, the same arrivals, other services."""
    at_s = times(1200, 4 * trial + 1, SPAN_S)
    return tuple(queued(4 * trial + k, at_s, service_s=0.25) for k in (2, 3))  # type: ignore[return-value]


def slowed(pair: Pair, factor: float) -> Pair:
    """The second run is slower by this, request by request."""

    def made(trial: int) -> tuple[list[Row], list[Row]]:
        a, b = pair(trial)
        for row in b:
            row.last_s = row.scheduled_s + factor * (row.last_s - row.scheduled_s)
        return a, b

    return made


def called(pair: Pair, trial: int, *, is_paired: bool, span_s: float, **changes: Any) -> Comparison:
    a, b = (side(run, span_s) for run in pair(trial))
    return compared(
        a, b, names=("a", "b"), slo=Slo(), is_paired=is_paired, seed=trial, replicates=1000, **changes
    )


def called_different(
    pair: Pair, metrics: tuple[str, ...], *, is_paired: bool, span_s: float, alpha: float
) -> tuple[dict[str, int], int]:
    """Trials in which each measure, and in which any, is called different."""
    each, some = dict.fromkeys(metrics, 0), 0
    for trial in range(FIRST_SEED, FIRST_SEED + TRIALS):
        lines = called(pair, trial, is_paired=is_paired, span_s=span_s, metrics=metrics, alpha=alpha).lines
        found = [line.metric for line in lines if line.verdict in ("better", "worse")]
        some += bool(found)
        for metric in found:
            each[metric] += 1
    return each, some


def test_a_measure_of_one_system_is_called_different_as_rarely_as_said() -> None:
    """Four measures at 20 % together are each judged at 5 %."""
    metrics = ("latency_p50", "latency_p90", "latency_p99", "latency_mean")
    each, _ = called_different(independent, metrics, is_paired=False, span_s=60.0, alpha=0.2)
    assert max(each.values()) <= MOST_FALSE, each


def test_all_measures_together_are_called_different_as_rarely_as_said() -> None:
    metrics = ("latency_p50", "latency_p90", "latency_p99", "latency_mean", "ttft_p50", "failure_share")
    _, some = called_different(independent, metrics, is_paired=False, span_s=60.0, alpha=0.05)
    assert some <= MOST_FALSE


def test_requests_that_queue_together_are_no_independent_proof() -> None:
    metrics = ("latency_p50", "latency_p90", "latency_mean")
    each, _ = called_different(one_queue, metrics, is_paired=True, span_s=SPAN_S, alpha=0.15)
    assert max(each.values()) <= MOST_FALSE, each


@pytest.mark.parametrize(
    ("pair", "factor", "is_paired", "span_s"),
    [(independent, 1.1, False, 60.0), (one_queue, 1.33, True, SPAN_S)],
)
def test_what_is_slower_is_found(pair: Pair, factor: float, is_paired: bool, span_s: float) -> None:
    """A tenth among 1,000 independent requests of sigma 0.5 is 4 standard errors of the mean's difference."""
    _, some = called_different(
        slowed(pair, factor), ("latency_mean",), is_paired=is_paired, span_s=span_s, alpha=0.05
    )
    assert some >= 0.75 * TRIALS
