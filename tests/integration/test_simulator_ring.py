"""Looping pipelines: bounds of a closed ring, slots, moves to new replicas, drains, deaths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.simulated_worlds import Script, line, world

from keystage.controller.domain.decision import Action, SetReplicas
from keystage.controller.domain.snapshot import Snapshot
from keystage.simulator.api import FailureSpec, LoadSpec, Outcome, PipelineSpec, StageSpec
from keystage.simulator.measures import check
from keystage.simulator.run import simulate

STAGES, SLOTS, STEPS = 4, 8, 32.0
STAGE = {"alpha_s": 0.001, "beta_s": 0.004, "most": 8}


def ring(count: int, rate_rps: float, replicas: int = 1, **fields: Any) -> PipelineSpec:
    stages = [StageSpec(**STAGE, replicas=replicas) for _ in range(STAGES)]  # type: ignore[arg-type]
    return line(
        *stages, rate_rps=rate_rps, count=count, execution="looping", slots=SLOTS, steps=STEPS, **fields
    )


def run(pipeline: PipelineSpec, *actions: tuple[float, Action], **fields: Any) -> Outcome:
    outcome = simulate(world(pipeline, **fields), Script(actions), 3)
    check(outcome)
    assert not np.isnan(outcome.pipelines[0].finished_s).any()
    return outcome


def test_a_lone_session_takes_its_steps_around_the_ring() -> None:
    outcome = run(
        line(*[StageSpec(alpha_s=0.01)] * 3, times_s=(1.0,), execution="looping", steps=1), hop_s=0.002
    )
    assert outcome.pipelines[0].latency_s.tolist() == pytest.approx([3 * (0.01 + 0.002)])


def test_throughput_of_a_full_ring_meets_its_bound() -> None:
    # 8 sessions in 4 waves of 2: every stage is always busy with l(2) = 6 ms for 2 steps.
    outcome = run(ring(300, 1000.0))
    stages = outcome.pipelines[0].stages
    steps = sum(s.busy_ratio for s in stages) / STAGES * outcome.ended_s / 0.006 * 2
    bound_per_s = 2 / 0.006
    assert 0.95 * bound_per_s <= steps / outcome.ended_s <= bound_per_s
    assert all(0.95 < s.busy_ratio <= 1.0 for s in stages)


def test_residence_of_a_quiet_ring_is_steps_times_a_lap() -> None:
    outcome = run(ring(300, 0.05))
    lap_s = STAGES * 0.005
    assert np.mean(outcome.pipelines[0].latency_s) == pytest.approx(STEPS * lap_s, rel=0.15)


def test_sessions_are_counted_at_entry_only_and_wait_for_slots() -> None:
    most: list[float] = []

    def watch(snapshot: Snapshot) -> None:
        stages = snapshot.pipelines[0].stages
        counters = [s.routers[0].counters for s in stages]
        assert all(c.arrivals == 0 and c.queue == 0 for c in counters[1:])
        held = stages[2].workers[0].held_slots
        assert held is not None
        assert held <= SLOTS
        assert counters[0].in_flight == held
        most.append(held)

    outcome = simulate(world(ring(100, 1000.0)), Script([], watch), 3)
    check(outcome)
    assert max(most) == SLOTS
    entry = outcome.pipelines[0].stages[0]
    assert entry.arrivals == 100
    assert entry.wait_mean_s > 0
    assert outcome.pipelines[0].stages[1].arrivals == 0


def test_sessions_move_to_new_replicas_and_the_run_ends_sooner() -> None:
    alone = run(ring(60, 1000.0))
    more = [(0.5, SetReplicas(f"p-stage-{k}", 2)) for k in range(STAGES)]
    helped = run(ring(60, 1000.0), *more, load=LoadSpec(fixed_s=0.2))
    assert helped.ended_s < 0.65 * alone.ended_s
    assert all(s.busy_ratio > 0.5 for s in helped.pipelines[0].stages)


def test_a_draining_replica_hands_its_sessions_over_or_waits_for_them() -> None:
    fewer = [(1.0, SetReplicas(f"p-stage-{k}", 1)) for k in range(STAGES)]
    outcome = run(ring(60, 5.0, replicas=3), *fewer)
    for stage in outcome.pipelines[0].stages:
        assert stage.series[-1].tolist()[1:] == [1, 1]
        assert stage.replica_s < outcome.ended_s + 3 * STEPS  # the two others left long before the end


@pytest.mark.parametrize("k", range(STAGES))
def test_a_death_loses_no_session(k: int) -> None:
    faults = tuple(FailureSpec(at_s=t, function=f"p-stage-{k}") for t in (0.7, 1.5, 1.9))
    outcome = run(ring(80, 40.0, replicas=2), failures=faults, load=LoadSpec(fixed_s=0.3))
    assert outcome.pipelines[0].stages[k].starts == 3


def test_random_decisions_lose_no_session_and_end_with_the_same_log(tmp_path: Any) -> None:
    random = np.random.default_rng(1)
    actions = [
        (float(t), SetReplicas(f"p-stage-{random.integers(STAGES)}", int(random.integers(1, 5))))
        for t in np.sort(random.uniform(0, 12, 60))
    ]
    faults = tuple(
        FailureSpec(at_s=float(t), function=f"p-stage-{random.integers(STAGES)}") for t in (2.2, 5.1, 7.7)
    )
    w = world(ring(300, 25.0), load=LoadSpec(fixed_s=0.2), failures=faults, hop_s=0.0005)
    digests = set()
    for name in ("a", "b"):
        outcome = simulate(w, Script(actions), 3, log=tmp_path / name)
        check(outcome)
        assert not np.isnan(outcome.pipelines[0].finished_s).any()
        digests.add(outcome.log_sha256)
    assert len(digests) == 1
