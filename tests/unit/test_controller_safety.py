"""What the loop does about a world that lies, whose clock jumps, or that has less than it runs.

The real loop and policy over a fluid world in virtual time. Numbers seen in all tests: what the same world
does without the trouble. Trouble must cost no replica that the load needs, and bring none that it does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.controller_world import FluidStage, FluidWorld
from support.loop_world import LoopWorld, Spoil, with_stages

from keystage.controller.decisions import replay
from keystage.controller.domain.snapshot import (
    Counters,
    GpuView,
    NodeView,
    Override,
    RouterSample,
    Snapshot,
    StageView,
    Starting,
    WorkerSample,
)

RATE_RPS = 150.0
SETTLED_S = 60.0
NEEDED = (1, 4, 1)
"""Replicas that carry it below 90 % utilisation: nothing may take these."""
RESTED = [1, 5, 2]
"""What it has: a little more, which chance would ask for again."""
TROUBLE_S = 10.0
"""Longer than statistics may stand still, and than a surplus is held."""


@pytest.fixture
def world(tmp_path: Path) -> LoopWorld:
    """A world at rest under load: its second stage needs more than one replica."""
    made = LoopWorld(FluidWorld([FluidStage(s) for s in (0.005, 0.02, 0.005)]), tmp_path / "decisions.jsonl")
    made.run(SETTLED_S, RATE_RPS)
    assert made.replicas[-1] == RESTED
    assert len({tuple(n) for n in made.replicas[-40:]}) == 1
    return made


def is_kept(numbers: list[int]) -> bool:
    """Whether replicas are there that the load needs, and none beyond one more that it does not."""
    return all(least <= now <= rested + 1 for least, now, rested in zip(NEEDED, numbers, RESTED, strict=True))


def flows(counters: Counters, change: Callable[[float], float]) -> Counters:
    names = ("arrivals", "gap_sum_s", "gap_sq_sum_s2", "services", "service_sum_s", "service_sq_sum_s2")
    return msgspec.structs.replace(
        counters, **{name: change(getattr(counters, name)) for name in (*names, "sojourn_sum_s")}
    )


def with_routers(change: Callable[[RouterSample], tuple[RouterSample, ...]]) -> Spoil:
    def stage(view: StageView) -> StageView:
        return msgspec.structs.replace(view, routers=tuple(s for r in view.routers for s in change(r)))

    return lambda snapshot: with_stages(snapshot, stage)


def with_counters(change: Callable[[Counters], Counters]) -> Spoil:
    return with_routers(lambda r: (msgspec.structs.replace(r, counters=change(r.counters)),))


def with_workers(change: Callable[[WorkerSample], WorkerSample]) -> Spoil:
    def stage(view: StageView) -> StageView:
        return msgspec.structs.replace(view, workers=tuple(change(w) for w in view.workers))

    return lambda snapshot: with_stages(snapshot, stage)


def with_scale(**fields: Any) -> Spoil:
    def stage(view: StageView) -> StageView:
        return msgspec.structs.replace(view, scale=msgspec.structs.replace(view.scale, **fields))

    return lambda snapshot: with_stages(snapshot, stage)


def second_router(**fields: Any) -> Spoil:
    """A second router that has nothing to do, as far as it says."""

    def both(router: RouterSample) -> tuple[RouterSample, ...]:
        idle = msgspec.structs.replace(
            router, incarnation="b", counters=flows(router.counters, lambda _: 0.0)
        )
        return router, msgspec.structs.replace(idle, **fields)

    return with_routers(both)


def at_times(spoil: Spoil, every: int) -> Spoil:
    """Spoils each n-th look: a garbled answer between right ones."""
    turns = itertools.count(1)
    return lambda snapshot: spoil(snapshot) if next(turns) % every == 0 else snapshot


BACK = with_counters(lambda c: flows(c, lambda value: value * 0.5))
LIES: dict[str, Spoil] = {
    "counters go back": BACK,
    "counters go back now and then": at_times(BACK, 3),
    "counters fall to zero and return": at_times(with_counters(lambda c: flows(c, lambda _: 0.0)), 5),
    "counters are NaN": with_counters(lambda c: flows(c, lambda _: math.nan)),
    "counters are infinite": with_counters(lambda c: flows(c, lambda _: math.inf)),
    "counters are negative": with_counters(lambda c: flows(c, lambda value: -value)),
    "counters are missing": with_counters(lambda _: Counters()),
    "the queue is NaN": with_counters(lambda c: msgspec.structs.replace(c, queue=math.nan)),
    "the queue is negative": with_counters(lambda c: msgspec.structs.replace(c, queue=-1e9)),
    "the queue is infinite": with_counters(lambda c: msgspec.structs.replace(c, queue=math.inf)),
    "the router's clock is NaN": with_routers(lambda r: (msgspec.structs.replace(r, at_s=math.nan),)),
    "the router's clock is in the future": with_routers(
        lambda r: (msgspec.structs.replace(r, at_s=(r.at_s or 0.0) + 1e9),)
    ),
    "the router's clock stands": with_routers(lambda r: (msgspec.structs.replace(r, at_s=1.0),)),
    "no router tells anything": with_routers(lambda _: ()),
    "a second router tells nothing": second_router(counters=Counters()),
    "workers are busy backwards": with_workers(
        lambda w: msgspec.structs.replace(w, busy_s=-(w.busy_s or 0.0), rows=-(w.rows or 0.0))
    ),
    "workers tell NaN": with_workers(
        lambda w: msgspec.structs.replace(w, busy_s=math.nan, rows=math.nan, slots=math.nan)
    ),
    "replicas are ready and starting at once": with_scale(
        starting=tuple(Starting(f"w{i}", 1e12) for i in range(3))
    ),
    "more are ready than were ever wanted": with_scale(ready=900),
    "a replica is ready since the future": with_scale(starting=(Starting("w9", math.inf),)),
    "a replica starts at no time": with_scale(starting=(Starting("w9", math.nan),)),
    "the start takes NaN": lambda s: with_stages(s, lambda v: msgspec.structs.replace(v, start_s=math.nan)),
    "a profile takes minus one": lambda s: with_stages(
        s, lambda v: msgspec.structs.replace(v, profile_s=-1.0)
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_take_no_replica_and_bring_none(world: LoopWorld, lie: str) -> None:
    world.spoil = LIES[lie]
    during = world.run(TROUBLE_S)
    world.spoil = lambda snapshot: snapshot
    after = world.run(2 * TROUBLE_S)
    assert [numbers for numbers in (*during, *after) if not is_kept(numbers)] == []
    count, differences = replay(world.log)
    assert count > 0
    assert differences == []


def test_a_router_that_stands_still_is_believed_for_three_seconds_and_then_named(world: LoopWorld) -> None:
    none = flows(Counters(queue=40, in_flight=0), lambda _: 9.0)
    world.spoil = second_router(at_s=7.0, counters=none)
    world.run(3.5)
    known = world.replicas[-1]
    for _ in range(40):
        decision = world.tick()
        assert decision is not None
        assert {r.reason.split(" for ")[0] for r in decision.reports} == {
            "hold: statistics of router b stand still"
        }
    assert world.replicas[-1] == known
    world.spoil = lambda snapshot: snapshot
    world.run(90.0)
    assert is_kept(world.replicas[-1])


def test_replicas_that_routers_know_and_the_world_does_not_are_asked_for_and_bounded(
    world: LoopWorld,
) -> None:
    world.spoil = with_scale(ready=0)
    during = world.run(TROUBLE_S)
    assert all(now >= before for numbers in during for now, before in zip(numbers, RESTED, strict=True))
    assert all(
        now <= 2 * before + 2 for numbers in during for now, before in zip(numbers, RESTED, strict=True)
    )
    assert len({tuple(numbers) for numbers in during}) <= 2  # once, not again at each tick
    world.spoil = lambda snapshot: snapshot
    world.run(90.0)
    assert is_kept(world.replicas[-1])


def test_a_burst_is_answered_although_one_answer_in_five_is_garbled(world: LoopWorld) -> None:
    rested = world.replicas[-1][1]
    world.spoil = at_times(BACK, 5)
    assert max(n[1] for n in world.run(3.0, 3 * RATE_RPS)) >= 2 * rested
    world.run(10.0)
    assert world.fluid.stages[1].queue < RATE_RPS / 10


def test_a_router_that_restarts_costs_no_replica(world: LoopWorld) -> None:
    lives = itertools.count()
    began: dict[str, Counters] = {}
    name = ""

    def since(router: RouterSample, key: str) -> RouterSample:
        first = began.setdefault(key, router.counters)
        fields = {
            field: (getattr(router.counters, field) or 0.0) - (getattr(first, field) or 0.0)
            for field in Counters.__struct_fields__
            if getattr(first, field) is not None and field not in ("queue", "in_flight")
        }
        counters = msgspec.structs.replace(router.counters, **fields)
        return msgspec.structs.replace(router, incarnation=key, counters=counters)

    def stage(view: StageView) -> StageView:
        key = f"{name}-{view.stage}"
        return msgspec.structs.replace(view, routers=tuple(since(r, key) for r in view.routers))

    world.spoil = lambda snapshot: with_stages(snapshot, stage)
    for _ in range(6):
        name = f"life{next(lives)}"
        assert all(is_kept(numbers) for numbers in world.run(5.0))


# ---------------------------------------------------------------- clocks


@pytest.mark.parametrize("hours", [-24.0, -3.0, -0.001, 0.001, 3.0, 24.0])
def test_a_snapshot_clock_that_jumps_moves_no_replica(world: LoopWorld, hours: float) -> None:
    world.shift_s = hours * 3600
    there = world.run(TROUBLE_S)
    world.shift_s = 0.0
    back = world.run(TROUBLE_S)
    assert [numbers for numbers in (*there, *back) if not is_kept(numbers)] == []


def test_a_jump_back_does_not_keep_a_surplus_for_the_hours_it_took(world: LoopWorld) -> None:
    world.run(5.0, 5 * RATE_RPS)
    most = world.replicas[-1][1]
    world.shift_s = -3 * 3600.0
    world.run(90.0, RATE_RPS)
    assert world.replicas[-1][1] < most


def test_a_world_that_is_away_for_hours_is_found_as_it_is(world: LoopWorld) -> None:
    world.is_away = True
    world.run(5.0)
    world.fluid.now += 3 * 3600.0
    world.is_away = False
    assert all(is_kept(numbers) for numbers in world.run(30.0))


# ---------------------------------------------------------------- people


def steps(numbers: list[list[int]], stage: int) -> Iterator[int]:
    return (b[stage] - a[stage] for a, b in itertools.pairwise(numbers))


def test_what_a_person_asked_for_is_taken_back_one_at_a_time(world: LoopWorld) -> None:
    rested = world.replicas[-1][1]
    world.fluid.stages[1].override = Override(rested + 5, world.fluid.now + 20.0)
    assert {n[1] for n in world.run(19.0)} == {rested + 5}
    after = world.run(90.0)
    assert world.fluid.stages[1].override is None
    assert min(steps(after, 1)) == -1
    assert after[-1][1] <= rested + 1
    assert min(n[1] for n in after) >= rested


def test_what_a_person_took_away_comes_back_when_it_expires(world: LoopWorld) -> None:
    world.fluid.stages[1].override = Override(2, world.fluid.now + 4.0)
    assert {n[1] for n in world.run(3.0)} == {2}
    after = world.run(60.0)
    assert min(n[1] for n in after[8:]) >= NEEDED[1]


@pytest.mark.parametrize("expires_at_s", [math.nan, -math.inf, 0.0])
def test_a_wish_that_ends_at_no_time_is_no_wish(world: LoopWorld, expires_at_s: float) -> None:
    rested = world.replicas[-1]
    world.fluid.stages[1].override = Override(1, expires_at_s)
    assert all(numbers == rested for numbers in world.run(2.0))
    assert world.fluid.stages[1].override is None


# ---------------------------------------------------------------- budget


def test_a_budget_below_what_runs_is_kept_at_once_and_nobody_goes_below_the_minimum(world: LoopWorld) -> None:
    whole = sum(world.replicas[-1])
    world.fluid.budget = whole - 1
    first = world.run(0.25)[0]
    assert sum(first) == whole - 1
    assert min(first) >= 1
    assert all(sum(n) <= whole - 1 and min(n) >= 1 for n in world.run(20.0))
    world.fluid.budget = None
    world.run(20.0)
    assert is_kept(world.replicas[-1])


def test_a_budget_below_the_minimums_takes_only_what_is_above_them(world: LoopWorld) -> None:
    world.fluid.budget = 1
    assert all(n == [1, 1, 1] for n in world.run(10.0)[1:])


def test_a_budget_that_comes_and_goes_does_not_make_numbers_swing(world: LoopWorld) -> None:
    whole = sum(world.replicas[-1])
    for k in range(8):
        world.fluid.budget = whole - 1 if k % 2 else None
        for numbers in world.run(1.0):
            assert whole - 1 <= sum(numbers) <= whole + 1


def on_gpus(count: int) -> Spoil:
    """Every replica takes a whole GPU, and there are so many, on nodes of four."""
    size = 80 << 30
    nodes = tuple(
        NodeView(node=f"n{k}", gpus=(GpuView(size, size),) * min(4, count - 4 * k), cores_free=64.0)
        for k in range((count + 3) // 4)
    )

    def spoil(snapshot: Snapshot) -> Snapshot:
        seen = with_stages(snapshot, lambda v: msgspec.structs.replace(v, gpus=1, gpu_bytes=size))
        return msgspec.structs.replace(seen, nodes=nodes)

    return spoil


def test_gpus_that_vanish_are_not_counted_on_and_minimums_are_kept(world: LoopWorld) -> None:
    world.spoil = on_gpus(12)
    world.run(10.0)
    assert is_kept(world.replicas[-1])
    world.spoil = on_gpus(5)
    for numbers in world.run(20.0):
        assert sum(numbers) <= 5
        assert min(numbers) >= 1
    world.spoil = on_gpus(12)
    world.run(30.0)
    assert is_kept(world.replicas[-1])


def test_when_no_gpu_is_seen_any_more_nothing_is_taken_to_zero(world: LoopWorld) -> None:
    world.spoil = on_gpus(12)
    world.run(10.0)
    world.spoil = on_gpus(0)
    assert all(min(numbers) >= 1 for numbers in world.run(20.0))
    world.spoil = on_gpus(12)
    world.run(30.0)
    assert is_kept(world.replicas[-1])


# ---------------------------------------------------------------- another leader


@pytest.mark.parametrize("rate_rps", [RATE_RPS, RATE_RPS / 3, 2 * RATE_RPS])
def test_another_leader_changes_no_number_at_a_steady_rate(world: LoopWorld, rate_rps: float) -> None:
    world.run(120.0, rate_rps)
    rested = world.replicas[-1]
    for _ in range(5):
        world.start_controller()
        for numbers in world.run(15.0):
            assert all(0 <= now - before <= 1 for now, before in zip(numbers, rested, strict=True))


@pytest.mark.parametrize("after_s", [0.5, 1.0, 2.0, 4.0, 8.0])
def test_another_leader_in_a_burst_takes_nothing_back_before_its_time(
    world: LoopWorld, after_s: float
) -> None:
    world.run(after_s, 4 * RATE_RPS)
    given = world.replicas[-1]
    world.start_controller()
    for numbers in world.run(8.0):
        assert all(now >= before for now, before in zip(numbers, given, strict=True))
    assert world.fluid.stages[1].queue < RATE_RPS


def test_leaders_that_die_every_second_still_answer_a_burst(world: LoopWorld) -> None:
    for numbers in world.run(1.0, 4 * RATE_RPS):
        assert numbers[1] >= 3
    most = 0
    for _ in range(12):
        world.start_controller()
        now = [n[1] for n in world.run(1.0)]
        assert min(now) >= most, "a replica was taken by a leader that had just begun"
        most = now[-1]
    assert most * 50 >= 4 * RATE_RPS
    assert world.fluid.stages[1].queue < RATE_RPS
