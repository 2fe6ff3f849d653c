"""Per-stage series from the router's cumulative counters."""

import itertools

import pytest

from keystage.loadgen.series import StageSeries
from keystage.router.api import ReplicaStats, RouterStats, StageCounters


def counters(stage: int, gaps: list[float], queue: int = 0, in_flight: int = 0) -> StageCounters:
    squares = sum(gap * gap for gap in gaps)
    return StageCounters(stage, len(gaps), sum(gaps), squares, queue, in_flight, 0, 0.0, 0, 0.0, 0.0, 0.0)


def replica(name: str, stage: int, busy_s: float, state: str = "ready", held: int = 0) -> ReplicaStats:
    return ReplicaStats(name, (stage,), state, 0.0, 8, held, [busy_s], [0], [0])


def stats(
    at_s: float,
    stages: list[StageCounters],
    replicas: list[ReplicaStats] | None = None,
    incarnation: str = "a",
    execution: str = "single-pass",
) -> RouterStats:
    return RouterStats("p", incarnation, at_s, at_s, execution, 0, 0, {}, 0, 0, stages, replicas or [])


def test_rate_and_cv_are_of_the_gaps_between_two_readings() -> None:
    series = StageSeries(window_s=100.0)
    old = [9.0] * 3
    new = [0.1, 1.9, 0.1, 1.9, 0.1, 1.9]
    series.add(0.0, stats(50.0, [counters(0, old)]))
    series.add(6.0, stats(56.0, [counters(0, old + new, queue=4)]))
    first, second = series.samples
    assert (first.rate_rps, first.cv) == (None, None)
    assert (second.queue, second.rate_rps) == (4, 1.0)
    assert second.cv == pytest.approx(0.9)


def test_few_arrivals_have_a_rate_and_no_cv() -> None:
    series = StageSeries()
    series.add(0.0, stats(0.0, [counters(0, [])]))
    series.add(2.0, stats(2.0, [counters(0, [1.0, 1.0])]))
    assert (series.samples[-1].rate_rps, series.samples[-1].cv) == (1.0, None)


def test_the_window_slides() -> None:
    series = StageSeries(window_s=10.0)
    slow, fast = [1.0] * 20, [0.1, 0.3] * 50
    for at_s in range(0, 21, 2):
        series.add(at_s, stats(at_s, [counters(0, slow[:at_s])]))
    for step in range(1, 6):
        series.add(20 + 2 * step, stats(20.0 + 2 * step, [counters(0, slow + fast[: 10 * step])]))
    assert series.samples[-1].rate_rps == pytest.approx(5.0)
    assert series.samples[-1].cv == pytest.approx(0.5)
    assert series.summaries()[0].arrivals == 70


def test_a_restarted_router_starts_the_windows_anew() -> None:
    series = StageSeries()
    series.add(0.0, stats(100.0, [counters(0, [1.0] * 50)]))
    series.add(1.0, stats(3.0, [counters(0, [1.0] * 2)], incarnation="b"))
    series.add(2.0, stats(9.0, [counters(0, [1.0] * 8)], incarnation="b"))
    assert series.samples[1].rate_rps is None
    assert series.samples[2].rate_rps == 1.0
    assert series.summaries()[0].arrivals == 6


def test_replicas_and_busy_ratio() -> None:
    series = StageSeries()
    stages = [counters(0, []), counters(1, [])]
    before = [replica("a", 0, 1.0), replica("b", 1, 5.0), replica("c", 1, 0.0, "starting")]
    after = [replica("a", 0, 1.5), replica("b", 1, 6.0), replica("c", 1, 0.2)]
    series.add(0.0, stats(10.0, stages, before), {0: 1, 1: 2})
    series.add(1.0, stats(11.0, stages, after), None)
    zero, one, zero_later, one_later = series.samples
    assert (zero.ready, zero.starting, zero.desired, zero.busy_ratio) == (1, 0, 1, None)
    assert (one.ready, one.starting, one.desired) == (1, 1, 2)
    assert (zero_later.desired, zero_later.busy_ratio) == (None, pytest.approx(0.5))
    assert (one_later.ready, one_later.busy_ratio) == (2, pytest.approx(0.6))


def test_looping_stages_show_the_sessions_that_hold_their_slots() -> None:
    series = StageSeries()
    hosts = [replica("a", 0, 0.0, held=3), replica("b", 1, 0.0, held=3)]
    series.add(0.0, stats(1.0, [counters(0, [], in_flight=3), counters(1, [])], hosts, execution="looping"))
    assert [sample.in_flight for sample in series.samples] == [3, 3]


def test_summary_over_samples() -> None:
    series = StageSeries()
    for at_s, queue in enumerate((0, 4, 2)):
        series.add(at_s, stats(at_s, [counters(0, [1.0] * at_s, queue)]))
    (line,) = series.summaries()
    assert (line.queue_mean, line.queue_max, line.arrivals, line.busy_mean_ratio) == (2.0, 4, 2, None)
    assert [a.at_s < b.at_s for a, b in itertools.pairwise(series.samples)] == [True, True]
