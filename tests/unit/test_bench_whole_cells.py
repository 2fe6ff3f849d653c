"""Cells, twins and searches of `bench e2e` and `mixed`, and the policies they start, without a world."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from keystage.baselines.static import Static
from keystage.bench import e2e_cells, mixed_cells
from keystage.bench.e2e_cells import Cell, best_static, climb, order, plan, proportional, served
from keystage.bench.paper_policies import RIVALS, Traffic
from keystage.bench.sim_vs_local import Profile
from keystage.bench.steered import Order, drive, steering
from keystage.bench.whole_trace import CountTrace
from keystage.bench.whole_twin import WARM_S, simulated, start_times, twin
from keystage.bench.whole_world import Outcome
from keystage.controller.domain.decision import Action
from keystage.controller.domain.platform import PlatformError
from keystage.controller.domain.snapshot import Snapshot
from keystage.simulator import api
from keystage.simulator.run import simulate

CELL = Cell(4.0, 7, 5.0)
PROFILE = Profile(beside_s=0.004, occupied_s=0.0005)


def outcome(policy: str, replicas: tuple[int, ...] = ()) -> Outcome:
    return Outcome(plan(CELL, policy, replicas), (), (), 2, (0.3, 0.5), 4, 0.1, 0, np.empty((0, 6)))


# ---------------------------------------------------------------- e2e


def test_all_policies_of_a_cell_meet_the_same_arrivals() -> None:
    times = [served(CELL, policy).times_s for policy in e2e_cells.POLICIES]
    assert all(np.array_equal(t, times[0]) for t in times)
    assert len(times[0]) == round(CELL.rate_rps * 5)
    assert times[0][-1] == pytest.approx(5.0, rel=0.01)


def test_infless_gets_the_whole_model_and_as_many_gpus_at_the_start() -> None:
    whole, staged = served(CELL, "infless"), served(CELL, "cocktail")
    assert len(whole.parts) == 1
    assert sum(whole.replicas) == sum(staged.replicas) == 4
    assert whole.functions == ("whole-stage-0",)


def test_orders_go_through_json_and_make_the_policy() -> None:
    for policy in ("static", *RIVALS):
        told = order(CELL, policy)
        assert told is not None
        again = msgspec.json.decode(msgspec.json.encode(told), type=Order)
        assert again == told
        assert [type(value) for value in again.changes.values()] == [
            type(value) for value in told.changes.values()
        ]
        assert steering(again).steer(Snapshot(at_s=0.0, pipelines=(), functions=())) == []
    assert order(CELL, "off") is None
    with pytest.raises(KeyError, match="nobody"):
        steering(Order(policy="nobody"))


def test_static_alone_is_told_rates() -> None:
    told = Order(policy="static", traffic=[Traffic("a", 3.0, 2.0), Traffic("b", 4.0, 0.0)])
    made = steering(told)
    assert isinstance(made, Static)
    assert made._settings.rates_rps == {"a": 3.0, "b": 4.0}
    assert made._settings.arrival_scv == pytest.approx(2.0)


def test_an_idle_twin_takes_the_published_time_and_what_is_beside_it() -> None:
    one = dataclasses.replace(served(CELL, "off"), times_s=np.array([0.0, 1.0]))
    found = simulate(twin([one], PROFILE, api.LoadSpec(), 24), None, 1)
    latency_s = found.pipelines[0].latency_s
    assert latency_s == pytest.approx(np.full(12, 0.137 + PROFILE.beside_s))
    assert found.pipelines[0].arrived_s[-2:] == pytest.approx([WARM_S, WARM_S + 1])


def test_a_twin_is_told_median_and_spread_of_starts() -> None:
    told = start_times([0.1, 0.2, 0.4])
    assert told.fixed_s == pytest.approx(0.2)
    assert told.spread_s == pytest.approx(np.log(2) * np.sqrt(2 / 3))
    assert start_times([]).fixed_s > 0


@pytest.mark.parametrize("policy", e2e_cells.POLICIES)
def test_every_policy_has_a_twin(policy: str) -> None:
    found = simulated(outcome(policy), PROFILE, 7)
    assert found.counted == round(CELL.rate_rps * 5)
    assert found.mean_s >= 0.13
    assert found.gpu_s >= 1 * 5.0


def test_the_best_static_allocation_uses_the_total_and_beats_its_neighbours() -> None:
    best = best_static(CELL, 9.3, PROFILE)
    assert sum(best) == 10
    assert min(best) >= 1

    def mean_s(replicas: tuple[int, ...]) -> float:
        return simulated(outcome("off", replicas), PROFILE, 7).mean_s

    for source in range(4):
        for to in range(4):
            moved = list(best)
            moved[source] -= 1
            moved[to] += 1
            if min(moved) >= 1:
                assert mean_s(best) <= mean_s(tuple(moved)) + 1e-9


def test_a_climb_ends_where_no_move_helps() -> None:
    seen: list[tuple[int, ...]] = []

    def cost(counts: tuple[int, ...]) -> float:
        seen.append(counts)
        return abs(counts[0] - 1) + abs(counts[1] - 5)

    assert climb((4, 1, 1), cost) == (1, 4, 1) or climb((4, 1, 1), cost) == (1, 5, 0)
    assert all(min(counts) >= 1 and sum(counts) == 6 for counts in seen)


def test_the_proportional_start_gives_every_stage_one_and_all_that_there_is() -> None:
    functions = served(CELL, "off").parts
    assert proportional(functions, 4) == (1, 1, 1, 1)
    assert sum(proportional(functions, 11)) == 11


# ---------------------------------------------------------------- mixed


def a_load(minutes: int = 8, speed: float = 20.0) -> mixed_cells.Load:
    random = np.random.default_rng(3)
    counts = random.poisson(np.array([800.0, 120.0, 80.0])[:, None], (3, 20)).astype(float)
    trace = CountTrace(("a", "b", "c"), counts, None, "three functions")
    return mixed_cells.Load(mixed_cells.Cell(100, (0, 1, 2), 0, minutes, speed, 5), trace)


def test_the_pool_holds_the_mean_load_at_the_stated_utilisation() -> None:
    load = a_load()
    gpus = 4 * mixed_cells.servers(load)
    assert 0.8 * mixed_cells.POOL_LOAD < load.erlangs / gpus <= mixed_cells.POOL_LOAD


@pytest.mark.parametrize("policy", mixed_cells.POLICIES)
def test_every_policy_serves_all_requests_of_a_shared_pool(policy: str) -> None:
    load = a_load()
    allocation = load.off(50.0) if policy == "off" else ()
    score, found = mixed_cells.simulate_cell(load, policy, allocation)
    assert [len(p.arrived_s) for p in found.pipelines] == [len(t) for t in load.times_s]
    assert score.unserved == 0
    assert score.schedule_s == pytest.approx(24.0 * 3 / 4)
    assert score.gpu_s <= 4 * mixed_cells.servers(load) * score.schedule_s


def test_off_uses_what_it_may_and_is_stable() -> None:
    load = a_load()
    for gpus in (50.2, 100.0):
        found = load.off(gpus)
        assert sum(map(sum, found)) <= np.ceil(gpus)
        assert sum(map(sum, found)) >= gpus - 4
    starved = load.off(3.0)
    for one, rate_rps, counts in zip(load.served("off"), load.rates_rps, starved, strict=True):
        assert all(rate_rps * p.item_s < c for p, c in zip(one.parts, counts, strict=True))


@pytest.mark.slow
def test_equal_gpu_seconds_are_found_by_effort() -> None:
    load = a_load()
    target = 1.15 * mixed_cells.simulate_cell(load, "cocktail")[0].gpu_s
    found = mixed_cells.equalise(load, "cocktail", target)
    assert found.tried == mixed_cells.SEARCH_STEPS
    assert found.ratio == pytest.approx(1.0, abs=0.08)
    assert found.effort > 1


def test_a_live_cell_begins_with_one_of_each_and_goes_through_the_gateway() -> None:
    load = a_load()
    staged = mixed_cells.live_plan(load, "keystage")
    assert staged.through_gateway
    assert [one.replicas for one in staged.served] == [(1, 1, 1, 1)] * 3
    assert [one.replicas for one in mixed_cells.live_plan(load, "infless").served] == [(4,)] * 3


# ---------------------------------------------------------------- a policy's process


class _Broken:
    """A platform that fails a few times, and then ends the run."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self.looks = 0
        self.applied: list[Sequence[Action]] = []

    def observe(self) -> Snapshot:
        self.looks += 1
        if self.looks == 1:
            raise PlatformError("not there yet")
        return Snapshot(at_s=float(self.looks), pipelines=(), functions=())

    def apply(self, actions: Sequence[Action]) -> None:
        self.applied.append(actions)
        if len(self.applied) == 3:
            self._stop.set()


def test_a_platform_that_fails_is_tried_again() -> None:
    stop = threading.Event()
    platform = _Broken(stop)
    assert drive(platform, steering(Order(policy="cocktail")), 0.01, stop) == 1
    assert platform.looks == 4
    assert platform.applied == [[], [], []]
