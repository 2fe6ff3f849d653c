"""Placement by example: regimes, affinity, reserve, victims, bounds, ablation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from support.placement_world import GB, Kind, node, placed_by, snapshot, stage

from keystage.controller.domain.decision import Site
from keystage.controller.domain.snapshot import GpuView, NodeView, Placed, Snapshot, StartTimes
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy import placement
from keystage.controller.policy.placement import place
from keystage.controller.policy.placement_ground import Ground
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings

EQUAL = Kind(starts=StartTimes(remote_s=1.0))


def nodes_of(plan: Plan) -> list[str]:
    return [site.node for site in plan.sites]


def test_with_gpus_to_spare_key_stages_go_apart_and_others_are_packed() -> None:
    seen = snapshot([node(f"n{i}") for i in range(8)], [stage(k, kind=EQUAL) for k in range(6)])
    plans, report = placed_by(seen, [2, 2, 1, 1, 1, 1])
    assert (report.regime, report.placed, report.short) == ("spare", 8, ())
    assert report.kl == pytest.approx(report.best_kl)
    key = {n for p in plans[:2] for n in nodes_of(p)}
    others = {n for p in plans[2:] for n in nodes_of(p)}
    assert len(key) == 4
    assert len(others) == 1
    assert not key & others


def test_under_contention_key_load_is_even() -> None:
    nodes = [node("a", (1, 1, 0, 0)), node("b", (1, 1, 0, 0)), node("c", (1, 1, 1, 0))]
    plans, report = placed_by(snapshot(nodes, [stage(0, kind=EQUAL)]), [3])
    assert report.regime == "contended"
    assert "of 12 GPUs" in report.why
    assert sorted(nodes_of(plans[0])) == ["a", "b", "c"]
    assert report.kl == pytest.approx(0.0)


def test_the_regime_does_not_swing() -> None:
    nodes = [node("a", (1, 1, 1, 0)), node("b", (1, 1, 0, 0))]  # 5 held + 0 asked + 1 reserved of 8: 0.75
    busy = snapshot(nodes, [stage(0, [Placed("r", "a", (0,))], kind=EQUAL)])
    assert placed_by(busy, [1])[1].regime == "contended"
    calmer = snapshot([node("a", (1, 1, 0, 0)), nodes[1]], *[v.stages for v in busy.pipelines])  # 0.625
    assert placed_by(calmer, [1], contended=True)[1].regime == "spare"
    between = snapshot([node("a", (1, 1, 1, 1)), node("b", (0,) * 3)], [stage(0, kind=EQUAL)])  # 5 of 7
    assert placed_by(between, [0])[1].regime == "spare"
    assert placed_by(between, [0], contended=True)[1].regime == "contended"


def test_a_key_stage_starts_where_its_parameters_are_in_memory() -> None:
    nodes = [node(f"n{i}") for i in range(6)] + [node("warm", (1, 1, 0, 0), memory=["p-stage-0"])]
    plans, _ = placed_by(snapshot(nodes, [stage(0)]), [3])
    assert nodes_of(plans[0])[:2] == ["warm", "warm"]
    assert nodes_of(plans[0])[2] == "n0"


def test_half_a_second_of_start_time_is_less_than_a_crowded_node() -> None:
    """The trade: one second for one nat of spread."""
    kind = Kind(starts=StartTimes(memory_s=0.8, disk_s=1.0))
    nodes = [node("warm", (1, 1, 1, 0), memory=["p-stage-0"]), node("cold", disk=["p-stage-0"])]
    plans, _ = placed_by(snapshot(nodes, [stage(0, kind=kind)]), [1])
    assert nodes_of(plans[0]) == ["cold"]


def test_other_stages_leave_room_for_one_more_of_each_key_stage() -> None:
    nodes = [node("a", (1, 1, 1, 0)), node("b", (0, 0, 0, 0))]
    stages = [stage(0, [Placed("r", "a", (0,))], EQUAL), stage(1, kind=EQUAL), stage(2, kind=EQUAL)]
    plans, report = placed_by(snapshot(nodes, stages), [1, 2, 0])
    assert nodes_of(plans[1]) == ["b", "b"]
    assert (report.reserved, report.unreserved) == (1, 0)
    full, report = placed_by(snapshot(nodes, stages), [1, 5, 0])  # nothing else is left: it is taken
    assert len(full[1].sites) == 5
    assert nodes_of(full[1])[-1] == "a"


def test_no_room_is_said_with_its_bound() -> None:
    nodes = [node("a", (1, 1, 1, 0)), node("b", (1, 1))]
    plans, report = placed_by(snapshot(nodes, [stage(0)]), [3])
    assert plans[0].sites == (Site("a", (3,)),)
    assert report.short == ("p-stage-0: 2 of 3 new replicas have no place: 6 of 6 GPUs are held",)
    _, report = placed_by(snapshot(nodes, [stage(0, kind=Kind(gpus=5))]), [1])
    assert "it needs 5 GPUs of one node, the largest has 4" in report.short[0]
    _, report = placed_by(snapshot(nodes, [stage(0, kind=Kind(gpu_bytes=80 * GB))]), [1])
    assert "80000000000 bytes of a GPU, the largest has 48000000000" in report.short[0]
    _, report = placed_by(snapshot([node("a", (), cores=0.5)], [stage(0, kind=Kind(gpus=0))]), [1])
    assert "no node has 1 cores free" in report.short[0]
    assert report.why == "the nodes have no GPUs"


def test_several_gpus_of_one_node_and_shared_gpus() -> None:
    nodes = [node("a", (1, 1, 1, 0)), node("b", (0, 1, 0, 0))]
    plans, _ = placed_by(snapshot(nodes, [stage(0, kind=Kind(gpus=3))]), [1])
    assert plans[0].sites == (Site("b", (0, 2, 3)),)
    plans, _ = placed_by(snapshot([node("a", (0, 0))], [stage(0, kind=Kind(gpu_bytes=20 * GB))]), [5])
    assert sorted(s.gpus for s in plans[0].sites) == [(0,), (0,), (1,), (1,)]


def test_stages_without_gpus_go_where_cores_are() -> None:
    nodes = [node("a", (), cores=2.0), node("b", (), cores=40.0), node("none", (0,), cores=0.0)]
    plans, report = placed_by(snapshot(nodes, [stage(0, kind=Kind(gpus=0))]), [3])
    assert set(nodes_of(plans[0])) <= {"a", "b"}
    assert report.placed == 3


def test_replicas_prefer_the_node_of_both_neighbours_among_equals() -> None:
    nodes = [node("a"), node("b", (1, 1, 0, 0)), node("c", (1, 1, 0, 0))]
    around = [stage(k, [Placed(f"r{k}", "c", (k // 2,))], EQUAL) for k in (0, 2)]
    stages = [around[0], stage(1, kind=EQUAL), around[1]]
    plans, _ = placed_by(snapshot(nodes, stages), [1, 1, 1], order=[1, 0, 2])
    assert nodes_of(plans[1]) == ["a"]  # a key stage: the free GPUs of `a` are worth more
    stages = [around[0], stage(1, kind=EQUAL), around[1], *(stage(k, kind=EQUAL) for k in (3, 4, 5))]
    plans, _ = placed_by(snapshot(nodes, stages), [1, 1, 1, 0, 0, 0], order=[3, 4, 5, 0, 1, 2])
    assert nodes_of(plans[1]) == ["c"]


def test_victims_even_the_load_of_a_key_stage() -> None:
    on = ["a", "a", "a", "b"]
    placed = [Placed(f"r{i}", n, (i,)) for i, n in enumerate(on)]
    nodes = [node("a", (1, 1, 1, 0)), node("b", (0, 0, 0, 1))]
    plans, _ = placed_by(snapshot(nodes, [stage(0, placed, EQUAL)]), [2])
    assert plans[0].victims == ("r2", "r1")
    starting = [*placed, Placed("r4", "b", (0,), is_ready=False)]
    plans, _ = placed_by(snapshot(nodes, [stage(0, starting, EQUAL)]), [3])
    assert plans[0].victims == ("r4", "r2")


def test_victims_of_other_stages_make_room_beside_key_stages() -> None:
    key = stage(0, [Placed("k", "a", (0,))], EQUAL)
    other = stage(1, [Placed("x", "a", (1,)), Placed("y", "b", (0,)), Placed("z", "c", (0,))], EQUAL)
    nodes = [node("a", (1, 1, 1, 1)), node("b", (1, 1, 1, 0)), node("c", (1, 0, 0, 0))]
    plans, _ = placed_by(snapshot(nodes, [key, other]), [1, 1])
    assert plans[1].victims == ("x", "z")


def test_the_ablation_takes_the_first_node_with_room() -> None:
    nodes = [node("a", (1, 0)), node("b"), node("c")]
    off = PolicySettings(spread=False)
    plans, _ = placed_by(snapshot(nodes, [stage(0, kind=EQUAL)]), [3], settings=off)
    assert nodes_of(plans[0]) == ["a", "b", "b"]
    placed = [Placed("r0", "a", (0,)), Placed("r1", "b", (0,))]
    plans, _ = placed_by(snapshot(nodes, [stage(0, placed)]), [1], settings=off)
    assert plans[0].victims == ()


def test_worlds_without_nodes_are_left_alone() -> None:
    seen = snapshot([], [stage(0)])
    plan = Plan(scale=seen.pipelines[0].stages[0].scale, wanted=3, reason="", is_stage=True, pipeline="p")
    assert place(PolicySettings(), seen, [plan], PolicyState(), {}) == ([plan], None)


def test_a_new_key_stage_is_a_reason_to_look_again() -> None:
    seen = snapshot([node(f"n{i}") for i in range(3)], [stage(k, kind=EQUAL) for k in range(3)])
    plans = [
        Plan(scale=s.scale, wanted=1, reason="", is_stage=True, pipeline="p", stage=s.stage)
        for s in seen.pipelines[0].stages
    ]
    before = PolicyState(published={"p": (1, 0, 2)})
    _, report = place(PolicySettings(), seen, plans, before, {"p": (0, 1, 2)})
    assert report is not None
    assert report.replanned == "new key stage in p"


def test_the_answer_does_not_depend_on_earlier_calls() -> None:
    first = [node(f"n{i}") for i in range(5)]
    seen = snapshot(first, [stage(k, kind=EQUAL) for k in range(3)])
    before = placed_by(seen, [2, 3, 1])
    other = snapshot([*first[:3], node("n3", (1, 1, 1, 1)), node("n4", memory=["p-stage-1"])], [stage(0)])
    placed_by(other, [7])
    other = snapshot([node(f"m{i}") for i in range(9)], [stage(0)])
    placed_by(other, [7])
    copy = msgspec.json.decode(msgspec.json.encode(seen), type=Snapshot)
    assert placed_by(copy, [2, 3, 1]) == before


def test_a_call_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = snapshot([node(f"n{i}") for i in range(3)], [stage(k, kind=EQUAL) for k in range(3)])
    before = placed_by(seen, [2, 1, 1])

    def fails(*_: object) -> None:
        raise ArithmeticError("in the middle of a tick")

    with monkeypatch.context() as patched:
        patched.setattr(placement, "Site", fails)
        with pytest.raises(ArithmeticError):
            placed_by(seen, [2, 1, 1])
    assert placed_by(seen, [2, 1, 1]) == before


def test_two_worlds_in_turn_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = [snapshot([node(f"{w}{i}") for i in range(3)], [stage(0, kind=EQUAL)]) for w in "abc"]
    before = [placed_by(seen, [2]) for seen in worlds]
    read: list[str] = []
    made = placement.Ground

    def counted(nodes: Sequence[NodeView]) -> Ground:
        read.append(nodes[0].node)
        return made(nodes)

    monkeypatch.setattr(placement, "Ground", counted)
    for _ in range(3):
        assert [placed_by(seen, [2]) for seen in worlds[1:]] == before[1:]
    assert read == []
    assert placed_by(worlds[0], [2]) == before[0]
    assert read == ["a0"]


def test_neighbours_are_told_by_stage_numbers_not_by_places() -> None:
    """Stages 10 -> 20 -> 30 in that order: 20 lies between them wherever it stands in the list."""
    views = [
        msgspec.structs.replace(stage(k, [Placed(f"r{k}", on, (k // 10,))] if on else (), EQUAL), after=after)
        for k, on, after in ((10, "c", ()), (20, "", (10,)), (30, "c", (20,)), (1, "b", ()))
    ]
    nodes = [node(n, (0, 1, 0, 1)) for n in "abc"]
    others = [stage(k, kind=EQUAL) for k in (40, 50, 60)]
    order = [40, 50, 60, 10, 20, 30, 1]
    plans, _ = placed_by(snapshot(nodes, [*views, *others]), [1, 1, 1, 1, 0, 0, 0], order=order)
    assert nodes_of(plans[1]) == ["c"]


def test_a_replica_as_large_as_a_node_is_no_reason_to_look_again() -> None:
    seen = snapshot([node(f"n{i}") for i in range(4)], [stage(0, kind=Kind(gpus=4, starts=EQUAL.starts))])
    _, report = placed_by(seen, [1])
    assert report.kl == report.best_kl == pytest.approx(1.386294, abs=1e-6)
    state = PolicyState(published={"p": (0,)})
    plan = Plan(
        scale=seen.pipelines[0].stages[0].scale, wanted=1, reason="", is_stage=True, pipeline="p", stage=0
    )
    _, again = place(PolicySettings(), seen, [plan], state, {"p": (0,)})
    assert again is not None
    assert again.replanned == ""


def test_clumps_on_small_nodes_are_seen() -> None:
    """One of two on a node of one GPU, though the large one has seven free: 0.35 nats above the least."""
    nodes = [node("big", (1, *(0,) * 7)), node("s", (0,), memory=["p-stage-0"]), node("t", (1,))]
    kind = Kind(starts=StartTimes(memory_s=0.0, remote_s=9.0))
    _, report = placed_by(snapshot(nodes, [stage(0, [Placed("r", "big", (0,))], kind)]), [2])
    assert (report.kl, report.best_kl) == (pytest.approx(0.569717), pytest.approx(0.223144))
    assert report.replanned.startswith("divergence 0.35")


@pytest.mark.parametrize("cores", [1e308, 1.7e308, math.inf, math.nan, -1.0, -1e308])
def test_garbled_nodes_are_no_error(cores: float) -> None:
    bad = NodeView(
        node="bad", gpus=(GpuView(-1, -5, -2), GpuView(0, 0), GpuView(48 * GB, 48 * GB)), cores_free=cores,
        memory_free_bytes=-(2**62),
    )  # fmt: skip
    late = Kind(starts=StartTimes(gpu_s=-1.0, memory_s=math.nan, disk_s=1e308, remote_s=1.7e308))
    for kind in (EQUAL, late, Kind(gpus=0), Kind(gpus=-3), Kind(gpus=2, gpu_bytes=-1)):
        plans, report = placed_by(snapshot([bad, node("good")], [stage(0, kind=kind)]), [2], order=[0])
        assert len(plans[0].sites) == report.placed == 2
        assert math.isfinite(report.kl)
