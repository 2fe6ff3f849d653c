"""The platform over a fake cluster with real HTTP: routers by pod address, loads, nodes, bundles."""

from __future__ import annotations

import http.server
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from support.kube_platform import TOKEN, KubeWorld, answer

from keystage.bundle.api import CpuProfile, CpuRow, Pipeline, StageSpec
from keystage.controller.domain.decision import SetCpu, SetReplicas, Site
from keystage.controller.domain.snapshot import FunctionView, GatewayLoad, GpuView, PipelineView, Placed
from keystage.controller.domain.state import PolicyState
from keystage.controller.platforms.bundles import Bundles
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings
from keystage.kubernetes.client import Object
from keystage.local.api import Deployment, Load
from keystage.router.api import ReplicaStats, RouterStats, StageCounters

ASKED = {"cpu": "1", "memory": "1Gi"}
GPUS = {"keystage.dev/gpu0": "80", "keystage.dev/gpu1": "80"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KubeWorld]:
    made = KubeWorld(tmp_path)
    yield made
    made.close()
    made.platform.close()


def told(items: int = 7) -> RouterStats:
    counters = StageCounters(
        0, items, items * 0.1, items * 0.02, 4, 1, items, 0.0, items, items * 0.005, 0.0, 0.1
    )
    worker = ReplicaStats("a", (0,), "ready", 1.0, 8, 3, [items * 0.005], [items], [items])
    return RouterStats("p", "i", 5.0, 1e9, "single-pass", items, items, {}, 0, 0, [counters], [worker])


def deploy_pipeline(world: KubeWorld, device: str = "cpu", **fields: str) -> None:
    common = {"KEYSTAGE_PIPELINE": "p", **fields}
    world.deploy(Deployment(service="p", envVars={"KEYSTAGE_ROLE": "router", **common}))
    variables = {"KEYSTAGE_ROLE": "stage", "KEYSTAGE_STAGES": "0", "KEYSTAGE_DEVICE": device, **common}
    world.deploy(Deployment(service="p-stage-0", envVars=variables, requests=ASKED, limits=ASKED))


def stage_pod(world: KubeWorld, name: str, node: str, **resources: str) -> Object:
    labels = {"keystage.dev/function": "p-stage-0", "keystage.dev/role": "stage"}
    asked = {**ASKED, **resources}
    made = world.pod(name, labels=labels, node=node, resources={"requests": asked, "limits": asked})
    world.until(lambda: world.world.pods().get(name, {}).get("status", {}).get("podIP"))
    return made


def only(world: KubeWorld) -> PipelineView:
    (found,) = world.platform.observe().pipelines
    return found


def plain(world: KubeWorld, name: str = "f") -> FunctionView:
    (found,) = [f for f in world.platform.observe().functions if f.function == name]
    return found


def test_a_pipeline_is_read_from_pods_routers_and_nodes(world: KubeWorld) -> None:
    world.kube.nodes.add("n", cpu="4")
    world.kube.nodes.add("m", cpu="2")
    deploy_pipeline(world)
    world.router("p", told())
    stage_pod(world, "a", "n")
    world.until(lambda: len(world.world.nodes()) == 2)
    seen = only(world)
    assert seen.missing == ""
    (stage,) = seen.stages
    assert (stage.routers[0].counters.arrivals, stage.workers[0].rows) == (7, 7)
    assert stage.scale.placed == (Placed("a", "n"),)
    assert stage.scale.cap == 1 + 3 + 2
    assert stage.cpu is not None
    assert (stage.cpu.cores, stage.cpu.base) == (1.0, 1.0)
    assert {n.node: n.cores_free for n in world.platform.observe().nodes} == {"n": 3.0, "m": 2.0}


def test_a_router_that_does_not_answer_holds_its_pipeline(world: KubeWorld) -> None:
    deploy_pipeline(world)
    assert only(world).missing == "router p has no ready replica"
    server = world.router("p", told())
    server.answers["GET /_/stats"] = lambda _: (500, b"")
    assert only(world).missing == "router p-router answered 500 to /_/stats"


def test_pods_of_others_take_room_and_nodes_that_take_nothing_are_not_told(world: KubeWorld) -> None:
    world.kube.nodes.add("n", cpu="4")
    world.kube.nodes.add("c", cpu="4")
    world.kube.nodes.cordon("c")
    world.pod("busy", namespace="keystage", node="n", resources={"requests": {"cpu": "2500m"}})
    deploy_pipeline(world)
    world.until(lambda: world.world.others() and len(world.world.nodes()) == 2)
    world.until(lambda: world.world.nodes()["c"]["spec"].get("unschedulable"))
    assert [(n.node, n.cores_free) for n in world.platform.observe().nodes] == [("n", 1.0)]
    scale = only(world).stages[0].scale
    assert scale.cap == 1
    assert "c: it is cordoned" in scale.cap_reason


def test_gpus_and_sites(world: KubeWorld) -> None:
    world.kube.nodes.add("g", cpu="8", **GPUS)
    deploy_pipeline(world, device="cuda")
    stage_pod(world, "a", "g", **{"keystage.dev/gpu1": "2"})
    seen = world.platform.observe()
    (told_node,) = seen.nodes
    assert told_node.gpus == (GpuView(80 << 30, 80 << 30, 0), GpuView(80 << 30, 78 << 30, 1))
    assert seen.pipelines[0].stages[0].scale.placed == (Placed("a", "g", (1,)),)
    sites = (Site("g", (0,)), Site("gone", (0,)), Site("g", (7,)))
    world.platform.apply([SetReplicas("p-stage-0", 4, sites, ("a",)), SetCpu("p-stage-0", 2.0)])
    wish = world.wishes.read().functions["p-stage-0"]
    assert (wish.replicas, wish.sites, wish.victims, wish.cores) == (4, (Site("g", (0,)),), ("a",), 2.0)
    assert wish.decided_at_s > 1e9
    assert only(world).stages[0].scale.desired == 4


def gateway(world: KubeWorld, name: str, loads: list[tuple[str, Load]]) -> Object:
    made = world.pod(name, namespace="keystage", labels={"app.kubernetes.io/component": "gateway"})
    world.serve(made["status"]["podIP"], {"GET /_/loads": answer(loads)})
    return made


def test_what_gateways_have_in_hand_is_read_with_the_internal_token(world: KubeWorld) -> None:
    world.deploy(Deployment(service="f"))
    assert plain(world).loads == ()
    gateway(world, "g1", [("f", Load("one", 2, 7, replicas={"f-1": 2}))])
    gateway(world, "g2", [("f", Load("two", 1, 3)), ("other", Load("two", 9, 9))])
    world.until(lambda: len(plain(world).loads or ()) == 2 and not world.loads.now().unread)
    assert set(plain(world).loads or ()) == {GatewayLoad("one", 2, 7), GatewayLoad("two", 1, 3)}
    assert {token for server in world.servers for _, _, token in server.asked} == {f"Bearer {TOKEN}"}
    loads = world.loads.now()
    assert loads.requests_on("f", "f-1", 0.0) == 2
    assert loads.requests_on("f", "f-2", 0.0) == 0
    assert loads.requests_on("f", "f-1", loads.asked_at_s + 60) is None  # nobody told since then
    world.until(lambda: world.loads.now().requests_on("f", "f-1", loads.asked_at_s) == 2)


def test_a_gateway_that_cannot_be_read_holds_plain_functions(world: KubeWorld) -> None:
    world.deploy(Deployment(service="f"))
    gateway(world, "g1", [("f", Load("one", 0, 0))])
    world.until(lambda: world.loads.now().by_function)
    world.servers[0].answers["GET /_/loads"] = lambda _: (200, b"[[")
    loads = world.until(lambda: world.loads.now().unread and plain(world).loads)
    assert loads == (GatewayLoad("g1"),)
    assert world.loads.now().requests_on("f", "x", 0.0) is None


def test_a_gateway_whose_program_does_not_run_has_nothing(world: KubeWorld) -> None:
    world.deploy(Deployment(service="f"))
    made = gateway(world, "g1", [])
    world.until(lambda: world.world.gateways())
    world.kube.kubelet.crash(made)
    world.until(lambda: not world.loads.now().unread)
    assert plain(world).loads == ()


def test_a_function_that_cannot_be_read_hides_no_other(world: KubeWorld) -> None:
    world.deploy(Deployment(service="f"))
    world.deploy(Deployment(service="g"))
    broken = {**world.world.functions()["f"], "spec": {"image": 3}}
    everything = {**world.world.functions(), "f": broken}
    world.world.functions = lambda: everything  # type: ignore[method-assign]
    assert [f.function for f in world.platform.observe().functions] == ["g"]


PIPELINE = Pipeline(
    version=1, name="p", family="f", execution="single-pass", dtype="float32", config={},
    stages=[StageSpec(0, "stage-00.safetensors", (0, 1), 1, 5 << 30, [], "i", 1)], edges=[], context_length=0,
    vocab_size=1, hidden_size=1, eos=[], bos=None, tokenizer="", chat_template="", special_tokens={},
    source="",
)  # fmt: skip
PROFILE = CpuProfile(1, [[CpuRow(latency_s=0.1 + 0.8 / c, cores=c) for c in (1, 2, 3, 4, 6, 8)]])


def write_bundle(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.json").write_bytes(msgspec.json.encode(PIPELINE))
    (folder / "cpu-profile.json").write_bytes(msgspec.json.encode(PROFILE))


def test_bundles_are_read_from_a_folder_and_from_their_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_bundle(home / "p")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(home)))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    bundles = Bundles(tmp_path / "copies")
    try:
        local, remote = f"file://{home}/p", f"http://127.0.0.1:{server.server_address[1]}/p"
        missing = f"http://127.0.0.1:{server.server_address[1]}/missing"
        bundles.fetch(remote)
        bundles.fetch(missing)
        found, work = bundles.read([local, remote, missing, "nonsense"])
        assert set(found) == {local, remote}
        assert found[remote].stages[0].nbytes == 5 << 30
        assert work[remote][0] is not None
        assert work[remote] == work[local]
        shutil.rmtree(home / "p")
        bundles.fetch(remote)
        assert bundles.read([local, remote]) == ({}, {})
        write_bundle(home / "p")
        bundles.start()
        end_s = time.monotonic() + 15
        while set(bundles.read([remote])[0]) != {remote}:
            assert time.monotonic() < end_s, "it does not fetch by itself"
            time.sleep(0.02)
        with pytest.raises(OSError, match="GET http"):
            bundles.fetch("http://127.0.0.1:9/p")
    finally:
        server.shutdown()
        server.server_close()
        bundles.stop()


def test_sizes_tell_what_a_gpu_stage_needs(world: KubeWorld, tmp_path: Path) -> None:
    write_bundle(tmp_path / "b")
    world.kube.nodes.add("g", cpu="8", **GPUS)
    deploy_pipeline(world, device="cuda", KEYSTAGE_BUNDLE=f"file://{tmp_path}/b")
    world.until(lambda: world.world.nodes())
    stage = only(world).stages[0]
    assert (stage.gpu_bytes, stage.parameter_bytes) == (7 << 30, 5 << 30)
    (record,) = [f for f in world.world.functions().values() if f["metadata"]["name"] == "p-stage-0"]
    deployment = Deployment(service="p-stage-0", envVars=record["spec"]["envVars"])
    assert world.platform.parameter_bytes(deployment) == 5 << 30
    assert world.platform.parameter_bytes(Deployment(service="x", envVars={"KEYSTAGE_STAGES": "0"})) == 0
    unread = {"KEYSTAGE_STAGES": "0", "KEYSTAGE_BUNDLE": "file:///not/there"}
    assert world.platform.parameter_bytes(Deployment(service="x", envVars=unread)) is None


def test_functions_full_of_nonsense_do_not_keep_it_from_deciding(world: KubeWorld) -> None:
    huge = "9" * 5000
    common = {"KEYSTAGE_ROLE": "stage", "KEYSTAGE_DEVICE": "cuda", "KEYSTAGE_SLO": "[" * 5000}
    for number, (stages, bundle) in enumerate(
        [(huge, "http://["), ("0-99999999999", "file:///%00"), ("1", "https://[::1"), ("-", "file://[")]
    ):
        env = {**common, "KEYSTAGE_PIPELINE": "odd", "KEYSTAGE_STAGES": stages, "KEYSTAGE_BUNDLE": bundle}
        world.deploy(
            Deployment(
                service=f"odd-{number}",
                envVars={**env, "KEYSTAGE_KV_BYTES": huge, "KEYSTAGE_THREADS": huge},
                labels={"keystage.gpu_gib": huge, "com.openfaas.scale.min": "many"},
                limits={"cpu": "1e308", "memory": "?"},
            )
        )
    router = {**common, "KEYSTAGE_ROLE": "router", "KEYSTAGE_PIPELINE": "odd", "KEYSTAGE_BUNDLE": "http://["}
    world.deploy(Deployment(service="odd", envVars=router))
    world.kube.patch("functions", "odd-0", {"status": {"cores": 1e306, "desired": 2_000_000_000}})
    deploy_pipeline(world)
    snapshot = world.platform.observe()
    assert {pipeline.pipeline for pipeline in snapshot.pipelines} == {"p", "odd"}
    decide(PolicySettings(), snapshot, PolicyState())
    world.resizer.round()
