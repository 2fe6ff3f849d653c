"""Placement on random clusters: within capacity, exact for one stage, the same with and without memory."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.placement_world import GB, Kind, node, placed_by, snapshot, stage

from keystage.controller.domain.snapshot import GpuView, NodeView, Placed, StageView, StartTimes
from keystage.controller.maths import divergence
from keystage.controller.policy.placement_cost import TRADE_S, place_cost, want_of
from keystage.controller.policy.placement_index import NodeIndex
from keystage.controller.policy.placement_search import Search
from keystage.controller.policy.settings import PolicySettings

FUNCTIONS = [f"p-stage-{k}" for k in range(4)]

gpus = st.builds(
    lambda total, taken, n: GpuView(total, total - taken * total // 4 if n else total, n),
    st.sampled_from([24 * GB, 48 * GB]), st.integers(1, 4), st.integers(0, 2),
)  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeView]:
    count = draw(st.integers(1, 7))
    return [
        NodeView(
            node=f"n{j}",
            gpus=tuple(draw(st.lists(gpus, max_size=4))),
            cores_free=draw(st.sampled_from([0.0, 0.5, 3.0, 64.0])),
            memory_free_bytes=draw(st.sampled_from([0, 4 * GB, 99 * GB])),
            in_memory=frozenset(draw(st.lists(st.sampled_from(FUNCTIONS), max_size=2))),
            on_disk=frozenset(draw(st.sampled_from([(), FUNCTIONS]))),
        )
        for j in range(count)
    ]


kinds = st.builds(
    Kind,
    gpus=st.integers(0, 3),
    gpu_bytes=st.sampled_from([0, 8 * GB, 24 * GB, 48 * GB, 80 * GB]),
    starts=st.builds(
        StartTimes, gpu_s=st.sampled_from([None, 0.1]), memory_s=st.sampled_from([None, 0.8]),
        disk_s=st.sampled_from([None, 5.6]), remote_s=st.sampled_from([None, 9.0, math.nan]),
    ),
)  # fmt: skip


@st.composite
def stages(draw: st.DrawFn, nodes: list[NodeView]) -> list[StageView]:
    found = []
    for k in range(draw(st.integers(1, 4))):
        on = draw(st.lists(st.sampled_from([n.node for n in nodes] + ["gone"]), max_size=4))
        placed = [Placed(f"{k}-{i}", name, (), draw(st.booleans())) for i, name in enumerate(on)]
        found.append(stage(k, placed, draw(kinds)))
    return found


@given(st.data(), st.booleans(), st.booleans())
def test_places_are_within_capacity_and_victims_exist(
    data: st.DataObject, contended: bool, spread: bool
) -> None:
    nodes = data.draw(clusters())
    seen = snapshot(nodes, data.draw(stages(nodes)))
    views = seen.pipelines[0].stages
    wanted = data.draw(st.lists(st.integers(0, 12), min_size=len(views), max_size=len(views)))
    plans, report = placed_by(seen, wanted, contended=contended, settings=PolicySettings(spread=spread))
    by_name = {n.node: n for n in nodes}
    held: Counter[tuple[str, int]] = Counter()
    cores: Counter[str] = Counter()
    for plan, view in zip(plans, views, strict=True):
        scale = view.scale
        assert len(plan.sites) <= max(0, plan.wanted - len(scale.placed))
        assert set(plan.victims) <= {p.replica for p in scale.placed}
        assert len(set(plan.victims)) == len(plan.victims)
        assert len(plan.victims) <= max(0, len(scale.placed) - plan.wanted)
        for site in plan.sites:
            on = by_name[site.node]
            assert len(set(site.gpus)) == view.gpus
            cores[site.node] += 1 if view.gpus == 0 else 0
            for i in site.gpus:
                gpu = on.gpus[i]
                alone = view.gpu_bytes <= 0 or view.gpu_bytes >= gpu.total_bytes
                assert not (alone and (gpu.replicas or held[site.node, i]))
                held[site.node, i] += view.gpu_bytes if view.gpu_bytes > 0 else gpu.total_bytes
                assert held[site.node, i] <= gpu.free_bytes
    assert all(count <= by_name[name].cores_free for name, count in cores.items())
    missing = sum(max(0, p.wanted - len(p.scale.placed)) for p in plans)
    assert report.placed == sum(len(p.sites) for p in plans)
    assert bool(report.short) == (report.placed < missing)
    assert report.kl >= 0


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_greedy_is_exact_for_one_stage_under_contention(
    shape: list[tuple[int, int, bool]], units: int
) -> None:
    """Against every allocation: no sum_j n_j log(n_j / q_j) + start time is less."""
    nodes = [
        node(f"n{j}", [int(i >= free) for i in range(total)], FUNCTIONS[:1] if warm else ())
        for j, (free, total, warm) in enumerate(shape)
    ]
    kind = Kind(starts=StartTimes(memory_s=0.2, remote_s=0.9), parameter_bytes=0)
    index = NodeIndex(nodes)
    want = want_of(stage(0, kind=kind), True, frozenset(), {})
    units = min(units, index.free_gpus)
    found = Search(index, contended=True, spread=True).add(want, units)
    assert len(found) == units
    share = [t / sum(t for _, t, _ in shape) for _, t, _ in shape]
    linear = [(0.2 if warm else 0.9) / TRADE_S for _, _, warm in shape]
    room = [min(free, total) for free, total, _ in shape]

    def cost(counts: tuple[int, ...]) -> float:
        return sum(
            divergence.phi(n, q) + n * s for n, q, s in zip(counts, share, linear, strict=True)
        )  # fmt: skip

    ours = Counter(place.node for place in found)
    every = [c for c in itertools.product(*(range(r + 1) for r in room)) if sum(c) == units]
    least = min(map(cost, every))
    assert cost(tuple(ours[j] for j in range(len(shape)))) <= least + 1e-9
    order = divergence.fill([0] * len(shape), share, linear, room, units)
    assert cost(tuple(order.count(j) for j in range(len(shape)))) <= least + 1e-9


@given(st.data(), st.booleans(), st.booleans())
def test_looking_at_classes_finds_what_looking_at_all_nodes_finds(
    data: st.DataObject, contended: bool, is_key: bool
) -> None:
    nodes = [
        NodeView(
            node=f"n{j}", gpus=n.gpus, cores_free=n.cores_free, memory_free_bytes=n.memory_free_bytes,
            in_memory=n.in_memory, on_disk=n.on_disk,
        )
        for j, n in enumerate(data.draw(clusters()) * data.draw(st.integers(1, 20)))
    ]  # fmt: skip
    index = NodeIndex(nodes)
    want = want_of(stage(0, kind=data.draw(kinds)), is_key, frozenset({0}), {len(nodes) - 1: 0.5})
    search = Search(index, contended, True)
    for _ in range(6):
        place = search.best(want)
        need = (want.gpus, want.gpu_bytes, want.cores)
        rooms = [j for j in range(len(nodes)) if index.places(j, *need) is not None]
        if not rooms:
            assert place is None
            return
        assert place is not None
        costs = {j: place_cost(want, index, j, contended) for j in rooms}
        assert place.node == min(rooms, key=lambda j: (costs[j], j))
        search.take(want, place)


@pytest.mark.slow
@given(st.data())
def test_an_index_that_follows_changes_equals_a_new_one(data: st.DataObject) -> None:
    nodes = data.draw(clusters())
    index = NodeIndex(nodes)
    for _ in range(3):
        others = data.draw(clusters())
        nodes = [
            NodeView(
                node=old.node, gpus=new.gpus, cores_free=new.cores_free,
                memory_free_bytes=new.memory_free_bytes, in_memory=new.in_memory, on_disk=new.on_disk,
            )
            if data.draw(st.booleans())
            else old
            for old, new in itertools.zip_longest(nodes, others[: len(nodes)], fillvalue=nodes[0])
        ]  # fmt: skip
        nodes = [n if n.node == f"n{j}" else index.nodes[j] for j, n in enumerate(nodes)]
        want = want_of(stage(0, kind=data.draw(kinds)), True, frozenset(), {})
        assert index.update(nodes)
        fresh = NodeIndex(nodes)
        assert (index.free, index.cores, index.key_gpus, index.free_gpus, index.total_gpus) == (
            fresh.free, fresh.cores, fresh.key_gpus, fresh.free_gpus, fresh.total_gpus,
        )  # fmt: skip
        assert index.candidates() == fresh.candidates()
        for f in FUNCTIONS:
            assert index.memory.nodes_with(f) == fresh.memory.nodes_with(f)
        Search(index, True, True).add(want, 5)
        index.give_back()
        assert index.candidates() == fresh.candidates()
        assert (index.free, index.key_gpus, index.key_cpu) == (fresh.free, fresh.key_gpus, fresh.key_cpu)
