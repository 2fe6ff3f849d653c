"""Time lines of items: queues, batches, joins, hops, network, counters; and what a run answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.simulated_worlds import GB, Script, line, server, world

from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.snapshot import Counters
from keystage.simulator import draws
from keystage.simulator.api import ArrivalSpec, NodeSpec, StageSpec
from keystage.simulator.measures import LawError, check
from keystage.simulator.platform import SimulatedPlatform
from keystage.simulator.run import simulate


def finished(*stages: StageSpec, times_s: tuple[float, ...], **fields: object) -> list[float]:
    outcome = simulate(world(line(*stages, times_s=times_s), **fields), None, 1)
    check(outcome)
    return [round(float(t), 9) for t in outcome.pipelines[0].finished_s]


def test_items_wait_for_the_one_before() -> None:
    assert finished(StageSpec(alpha_s=1.0), times_s=(0.0, 0.5, 3.0)) == [1.0, 2.0, 4.0]


def test_a_free_replica_takes_as_many_as_it_may() -> None:
    batch = StageSpec(alpha_s=1.0, beta_s=0.5, most=2)
    assert finished(batch, times_s=(0.0, 0.1, 0.2, 0.3)) == [1.5, 4.0, 4.0, 5.5]


def test_items_that_come_together_are_shared_among_idle_replicas() -> None:
    pair = StageSpec(alpha_s=1.0, beta_s=0.5, most=2)
    both = StageSpec(alpha_s=1.0, beta_s=0.5, most=2, replicas=2)
    # the second and third wait together for the first stage and leave it as one batch at 4.0
    assert finished(pair, both, times_s=(0.0, 0.1, 0.2)) == [3.0, 5.5, 5.5]
    assert finished(pair, pair, times_s=(0.0, 0.1, 0.2)) == [3.0, 6.5, 6.5]


def test_two_replicas_take_turns_by_number() -> None:
    outcome = simulate(world(line(StageSpec(alpha_s=1.0, replicas=2), times_s=(0.0, 2.0, 4.0))), None, 1)
    assert outcome.pipelines[0].stages[0].busy_ratio == pytest.approx(3 / 10)
    assert outcome.ended_s == 5.0


def test_hops_come_between_stages_only() -> None:
    stages = [StageSpec(alpha_s=1.0) for _ in range(3)]
    assert finished(*stages, times_s=(0.0,), hop_s=0.25) == [3.5]
    assert finished(*stages, times_s=(0.0,)) == [3.0]


def test_inputs_from_another_node_come_later_but_take_no_compute() -> None:
    here = StageSpec(alpha_s=1.0, gpus=1, activation_bytes=2 * GB)
    nodes = (server(2, gpus=1),)  # one stage on each
    fields = {"nodes": nodes, "hop_s": 0.25, "network_s": 0.5, "network_bps": 4.0 * GB}
    outcome = simulate(world(line(here, here, times_s=(0.0,)), **fields), None, 1)  # type: ignore[arg-type]
    assert outcome.pipelines[0].finished_s.tolist() == [1.0 + 0.5 + 0.5 + 1.0]
    assert outcome.pipelines[0].stages[1].busy_ratio == pytest.approx(1 / 3)
    assert finished(here, here, times_s=(0.0,), **(fields | {"nodes": (server(1),)})) == [2.25]


def test_a_join_waits_for_all_before_it() -> None:
    stages = (
        StageSpec(alpha_s=1.0),
        StageSpec(alpha_s=2.0, after=(0,)),
        StageSpec(alpha_s=0.5, after=(0,)),
        StageSpec(alpha_s=1.0, after=(1, 2)),
    )
    assert finished(*stages, times_s=(0.0, 0.0)) == [4.0, 6.0]


def test_two_ends_are_both_waited_for_and_two_entries_both_begin() -> None:
    stages = (StageSpec(alpha_s=1.0), StageSpec(alpha_s=3.0, after=()))
    assert finished(*stages, times_s=(1.0,)) == [4.0]


def test_counters_are_those_of_a_router() -> None:
    spec = line(StageSpec(alpha_s=1.0, beta_s=1.0, most=2), times_s=(1.0, 2.0, 2.5, 9.0))
    platform = SimulatedPlatform(world(spec), 1)
    platform.advance(6.0)  # first alone 1..3, then two of them 3..6
    stage = platform.observe().pipelines[0].stages[0]
    assert stage.routers[0].counters == Counters(
        arrivals=3,
        gap_sum_s=1.5,
        gap_sq_sum_s2=1.25,
        services=3,
        service_sum_s=2.0 + 2 * 3.0,
        service_sq_sum_s2=4.0 + 2 * 9.0,
        sojourn_sum_s=2.0 + 4.0 + 3.5,
        queue=0,
        in_flight=0,
    )
    (worker,) = stage.workers
    assert (worker.busy_s, worker.rows, worker.held_slots, worker.slots) == (5.0, 3, 0, 2)
    assert stage.batch is not None
    assert (stage.batch.alpha_s, stage.batch.beta_s, stage.batch.most) == (1.0, 1.0, 2)


def test_counters_of_an_interrupted_moment() -> None:
    platform = SimulatedPlatform(world(line(StageSpec(alpha_s=1.0, most=2), times_s=(0.0, 0.1, 0.2))), 1)
    platform.advance(0.5)
    stage = platform.observe().pipelines[0].stages[0]
    counters = stage.routers[0].counters
    assert (counters.queue, counters.in_flight, stage.workers[0].held_slots) == (2, 1, 1)
    check(platform.outcome())


def busy_world() -> object:
    stages = [StageSpec(alpha_s=0.02, scv=1.0, most=4, gpus=1, parameter_bytes=GB) for _ in range(3)]
    return world(line(*stages, rate_rps=60, cv=4, count=2000), nodes=(server(2),), hop_s=0.001)


def test_the_same_seed_gives_the_same_log_byte_for_byte(tmp_path: Path) -> None:
    def run(seed: int, name: str) -> tuple[str, bytes]:
        script = Script([(1.0, SetReplicas("p-stage-1", 4)), (5.0, SetReplicas("p-stage-1", 2))])
        outcome = simulate(busy_world(), script, seed, log=tmp_path / name)  # type: ignore[arg-type]
        check(outcome)
        return outcome.log_sha256, (tmp_path / name).read_bytes()

    first, again, other = run(1, "a"), run(1, "b"), run(2, "c")
    assert first == again
    assert first[0] != other[0]
    assert len(first[1].splitlines()) > 4000


def test_decisions_move_neither_arrivals_nor_service_times() -> None:
    stages = [StageSpec(alpha_s=0.02, scv=1.0) for _ in range(2)]
    w = world(line(*stages, rate_rps=30, cv=2, count=500))
    few = simulate(w, None, 3).pipelines[0]
    many = simulate(w, Script([(0.0, SetReplicas(f"p-stage-{k}", 500)) for k in range(2)]), 3).pipelines[0]
    assert np.array_equal(few.arrived_s, many.arrived_s)
    services = [np.frombuffer(draws.factors(1.0, 500, 3, 0, k) or b"") * 0.02 for k in range(2)]
    assert np.allclose(many.latency_s, services[0] + services[1])
    assert np.all(few.latency_s >= many.latency_s - 1e-12)


def test_a_run_ends_at_its_limit_with_what_is_left() -> None:
    outcome = simulate(world(line(StageSpec(alpha_s=1.0), times_s=(0.0, 0.1, 0.2)), limit_s=2.5), None, 1)
    check(outcome)
    assert np.isnan(outcome.pipelines[0].finished_s).tolist() == [False, False, True]
    assert outcome.pipelines[0].latency_s[2] == np.inf
    assert outcome.ended_s == 2.5


def test_a_run_that_nobody_can_serve_ends_at_once_when_nobody_steers() -> None:
    outcome = simulate(world(line(StageSpec(alpha_s=1.0, replicas=0), times_s=(0.5,))), None, 1)
    assert np.isnan(outcome.pipelines[0].finished_s).all()
    check(outcome)


def test_arrivals_have_their_rate_and_variation() -> None:
    for cv in (0.0, 0.5, 1.0, 4.0):
        times = draws.arrivals_s(ArrivalSpec(rate_rps=50, cv=cv, count=200_000), 0, 5, 0)
        gaps = np.diff(times)
        assert np.mean(gaps) == pytest.approx(0.02, rel=0.03)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.05, abs=1e-9)
    times = draws.arrivals_s(ArrivalSpec(rate_rps=50, cv=8), 100, 5, 0)
    assert len(times) > 0
    assert times[-1] <= 100
    assert draws.arrivals_s(ArrivalSpec(), 100, 5, 0).size == 0


def test_a_broken_law_is_told() -> None:
    outcome = simulate(world(line(StageSpec(alpha_s=1.0), times_s=(0.0, 0.5))), None, 1)
    check(outcome)
    object.__setattr__(outcome.pipelines[0].stages[0], "queue_mean", 3.0)
    with pytest.raises(LawError, match="Little"):
        check(outcome)


def test_progress_is_told_at_every_tick() -> None:
    told: list[float] = []
    spec = line(StageSpec(alpha_s=1.0), times_s=(0.0,))
    simulate(world(spec, nodes=(NodeSpec(),), tick_s=0.25), None, 1, progress=told.append)
    assert told == [0.25, 0.5, 0.75, 1.0]
