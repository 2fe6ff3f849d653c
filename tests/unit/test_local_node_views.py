"""Nodes in the snapshot: what is free on them, whose parameters they hold, where replicas run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from keystage.controller.domain.snapshot import GpuView, NodeView, Placed, StartTimes
from keystage.controller.platforms.local_nodes import node_views, placed, shown_views, start_times
from keystage.keysmanager.api import CacheEntry, Gpu, Memory, NodeStatus
from keystage.local.api import Deployment, FunctionRecord, NodeRecord, ReplicaRecord, ReplicaState
from keystage.local.site import RouterAddresses
from keystage.wire.address import parse


def replica(name: str, node: str, state: ReplicaState = "ready") -> ReplicaRecord:
    return ReplicaRecord(
        replica=name,
        function=name.rpartition("-")[0],
        generation=1,
        state=state,
        pid=1,
        address="",
        started_at_s=0.0,
        node=node,
    )


def stage(index: int, threads: str = "1", device: str = "cpu") -> FunctionRecord:
    env = {
        "KEYSTAGE_ROLE": "stage",
        "KEYSTAGE_PIPELINE": "p",
        "KEYSTAGE_STAGES": str(index),
        "KEYSTAGE_THREADS": threads,
        "KEYSTAGE_DEVICE": device,
    }
    return FunctionRecord(deployment=Deployment(service=f"p-stage-{index}", envVars=env), created_at_s=0.0)


def holder(index: int, state: str = "ready", pipeline: str = "p") -> CacheEntry:
    return CacheEntry(
        pipeline=pipeline,
        stage=index,
        identity=str(index),
        state=state,  # type: ignore[arg-type]
        rank=None,
        nbytes=1,
        source="disk",
        load_s=0.0,
        loaded_at_s=0.0,
        used_at_s=0.0,
        uses=0,
        claims=0,
        pid=1,
    )


def status(used_bytes: int, *holders: CacheEntry) -> NodeStatus:
    memory = Memory(
        limit_bytes=100, used_bytes=used_bytes, budget_bytes=85, segment_bytes=0, origin="configured"
    )
    return NodeStatus(
        node="n",
        protocol=1,
        started_at_s=0.0,
        holders=holders,
        standbys=(),
        memory=memory,
        gpus=(),
        history=(),
    )


def test_nodes_say_what_is_free_and_what_they_hold() -> None:
    nodes = [
        NodeRecord(
            node="a",
            cores=4.0,
            status=status(60, holder(0), holder(1, "loading"), holder(0, pipeline="other"), holder(7)),
        ),
        NodeRecord(node="b", cores=1.0, status=status(99)),
        NodeRecord(node="c", cores=1.0),
    ]
    functions = [stage(0, "2"), stage(1, "1"), stage(2, "8", "cuda")]
    replicas = [
        replica("p-stage-0-0", "a"),
        replica("p-stage-1-0", "a", "starting"),
        replica("p-stage-1-1", "a", "draining"),
        replica("p-stage-2-0", "a"),
        replica("p-stage-0-1", "b"),
    ]
    assert node_views(nodes, functions, replicas) == (
        NodeView(node="a", cores_free=1.0, memory_free_bytes=25, in_memory=frozenset({"p-stage-0"})),
        NodeView(node="b", cores_free=0.0, memory_free_bytes=0),
        NodeView(node="c", cores_free=1.0, memory_free_bytes=0),
    )
    assert placed(nodes, replicas[:3]) == (
        Placed("p-stage-0-0", "a", is_ready=True),
        Placed("p-stage-1-0", "a", is_ready=False),
    )


def test_start_times_are_medians_by_where_parameters_came_from() -> None:
    nodes = [NodeRecord(node="a", cores=1.0), NodeRecord(node="b", cores=1.0)]

    def took(ready_s: float, source: str, state: ReplicaState = "ready") -> ReplicaRecord:
        record = replica("f-0", "a", state)
        return msgspec.structs.replace(record, started_at_s=10.0, ready_at_s=10.0 + ready_s, source=source)

    told = [took(0.5, "memory"), took(0.25, "memory"), took(0.75, "memory"), took(2.0, "home"), took(4.0, "")]
    assert start_times(nodes, [*told, took(9.0, "disk", "draining")]) == StartTimes(
        memory_s=0.5, remote_s=3.0
    )
    assert start_times(nodes, []) is None
    assert start_times(nodes[:1], told) is None


def test_one_node_is_no_choice() -> None:
    nodes = [NodeRecord(node="a", cores=4.0)]
    assert node_views(nodes, [stage(0)], [replica("p-stage-0-0", "a")]) == ()
    assert placed(nodes, [replica("p-stage-0-0", "a")]) == ()


def test_people_see_one_node_and_gpus_all_the_same() -> None:
    one = [NodeRecord(node="a", cores=4.0, status=status(60, holder(0)))]
    functions, replicas = [stage(0, "3")], [replica("p-stage-0-0", "a")]
    here = NodeView(node="a", cores_free=1.0, memory_free_bytes=25, in_memory=frozenset({"p-stage-0"}))
    assert shown_views(one, functions, replicas) == (here,)
    assert shown_views([], functions, replicas) == ()
    two = [*one, NodeRecord(node="b", cores=1.0)]
    assert shown_views(two, functions, replicas) == ()  # `node_views` has them
    gpus = tuple(Gpu(index=k, uuid="", name="", total_bytes=80, free_bytes=20 + k) for k in (1, 0))
    two[1] = NodeRecord(node="b", cores=1.0, status=msgspec.structs.replace(status(85), gpus=gpus))
    assert shown_views(two, functions, replicas) == (
        here,
        NodeView(node="b", gpus=(GpuView(80, 20), GpuView(80, 21)), cores_free=1.0, memory_free_bytes=0),
    )


def test_routers_have_one_address_for_neighbours_and_other_nodes() -> None:
    addresses = RouterAddresses(Path("/run/x"), "node-0")
    told = addresses.of("p")
    parts = parse(told)
    assert parts.ipc == "/run/x/p.router"
    assert parts.tcp.startswith("127.0.0.1:")
    assert parts.node
    assert addresses.of("p") == told
    assert parse(addresses.of("q")).tcp != parts.tcp
    assert addresses.of("") == ""
    assert RouterAddresses(Path("/run/x")).of("p") == ""
