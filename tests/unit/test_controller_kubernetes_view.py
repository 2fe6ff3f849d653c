"""A cluster in the snapshot: nodes and GPUs, places, caps, cores, loads of gateways that were not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from keystage.bundle.api import Pipeline, StageSpec
from keystage.controller.domain.decision import Site
from keystage.controller.domain.snapshot import GatewayLoad, GpuView, Override, Placed, Snapshot, StageView
from keystage.controller.platforms.kubernetes import as_decided
from keystage.controller.platforms.kubernetes_cpu import Spot, cluster_cpu_views
from keystage.controller.platforms.kubernetes_room import Ground, Need
from keystage.controller.platforms.kubernetes_view import Sight, cluster_snapshot, is_parked, needs_of
from keystage.controller.platforms.local_cpu import Cores
from keystage.keysmanager.api import Memory, NodeStatus
from keystage.kubernetes.room import Room, rooms_of
from keystage.kubernetes.wishes import Wish
from keystage.local import api as local
from keystage.local.api import Deployment, FunctionRecord, Load, ReplicaRecord, ReplicaState

Object = dict[str, Any]
GIB = 1 << 30


def stage(index: int, device: str = "cpu", **fields: Any) -> FunctionRecord:
    env = {
        "KEYSTAGE_ROLE": "stage",
        "KEYSTAGE_PIPELINE": "p",
        "KEYSTAGE_STAGES": str(index),
        "KEYSTAGE_DEVICE": device,
        "KEYSTAGE_BUNDLE": "file:///bundles/p",
    }
    return FunctionRecord(
        deployment=Deployment(service=f"p-stage-{index}", envVars=env, **fields), created_at_s=0.0, desired=1
    )


ROUTER = FunctionRecord(
    deployment=Deployment(service="p", envVars={"KEYSTAGE_ROLE": "router", "KEYSTAGE_PIPELINE": "p"}),
    created_at_s=0.0,
)


def pod(
    name: str, node: str = "", *, gpu: int | None = None, gib: int = 20, cpu: str = "1", **labels: str
) -> Object:
    asked = {"cpu": cpu, **({f"keystage.dev/gpu{gpu}": str(gib)} if gpu is not None else {})}
    return {
        "metadata": {
            "name": name,
            "uid": name,
            "labels": {f"keystage.dev/{k}": v for k, v in labels.items()},
        },
        "spec": {
            "nodeName": node,
            "containers": [{"name": "function", "resources": {"requests": asked, "limits": asked}}],
        },
        "status": {"phase": "Running", "containerStatuses": []},
    }


def replica(
    name: str, function: str, node: str = "", state: ReplicaState = "ready", **fields: Any
) -> ReplicaRecord:
    return ReplicaRecord(
        replica=name, function=function, generation=0, state=state, pid=0, address="", started_at_s=1.0,
        ready_at_s=3.0 if state == "ready" else 0.0, node=node, **fields,
    )  # fmt: skip


def node(name: str, *, cpu: str = "4", taints: Sequence[Object] = (), **more: str) -> Object:
    return {
        "metadata": {"name": name, "labels": {"zone": name}},
        "spec": {"taints": list(taints)},
        "status": {
            "allocatable": {"cpu": cpu, "memory": "64Gi", "pods": "50", **more},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


GPUS = {"keystage.dev/gpu0": "80", "keystage.dev/gpu1": "80"}


def see(
    functions: Sequence[FunctionRecord],
    nodes: Sequence[Object],
    pods: Sequence[Object] = (),
    replicas: Sequence[ReplicaRecord] = (),
    *,
    beside_vendor: bool = False,
    **fields: Any,
) -> Snapshot:
    taking = [p for p in pods if not is_parked(p)]
    sight = Sight(
        at_s=100.0,
        functions=[ROUTER, *functions],
        replicas=replicas,
        pods={p["metadata"]["name"]: p for p in pods},
        stats={},
        unread={},
        ground=Ground(rooms_of(nodes, taking), beside_vendor),
        default_requests={"cpu": "100m"},
        **fields,
    )
    return cluster_snapshot(sight, needs_of(sight))


def only_stage(snapshot: Snapshot, index: int = 0) -> StageView:
    (pipeline,) = snapshot.pipelines
    return pipeline.stages[index]


def test_one_node_is_told_too_and_its_gpus_by_index() -> None:
    pods = [
        pod("a", "n", gpu=1, function="p-stage-0", role="stage"),
        pod("parked", "n", gpu=0, pool="x", role="stage"),
        pod("unscheduled", gpu=0, function="p-stage-0"),
    ]
    replicas = [replica("a", "p-stage-0", "n"), replica("unscheduled", "p-stage-0", "", "starting")]
    seen = see([stage(0, "cuda")], [node("n", **GPUS)], pods, replicas)
    (told,) = seen.nodes
    assert told.gpus == (GpuView(80 * GIB, 80 * GIB, 0), GpuView(80 * GIB, 60 * GIB, 1))
    stage_view = only_stage(seen)
    assert stage_view.scale.placed == (Placed("a", "n", (1,)),)
    assert (stage_view.gpus, stage_view.gpu_bytes) == (
        1,
        2 * GIB,
    )  # KV and runtime: nothing is known of the bundle
    assert [s.replica for s in stage_view.scale.starting] == ["unscheduled"]


def test_a_gpu_stage_needs_what_its_bundle_says_or_its_label() -> None:
    spec = StageSpec(0, "f", (0, 1), 1, 30 * GIB, [], "i", 1)
    bundle = Pipeline(
        version=1, name="p", family="f", execution="looping", dtype="float32", config={}, stages=[spec],
        edges=[], context_length=1, vocab_size=1, hidden_size=1, eos=[], bos=None, tokenizer="",
        chat_template="", special_tokens={}, source="",
    )  # fmt: skip
    told = {"file:///bundles/p": bundle}
    view = only_stage(see([stage(0, "cuda")], [node("n", **GPUS)], bundles=told))
    assert view.gpu_bytes == 32 * GIB
    assert view.parameter_bytes == 30 * GIB
    labelled = stage(0, "cuda", labels={"keystage.gpu_gib": "50"})
    assert only_stage(see([labelled], [node("n", **GPUS)], bundles=told)).gpu_bytes == 50 * GIB
    assert only_stage(see([stage(0)], [node("n", **GPUS)], bundles=told)).gpus == 0


def test_the_cap_is_what_the_nodes_hold() -> None:
    pods = [pod("a", "n", function="p-stage-0"), pod("other", "n", cpu="1500m")]
    asked = {"cpu": "1", "memory": "1Gi"}
    seen = see(
        [stage(0, requests=asked, limits=asked)],
        [node("n"), node("m", cpu="2500m"), node("small", cpu="500m")],
        pods,
        [replica("a", "p-stage-0", "n"), replica("b", "p-stage-0", "", "starting")],
    )
    scale = only_stage(seen).scale
    assert scale.cap == 1 + 1 + 2  # it has one, n holds one more, m two; the one without a node counts not
    assert "room for 3 more of 1 cores, 1 GiB of memory" in scale.cap_reason
    assert {n.node: n.cores_free for n in seen.nodes} == {"n": 1.0, "m": 2.0, "small": 0.0}


def test_a_cap_names_the_nodes_that_are_left_out() -> None:
    cordoned = node("c")
    cordoned["spec"]["unschedulable"] = True
    taint = {"key": "kept", "value": "y", "effect": "NoSchedule"}
    seen = see([stage(0)], [cordoned, node("t", taints=[taint]), node("n")])
    assert [n.node for n in seen.nodes] == ["n"]
    reason = only_stage(seen).scale.cap_reason
    assert "c: it is cordoned" in reason
    assert "t: it is tainted kept=y:NoSchedule" in reason


def test_without_nodes_there_is_no_bound() -> None:
    assert only_stage(see([stage(0)], [])).scale.cap is None


def test_gpus_that_the_vendor_hands_out_are_left_alone() -> None:
    nodes = [node("n", **GPUS, **{"nvidia.com/gpu": "2"})]
    seen = see([stage(0, "cuda")], nodes)
    assert seen.nodes[0].gpus == ()
    scale = only_stage(seen).scale
    assert scale.cap == 0
    assert "n: its GPUs are also handed out as nvidia.com/gpu" in scale.cap_reason
    seen = see([stage(0, "cuda")], nodes, beside_vendor=True)
    assert len(seen.nodes[0].gpus) == 2
    assert only_stage(seen).scale.cap == 40  # 80 by GPUs, 40 by cores


def test_nodes_kept_for_gpus_are_told_where_a_stage_needs_one() -> None:
    nodes = [node("g", taints=[{"key": "nvidia.com/gpu", "value": "", "effect": "NoSchedule"}], **GPUS)]
    assert see([stage(0)], nodes).nodes == ()
    assert [n.node for n in see([stage(0), stage(1, "cuda")], nodes).nodes] == ["g"]
    assert only_stage(see([stage(0), stage(1, "cuda")], nodes), 0).scale.cap == 0


def test_constraints_bound_where_a_stage_may_go() -> None:
    seen = see([stage(0, constraints=["zone=b"])], [node("a"), node("b")])
    assert only_stage(seen).scale.cap == 40  # 100m each on b
    need = Need({"cpu": 0.1}, selector={"zone": "b"})
    ground = Ground(rooms_of([node("a"), node("b")], []))
    assert ground.fitting(need, [Site("a"), Site("b"), Site("gone")]) == (Site("b"),)


def test_sites_are_kept_while_there_is_room() -> None:
    ground = Ground(rooms_of([node("n", cpu="8", **{"keystage.dev/gpu0": "50"})], []))
    need = Need({"cpu": 1.0}, gpu_gib=20)
    sites = [Site("n", (0,)), Site("n", (0,)), Site("n", (0,)), Site("n", (1,)), Site("n")]
    assert ground.fitting(need, sites) == (Site("n", (0,)), Site("n", (0,)))


def test_cores_free_tell_the_policy_how_many_of_the_tightest_stage_fit() -> None:
    big = {"cpu": "2", "memory": "1Gi"}
    seen = see([stage(0), stage(1, requests=big, limits=big)], [node("n", cpu="5"), node("m", cpu="1")])
    assert {n.node: n.cores_free for n in seen.nodes} == {"n": 4.0, "m": 10.0}


def test_missing_loads_hold_a_plain_function() -> None:
    plain = FunctionRecord(
        deployment=Deployment(service="f"), created_at_s=0.0, loads=(Load("g1", 2, 7),), desired=1
    )
    seen = see([plain], [node("n")], unheard=["gateway-b"])
    (view,) = [f for f in seen.functions if f.function == "f"]
    assert view.loads == (GatewayLoad("g1", 2, 7), GatewayLoad("gateway-b"))
    (router,) = [f for f in seen.functions if f.function == "p"]
    assert router.loads is None


def test_start_times_by_source_and_what_lies_in_memory() -> None:
    memory = Memory(limit_bytes=100, used_bytes=30, budget_bytes=85, segment_bytes=0, origin="cgroup2")
    status = NodeStatus(
        node="n", protocol=1, started_at_s=0.0, holders=(), standbys=(), memory=memory, gpus=(), history=()
    )
    seen = see(
        [stage(0)],
        [node("n")],
        [pod("a", "n"), pod("b", "n")],
        [replica("a", "p-stage-0", "n", source="memory"), replica("b", "p-stage-0", "n", source="home")],
        statuses={"n": status},
    )
    starts = only_stage(seen).starts
    assert starts is not None
    assert (starts.memory_s, starts.remote_s, starts.disk_s) == (2.0, 2.0, None)
    assert seen.nodes[0].memory_free_bytes == 55


def room(name: str, cores: float, used: float = 0.0) -> Room:
    return Room(name, {}, {"cpu": cores, "pods": 100}, {"cpu": used})


def cores(
    now: float = 1.0, queue: float = 0.0, work: tuple[float, float, float] | None = (1, 0.5, 2)
) -> Cores:
    return Cores(now=now, base=1.0, running=1, queue=queue, work=work)


def most(rooms: Mapping[str, Room], spot: Spot, stage_cores: Cores | None = None) -> float:
    return cluster_cpu_views(rooms, {"f": stage_cores or cores()}, {"f": spot})["f"].most


def test_the_fullest_node_of_a_stage_bounds_its_cores() -> None:
    rooms = {"a": room("a", 8), "b": room("b", 4, used=2)}
    assert most(rooms, Spot({"a": 1})) == 8  # not more than the node has
    assert most(rooms, Spot({"a": 1, "b": 1})) == 3
    assert most(rooms, Spot({"b": 2})) == 2
    assert most(rooms, Spot({"b": 2}, request=0.5)) == 3
    assert most(rooms, Spot({"gone": 1})) == 1
    assert most(rooms, Spot({})) == 1


def test_stages_that_cannot_gain_or_were_refused_get_no_more() -> None:
    rooms = {"a": room("a", 8)}
    assert most(rooms, Spot({"a": 1}), cores(work=None)) == 1
    assert most(rooms, Spot({"a": 1}), cores(work=(1, -0.5, 2))) == 1
    assert most(rooms, Spot({"a": 1}, is_capped=True)) == 1


def test_stages_of_one_node_take_turns_the_longest_queue_first() -> None:
    rooms = {"a": room("a", 6, used=3)}
    views = cluster_cpu_views(
        rooms, {"f": cores(), "g": cores(queue=5)}, {"f": Spot({"a": 1}), "g": Spot({"a": 1})}
    )
    assert (views["g"].most, views["f"].most) == (3, 2)


def test_cores_are_what_the_kubelet_has_put_into_force() -> None:
    asked = {"cpu": "2", "memory": "1Gi"}
    running = pod("a", "n", cpu="4")
    running["status"]["containerStatuses"] = [
        {"name": "function", "resources": {"limits": {"cpu": "3"}, "requests": {"cpu": "3"}}}
    ]
    seen = see(
        [stage(0, requests=asked, limits=asked)], [node("n")], [running], [replica("a", "p-stage-0", "n")]
    )
    cpu = only_stage(seen).cpu
    assert cpu is not None
    assert (cpu.cores, cpu.base) == (3.0, 2.0)
    emulated, work = stage(0, "emulated:alpha=1,beta=1"), {"file:///bundles/p": [(1.0, 0.5, 2.0)]}
    assert only_stage(see([emulated], [node("n")])).cpu is None
    assert only_stage(see([emulated], [node("n")], cpu_work=work)).cpu is not None  # its profile says so
    assert only_stage(see([stage(0, "cuda")], [node("n")], cpu_work=work)).cpu is None


def test_what_was_decided_counts_before_it_is_written() -> None:
    record = msgspec.structs.replace(stage(0), override=local.Override(3, 9.0), wake=True, cores=1.0)
    assert as_decided(record, None, "u") == record
    assert as_decided(record, Wish(replicas=5, uid="another"), "u") == record
    wish = Wish(replicas=5, cores=2.0, is_lifting=True, is_awake=True, uid="u")
    decided = as_decided(record, wish, "u")
    assert (decided.desired, decided.cores, decided.override, decided.wake) == (5, 2.0, None, False)
    assert as_decided(record, Wish(cores=2.0), "u").desired == 1
    assert Override(3, 9.0).replicas == 3


@pytest.mark.parametrize("fields", [{"pool": "x"}, {"pool": "x", "function": ""}])
def test_parked_pods_take_no_room(fields: dict[str, str]) -> None:
    parked = pod("z", "n", cpu="3", **fields)
    assert is_parked(parked)
    assert only_stage(see([stage(0)], [node("n")], [parked])).scale.cap == 40
    assert not is_parked(pod("z", "n", pool="x", function="p-stage-0"))
