"""Batches of the router's real core in emulated time: deferral, deadlines, learning, deaths."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from support.emulated_items import EmulatedItems

from keystage.batching.choice import parse_batching
from keystage.router.api import RouterStats
from keystage.router.batch_settings import MOST_PLANNED_S, BatchSettings
from keystage.router.engine import TooLate
from keystage.router.fleet import replica_stats
from keystage.router.metrics import samples
from keystage.wire.metrics import expose

STAGE = (0.002, 0.020)
"""alpha_s, beta_s: 8 items take 36 ms, one takes 22 ms."""
STEADY_S = [0.004 * n for n in range(250)]


def settings(batching: str, late: str = "demote", objective_s: float | None = None) -> BatchSettings:
    assert late in ("demote", "refuse")
    return BatchSettings(parse_batching(batching), late, objective_s)  # type: ignore[arg-type]


def world(batching: str, *workers: str, deadline_s: float | None = 0.1, **options: object) -> EmulatedItems:
    """One stage, some workers, a steady second of arrivals; run to its end."""
    w = EmulatedItems([STAGE], settings(batching, str(options.pop("late", "demote"))), **options)  # type: ignore[arg-type]
    for name in workers:
        w.add_worker(name)
    w.submit_at(STEADY_S, deadline_s)
    w.run(until_s=2.0)
    return w


def spare(stages: Sequence[tuple[float, float]] = (STAGE,), **kwargs: object) -> EmulatedItems:
    """Three workers of all stages, more than are needed: a batch may take its time."""
    w = EmulatedItems(stages, settings("deferred", objective_s=kwargs.pop("objective_s", None)), **kwargs)  # type: ignore[arg-type]
    for name in ("a", "b", "c"):
        w.add_worker(name, tuple(range(len(stages))))
    return w


def test_deferred_batches_are_larger_than_eager_ones_and_deadlines_hold() -> None:
    eager, deferred = world("eager", "a", "b", "c"), world("deferred", "a", "b", "c")
    for w in (eager, deferred):
        assert len(w.answered_s) == len(STEADY_S)
        assert max(w.latencies_s()) <= 0.1 + 1e-9
    assert sum(deferred.sizes()) / len(deferred.sizes()) > 2 * sum(eager.sizes()) / len(eager.sizes())
    # Whoever can stay idle does.
    assert {batch.worker for batch in eager.batches} == {"a", "b", "c"}
    assert {batch.worker for batch in deferred.batches} == {"a"}


def test_a_timeout_is_counted_from_the_first_item() -> None:
    w = world("timeout:30", "a", "b", "c")
    assert w.batches[0].began_s == pytest.approx(0.030)
    assert max(w.latencies_s()) <= 0.1 + 1e-9


def test_items_without_a_deadline_are_never_held_back() -> None:
    eager, deferred = world("eager", "a", "b", deadline_s=None), world("deferred", "a", "b", deadline_s=None)
    assert deferred.batches[0].began_s == 0.0
    assert sum(deferred.latencies_s()) == pytest.approx(sum(eager.latencies_s()), rel=0.05)
    assert max(deferred.latencies_s()) <= max(eager.latencies_s()) * 1.05


def test_who_gives_far_more_time_than_anybody_waits_is_not_held_that_long() -> None:
    undated, far = world("deferred", "a", "b", deadline_s=None), world("deferred", "a", "b", deadline_s=1e9)
    assert far.latencies_s() == undated.latencies_s()
    near = spare(objective_s=MOST_PLANNED_S)
    number = near.submit()
    near.run()
    assert near.answered_s[number] > MOST_PLANNED_S / 2


def test_the_pipelines_objective_stands_for_a_deadline_but_nobody_is_refused_for_it() -> None:
    w = spare(objective_s=0.1)
    number = w.submit()
    w.run()
    # Alone it may start from d - l(2) on.
    assert w.batches[0].began_s == pytest.approx(0.1 - 0.024)
    assert w.answered_s[number] == pytest.approx(0.098)
    w = EmulatedItems([STAGE], settings("deferred", objective_s=0.01))
    w.add_worker("a")
    number = w.submit()
    w.run()
    assert w.answered_s[number] == pytest.approx(0.022)
    counters = w.core.meters[0].counters()
    assert (counters.due, counters.late, counters.dropped) == (1, 1, 0)


def test_eager_plans_by_no_deadline_but_counts_by_it() -> None:
    w = EmulatedItems([STAGE], settings("eager", "refuse", objective_s=0.01))
    w.add_worker("a")
    number = w.submit()
    w.run()
    assert w.answered_s[number] == pytest.approx(0.022)
    assert w.core.meters[0].counters().late == 1


def test_what_cannot_be_in_time_is_refused_by_name_where_the_pipeline_says_so() -> None:
    w = EmulatedItems([STAGE], settings("deferred", "refuse"))
    w.add_worker("a", most=4)
    w.submit_at([0.0] * 40, 0.06)
    w.run()
    assert len(w.answered_s) + len(w.refused) == 40
    assert len(w.refused) >= 30
    assert max(w.latencies_s()) <= 0.06 + 1e-9
    refusal = next(iter(w.refused.values()))
    assert isinstance(refusal, TooLate)
    assert "its deadline of 0.06 s cannot be met any more" in str(refusal)
    counters = w.core.meters[0].counters()
    assert (counters.due, counters.dropped, counters.late) == (40, len(w.refused), 0)
    assert all(worker.held_slots == 0 for worker in w.fleet.workers.values())
    assert w.core.gate.items == 0


def test_who_knows_nothing_lately_tries_before_it_refuses_all() -> None:
    """A device that was slow for a while, or seemed so, must not be refused for ever."""
    w = EmulatedItems([(0.0, 0.5)], settings("deferred", "refuse"))
    w.add_worker("a")
    w.submit_at([0.4 * n for n in range(50)], 0.1)
    w.run(until_s=20.0)
    slow = len(w.answered_s) + len(w.core._items)
    assert len(w.batches) >= 10  # late, all of them, and yet tried again and again
    assert len(w.refused) >= 10
    assert slow + len(w.refused) == 50
    w.set_stage(0, (0.0, 0.01))
    w.submit_at([20.0 + 0.4 * n for n in range(200)], 0.1)
    w.run(until_s=100.0)
    # The device is quick now: what comes late in the run is in time.
    assert all(number in w.answered_s for number in range(200, 250))


def test_what_cannot_be_in_time_waits_behind_what_can() -> None:
    w = EmulatedItems([STAGE], settings("deferred", objective_s=0.06))
    w.add_worker("a", most=4)
    w.submit_at([0.0] * 40)
    w.submit_at([0.070 + 0.02 * n for n in range(10)])
    w.run()
    assert len(w.answered_s) == 50
    newcomers = [w.answered_s[n] - w.came_s[n] for n in range(40, 50)]
    assert sum(latency_s <= 0.06 + 1e-9 for latency_s in newcomers) >= 8
    # Nobody overtakes among those that are late.
    late = [w.answered_s[n] for n in range(40) if w.answered_s[n] > 0.06]
    assert late == sorted(late)


def test_stage_deadlines_are_cumulative_and_unspent_time_carries_on() -> None:
    stages = [(0.001, 0.009), (0.002, 0.028)]
    w = EmulatedItems(stages, settings("deferred"))
    for stage in (0, 0, 0, 1, 1, 1):
        w.add_worker(f"{len(w.fleet.workers)}", (stage,))
    w.submit(0.2)
    w.run()
    first, second = w.batches
    # A quarter of the deadline is stage 0's: 50 ms; the rest is its successor's, all of it.
    assert first.began_s == pytest.approx(0.050 - 0.011)
    assert second.began_s == pytest.approx(0.200 - 0.032)
    # Stage 0 cannot wait where a whole batch is there.
    w = EmulatedItems(stages, settings("deferred"))
    for stage in (0, 0, 0, 1, 1, 1):
        w.add_worker(f"{len(w.fleet.workers)}", (stage,), most=2 if stage == 0 else 64)
    w.submit_at([0.0, 0.0], 0.2)
    w.run()
    assert [batch.began_s for batch in w.batches] == pytest.approx([0.0, 0.2 - 0.034])


def test_a_worker_of_several_stages_has_the_deadline_of_the_last_one() -> None:
    w = spare([(0.001, 0.009), (0.002, 0.028)])
    w.submit(0.2)
    w.run()
    assert w.batches[0].began_s == pytest.approx(0.2 - 0.043)
    assert w.answered_s[0] <= 0.2


def test_without_a_profile_the_first_batches_are_the_fit() -> None:
    w = spare(is_profiled=False)
    first = w.submit(0.2)
    w.run()
    assert w.answered_s[first] == pytest.approx(0.022)
    began_s = w.now_s
    w.submit_at([began_s, began_s, began_s], 0.2)
    w.run()
    # One size is known: half of its time counts per item.
    assert w.batches[1].began_s - began_s == pytest.approx(0.2 - 5 * 0.011, rel=1e-4)
    w.submit(0.2)
    began_s = w.now_s
    w.run()
    assert w.batches[2].began_s - began_s == pytest.approx(0.2 - 0.024, rel=1e-4)


def test_a_batch_is_sent_ahead_of_the_end_of_the_one_before_once_the_way_is_known() -> None:
    w = EmulatedItems([STAGE], settings("eager"), hop_s=0.003)
    w.add_worker("a")
    w.submit_at([0.001 * n for n in range(400)])
    w.run()
    assert len(w.answered_s) == 400
    gaps = [
        after.began_s - before.began_s - STAGE[1] - STAGE[0] * len(before.items)
        for before, after in zip(w.batches, w.batches[1:], strict=False)
    ]
    # At first the worker waits for both ways, later for nothing; it never has more than one batch ahead.
    assert gaps[0] == pytest.approx(0.006)
    assert max(gaps[6:]) < 0.001


def test_a_dead_workers_items_keep_their_deadlines() -> None:
    w = spare()
    numbers = [w.submit(0.2) for _ in range(5)]
    w.run(until_s=0.2 - 0.032 + 0.002)
    assert [batch.worker for batch in w.batches] == ["a"]
    w.kill_worker("a")
    w.run()
    assert [batch.worker for batch in w.batches] == ["a", "b"]
    assert set(w.answered_s) == set(numbers)
    # It was begun as late as possible: replayed at once, the items are late by what was lost.
    assert max(w.latencies_s()) <= 0.2 + 0.002 + 1e-9
    assert w.fleet.workers["b"].held_slots == 0


def test_cancelled_items_are_in_no_batch() -> None:
    w = spare()
    numbers = [w.submit(0.2) for _ in range(4)]
    w.run(until_s=0.05)
    assert w.batches == []
    w.cancel(numbers[1])
    w.run()
    assert w.batches[0].items == (numbers[0], numbers[2], numbers[3])
    assert w.core.gate.items == 0
    w.cancel(numbers[0])
    number = w.submit(0.2)
    w.run(until_s=w.now_s + 0.2 - 0.024 + 0.001)
    w.cancel(number)  # while it is computed
    w.run()
    assert number not in w.answered_s
    assert w.fleet.workers["a"].held_slots == 0
    assert w.core.meters[0].in_flight == 0


def test_a_batch_larger_than_the_credit_is_cut_and_the_rest_follows() -> None:
    w = EmulatedItems([STAGE], settings("eager"))
    w.add_worker("a", most=8, slots=3)
    w.submit_at([0.0] * 7)
    w.run()
    assert len(w.answered_s) == 7
    assert max(w.sizes()) <= 3


def test_statistics_of_batches_and_idle_workers() -> None:
    w = world("deferred", "a", "b")
    counters = w.core.meters[0].counters()
    assert sum(counters.batch_sizes) == len(w.batches)
    assert (counters.due, counters.late, counters.dropped) == (len(STEADY_S), 0, 0)
    replicas = [replica_stats(worker, w.now_s) for worker in w.fleet.workers.values()]
    busy_s = sum(STAGE[1] + STAGE[0] * size for size in w.sizes())
    assert sum(replica.served_s - replica.idle_s for replica in replicas) == pytest.approx(busy_s)
    assert [replica.served_s for replica in replicas] == [2.0, 2.0]
    assert replicas[0].idle_s < replicas[1].idle_s


@pytest.mark.parametrize("batching", ["deferred", "eager", "timeout:20", "partial-slo"])
def test_all_is_answered_in_every_mode_at_overload(batching: str) -> None:
    w = EmulatedItems([STAGE, STAGE], settings(batching, objective_s=0.15))
    for name, stage in (("a", 0), ("b", 0), ("c", 1)):
        w.add_worker(name, (stage,), most=4)
    w.submit_at([0.001 * n for n in range(300)])
    w.run()
    assert len(w.answered_s) == 300
    assert [(m.queue, m.in_flight) for m in w.core.meters] == [(0, 0), (0, 0)]
    assert w.core.next_timer_s() == math.inf


def test_metrics_show_batches_and_idle_workers() -> None:
    w = world("deferred", "a", "b")
    stats = RouterStats(
        pipeline="p", incarnation="i", at_s=w.now_s, wall_s=0.0, execution="single-pass", requests=250,
        completed=250, refused={}, replayed_tokens=0, moves=0,
        stages=[meter.counters() for meter in w.core.meters],
        replicas=[replica_stats(worker, w.now_s) for worker in w.fleet.workers.values()],
    )  # fmt: skip
    text = expose(samples(stats)).decode()
    batches = len(w.batches)
    assert f'keystage_stage_batch_items_count{{pipeline="p",stage="0"}} {batches}.0' in text
    assert 'keystage_stage_batch_items_sum{pipeline="p",stage="0"} 250.0' in text
    assert 'keystage_stage_due_items_total{pipeline="p",stage="0"} 250.0' in text
    assert 'keystage_stage_late_items_total{pipeline="p",stage="0"} 0.0' in text
    assert 'keystage_replica_served_seconds_total{pipeline="p",replica="a"} 2.0' in text
    assert 'keystage_replica_idle_seconds_total{pipeline="p",replica="b"}' in text
