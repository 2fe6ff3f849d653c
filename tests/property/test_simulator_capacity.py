"""Whatever is asked of the simulated world: capacity holds, requests are conserved, Little's law holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.simulated_worlds import GB, line, world

from keystage.controller.domain.decision import Action, KeyStage, PublishKeyStages, SetCpu, SetReplicas, Site
from keystage.controller.domain.snapshot import Snapshot
from keystage.simulator.api import FailureSpec, LoadSpec, NodeSpec, StageSpec
from keystage.simulator.measures import check
from keystage.simulator.platform import SimulatedPlatform

STAGES = 3
NAMES = [f"p-stage-{k}" for k in range(STAGES)]

functions = st.sampled_from(NAMES)
sites = st.builds(
    Site,
    st.sampled_from(["node-0", "node-1", "node-2", "elsewhere"]),
    st.lists(st.integers(-1, 4), max_size=3).map(tuple),
)
victims = st.builds(lambda f, n: f"{f}-{n}", functions, st.integers(1, 9))
actions: st.SearchStrategy[Action] = st.one_of(
    st.builds(
        SetReplicas,
        functions,
        st.integers(-1, 9),
        st.lists(sites, max_size=4).map(tuple),
        st.lists(victims, max_size=4).map(tuple),
    ),
    st.builds(SetCpu, functions, st.floats(-1, 20)),
    st.builds(lambda k: PublishKeyStages("p", (KeyStage(k, 1.0),)), st.integers(0, STAGES)),
)
stages = st.builds(
    StageSpec,
    alpha_s=st.floats(0, 0.3),
    beta_s=st.floats(0, 0.2),
    most=st.integers(1, 4),
    scv=st.sampled_from([0.0, 0.5, 1.0]),
    cpu_core_s=st.sampled_from([0.0, 0.1]),
    parameter_bytes=st.integers(0, 10).map(lambda n: n * GB),
    gpus=st.integers(0, 2),
    shared=st.booleans(),
    replicas=st.integers(0, 1),
)
failures = st.one_of(
    st.builds(FailureSpec, at_s=st.floats(0, 8), function=functions),
    st.builds(
        FailureSpec, at_s=st.floats(0, 8), node=st.sampled_from(["node-0", "node-2"]), for_s=st.floats(0, 5)
    ),
)
NODES = (
    NodeSpec(count=2, gpus=4, gpu_bytes=16 * GB, cores=12, memory_bytes=12 * GB),
    NodeSpec(gpus=2, gpu_bytes=16 * GB, cores=12, disk=False),
)
LOAD = LoadSpec(
    fixed_s=0.2, gpu_bps=50 * GB, memory_bps=20 * GB, disk_bps=5 * GB, remote_bps=GB, key_stages=1,
    spread_s=0.3,
)  # fmt: skip
loads = st.builds(
    lambda holders, prewarm: structs.replace(LOAD, holders=holders, prewarm=prewarm),
    st.sampled_from(["none", "key-stages", "ran", "all"]),
    st.booleans(),
)


def within_capacity(snapshot: Snapshot) -> None:
    held: dict[tuple[str, int], int] = {}
    for node in snapshot.nodes:
        assert node.cores_free >= -1e-9
        assert node.memory_free_bytes >= 0
        for i, gpu in enumerate(node.gpus):
            assert 0 <= gpu.free_bytes <= gpu.total_bytes
            held[node.node, i] = gpu.replicas
    alone: set[tuple[str, int]] = set()
    for stage in snapshot.pipelines[0].stages:
        scale = stage.scale
        assert scale.ready + len(scale.starting) <= max(scale.current, 1)
        for placed in scale.placed:
            assert len(placed.gpus) == len(set(placed.gpus)) == stage.gpus
            for place in ((placed.node, i) for i in placed.gpus):
                held[place] -= 1
                assert place not in alone
                if stage.gpu_bytes == 16 * GB and stage.gpus:
                    alone.add(place)
    assert all(draining >= 0 for draining in held.values())


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(stages, min_size=STAGES, max_size=STAGES),
    st.lists(st.lists(actions, max_size=4), min_size=1, max_size=12),
    st.lists(failures, max_size=2),
    st.sampled_from([None, (), (0, 1)]),
    st.floats(0.2, 20),
    loads,
)
def test_capacity_is_never_exceeded_and_nothing_is_lost(
    specs: list[StageSpec],
    decisions: list[list[Action]],
    faults: list[FailureSpec],
    after: tuple[int, ...] | None,
    rate_rps: float,
    load: LoadSpec,
) -> None:
    fields: dict[str, Any] = {"nodes": NODES, "load": load, "failures": tuple(faults), "hop_s": 0.01}
    if after is not None:  # an entry and an end of its own, or a join
        specs = [specs[0], specs[1], structs.replace(specs[2], after=after)]
        fields["network_s"] = 0.02
    platform = SimulatedPlatform(world(line(*specs, rate_rps=rate_rps, cv=2, count=40), **fields), 5)
    for tick, asked in enumerate(decisions):
        platform.apply(asked)
        within_capacity(platform.observe())
        platform.advance(tick * 0.8 + 0.8)
        within_capacity(platform.observe())
        check(platform.outcome())
    platform.apply([SetReplicas(name, 0) for name in NAMES])  # makes room for one of each
    platform.advance(platform.now_s + 100)
    platform.apply([SetReplicas(name, 1) for name in NAMES])
    platform.advance(1e6)
    outcome = platform.outcome()
    check(outcome)
    assert platform.is_served
    assert all(stage.arrivals == 40 for stage in outcome.pipelines[0].stages)
