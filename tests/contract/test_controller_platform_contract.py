"""What every `Platform` must do, over each world there is.

`scripted` is a small HTTP server on a UNIX socket that answers as the supervisor does and lets a test
script routers and replicas. `supervised` is the real supervisor with real processes. `simulated` is the
simulator. `kubernetes` is the cluster's platform over a fake API server. `openfaas-ce` is a stand-in for a
stock gateway of the community edition with real processes, `openfaas-pro` one for a gateway without bounds
with imagined ones. A new platform joins by a fixture that makes a `World`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.kube_platform import KubeWorld
from support.openfaas_world import ce_with_processes, pro_imagined
from support.platform_worlds import ScriptedWorld, SupervisedWorld, World
from support.simulated_platform import SimulatedWorld

from keystage.controller.decisions import DecisionLog, Record
from keystage.controller.domain.decision import (
    ClearWake,
    KeyStage,
    LiftOverride,
    PublishKeyStages,
    SetReplicas,
)
from keystage.controller.domain.platform import PlatformError
from keystage.controller.domain.snapshot import FunctionView, GatewayLoad, PipelineView
from keystage.controller.loop import Loop
from keystage.controller.policy.settings import PolicySettings
from keystage.local.api import Deployment, Intent, Load, Override, ReplicaRecord
from keystage.observability.api import FunctionReport
from keystage.observability.reporting import Reporter
from keystage.router.api import ReplicaStats, RouterStats, StageCounters


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ksc-", dir="/tmp"))  # a UNIX socket's path holds 107 bytes
    yield path
    shutil.rmtree(path)


@pytest.fixture
def scripted(folder: Path) -> Iterator[ScriptedWorld]:
    world = ScriptedWorld(folder)
    yield world
    world.end()
    world.platform.close()


@pytest.fixture(params=["scripted", "supervised", "simulated", "kubernetes", "openfaas-ce", "openfaas-pro"])
def world(request: pytest.FixtureRequest, folder: Path) -> Iterator[World]:
    kinds: dict[str, Callable[[Path], Any]] = {
        "scripted": ScriptedWorld,
        "supervised": SupervisedWorld,
        "simulated": SimulatedWorld,
        "kubernetes": KubeWorld,
        "openfaas-ce": ce_with_processes,
        "openfaas-pro": pro_imagined,
    }
    made = kinds[request.param](folder)
    yield made
    getattr(made, "close", made.end)()
    made.platform.close()


def deployment(name: str = "f", **labels: str) -> Deployment:
    """A function that serves files on its port."""
    return Deployment(
        service=name,
        envProcess=f"{sys.executable} -m http.server --bind 127.0.0.1 --directory /dev/null $PORT",
        labels=labels,
    )


def view(world: World, name: str = "f") -> FunctionView:
    found = [f for f in world.platform.observe().functions if f.function == name]
    assert len(found) == 1
    return found[0]


# ---------------------------------------------------------------- every platform


def test_functions_and_their_bounds_are_seen(world: World) -> None:
    assert world.platform.observe().functions == ()
    labels = {"com.openfaas.scale.min": "2", "com.openfaas.scale.max": "5"}
    world.deploy(msgspec.structs.replace(deployment(), labels=labels))
    seen = view(world)
    assert (seen.min_replicas, seen.max_replicas, seen.cap, seen.wake) == (2, 5, None, False)


def test_time_goes_forward_in_unix_seconds(world: World) -> None:
    first, second = world.platform.observe().at_s, world.platform.observe().at_s
    assert abs(first - time.time()) < 60
    assert second >= first


def test_desired_numbers_come_back_through_observe_and_may_be_stated_twice(world: World) -> None:
    world.deploy(deployment())
    for _ in range(2):
        world.platform.apply([SetReplicas("f", 2)])
        assert view(world).desired == 2
    seen = view(world)
    assert seen.ready + len(seen.starting) <= 2
    now_s = world.platform.observe().at_s
    assert all(now_s - 60 < s.expected_ready_s < now_s + 60 for s in seen.starting)


def test_intents_are_seen_and_lifted(world: World) -> None:
    world.deploy(deployment())
    if not world.has_intents:  # then there are none, and lifting them is nothing
        world.platform.apply([LiftOverride("f"), ClearWake("f")])
        seen = view(world)
        assert (seen.override, seen.wake) == (None, False)
        return
    world.platform.apply([SetReplicas("f", 0)])
    world.intend("f", Intent(override=Override(3, time.time() + 100), wake=True))
    seen = view(world)
    assert seen.override is not None
    assert seen.override.replicas == 3
    assert seen.wake
    for _ in range(2):
        world.platform.apply([LiftOverride("f")])
        assert view(world).override is None
        assert view(world).wake
    world.platform.apply([ClearWake("f")])
    assert not view(world).wake


def test_actions_on_a_function_that_is_gone_do_nothing(world: World) -> None:
    world.platform.apply([SetReplicas("gone", 2), LiftOverride("gone"), ClearWake("gone")])
    assert world.platform.observe().functions == ()


def test_key_stages_may_be_published_twice(world: World) -> None:
    for _ in range(2):
        world.platform.apply([PublishKeyStages("p", (KeyStage(2, 3.5), KeyStage(0, 0.5)))])


def test_a_world_that_has_ended_is_a_platform_error(world: World) -> None:
    world.deploy(deployment())
    world.end()
    with pytest.raises(PlatformError):
        world.platform.observe()
    with pytest.raises(PlatformError):
        world.platform.apply([SetReplicas("f", 2)])


def test_a_loop_steers_it(world: World, tmp_path: Path) -> None:
    labels = {"com.openfaas.scale.min": "2"}
    world.deploy(msgspec.structs.replace(deployment(), labels=labels))
    world.platform.apply([SetReplicas("f", 1)])
    assert world.record("f").desired == 1
    loop = Loop(world.platform, PolicySettings(), DecisionLog(tmp_path / "d.jsonl", 1 << 20), tick_s=0.25)
    assert loop.tick() is not None
    assert world.record("f").desired == 2


# A stock OpenFaaS gateway has no intents: there a person's scale request is the number itself.
@pytest.mark.parametrize("world", ["scripted", "supervised", "simulated", "kubernetes"], indirect=True)
def test_a_loop_does_what_a_person_asks(world: World, tmp_path: Path) -> None:
    world.deploy(deployment())
    world.intend("f", Intent(override=Override(2, time.time() + 100)))
    loop = Loop(world.platform, PolicySettings(), DecisionLog(tmp_path / "d.jsonl", 1 << 20), tick_s=0.25)
    assert loop.tick() is not None
    assert world.record("f").desired == 2


# The simulator's time does not pass by itself: there `test_controller_safety` has it.
@pytest.mark.parametrize("world", ["scripted", "supervised", "kubernetes"], indirect=True)
def test_what_a_person_asked_for_is_told_with_its_end_and_ends_without_a_jump(
    world: World, tmp_path: Path
) -> None:
    world.deploy(deployment())
    world.platform.apply([SetReplicas("f", 1)])
    end_s = world.platform.observe().at_s + 3
    world.intend("f", Intent(override=Override(2, end_s)))
    reporter = Reporter("c")
    path = tmp_path / "d.jsonl"
    loop = Loop(world.platform, PolicySettings(), DecisionLog(path, 1 << 20), tick_s=0.25)

    def told() -> FunctionReport:
        record = msgspec.json.decode(path.read_bytes().splitlines()[-1], type=Record)
        reporter.note(record)
        (found,) = reporter.report(record, "", record.snapshot.at_s).functions
        return found

    assert loop.tick() is not None
    seen = told()
    assert seen.override_until_s == pytest.approx(end_s, abs=1.0)
    assert seen.reason.startswith("override: 2, until ")
    assert world.record("f").desired == 2
    give_up_s = time.monotonic() + 60
    while view(world).override is not None:
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
        assert loop.tick() is not None
        assert world.record("f").desired == 2
    assert world.platform.observe().at_s >= end_s - 0.5
    assert loop.tick() is not None
    assert told().override_until_s is None
    assert world.record("f").desired == 2  # nobody says why it should be another: surplus is not thrown away


# ---------------------------------------------------------------- pipelines of the local platform


def pipeline(world: ScriptedWorld, device: str = "emulated:alpha=0.004,beta=0.001", **env: str) -> None:
    common = {"KEYSTAGE_PIPELINE": "p"}
    world.deploy(Deployment(service="p", envVars={"KEYSTAGE_ROLE": "router", **common, **env}))
    world.replicas = [
        ReplicaRecord(
            replica="p-1", function="p", generation=1, state="ready", pid=1, address=world.router_address,
            started_at_s=time.time() - 9, ready_at_s=time.time() - 8,
        )
    ]  # fmt: skip
    for k in range(2):
        name = f"p-stage-{k}"
        variables = {"KEYSTAGE_ROLE": "stage", "KEYSTAGE_STAGES": str(k), "KEYSTAGE_DEVICE": device, **common}
        world.deploy(Deployment(service=name, envVars=variables))
        for n, state in ((1, "ready"), (2, "starting"), (3, "draining")):
            started = time.time() - (50 if state == "ready" else 0.1)
            world.replicas.append(
                ReplicaRecord(
                    replica=f"{name}-{n}", function=name, generation=1, state=state, pid=n,  # type: ignore[arg-type]
                    address="", started_at_s=started, ready_at_s=started + 0.5 if state == "ready" else 0.0,
                )
            )  # fmt: skip
    world.stats["router"] = told(0)


def told(items: int, execution: str = "single-pass") -> RouterStats:
    stages = [
        StageCounters(
            stage=k,
            arrivals=items,
            gap_sum_s=items * 0.1,
            gap_sq_sum_s2=items * 0.02,
            queue=4,
            in_flight=1,
            waits=items,
            wait_sum_s=0.0,
            services=items,
            service_sum_s=items * 0.005,
            service_sq_sum_s2=0.0,
            sojourn_sum_s=items * 0.006,
        )
        for k in range(2)
    ]
    workers = [
        ReplicaStats(f"p-stage-{k}-1", (k,), "ready", 1.0, 8, 3, [items * 0.005], [items], [items])
        for k in range(2)
    ]
    return RouterStats(
        pipeline="p",
        incarnation="i",
        at_s=5.0 + items,
        wall_s=time.time(),
        execution=execution,
        requests=items,
        completed=items,
        refused={},
        replayed_tokens=0,
        moves=0,
        stages=stages,
        replicas=workers,
    )


def only(world: ScriptedWorld) -> PipelineView:
    (found,) = world.platform.observe().pipelines
    return found


def test_stages_counters_and_start_times_are_read(scripted: ScriptedWorld) -> None:
    pipeline(scripted, KEYSTAGE_SLO='{"deadline_s": 0.4}')
    scripted.stats["router"] = told(7)
    seen = only(scripted)
    assert (seen.pipeline, seen.execution, seen.missing) == ("p", "single-pass", "")
    assert seen.slo.deadline_s == 0.4
    assert [s.scale.function for s in seen.stages] == ["p-stage-0", "p-stage-1"]
    stage = seen.stages[1]
    assert (stage.scale.ready, len(stage.scale.starting), stage.scale.cap) == (1, 1, None)
    assert stage.start_s == pytest.approx(0.5, abs=0.01)
    assert stage.profile_s == pytest.approx(0.005)
    assert (stage.routers[0].counters.arrivals, stage.routers[0].counters.queue) == (7, 4)
    assert (stage.workers[0].replica, stage.workers[0].slots, stage.workers[0].rows) == ("p-stage-1-1", 8, 7)
    assert [f.function for f in scripted.platform.observe().functions] == ["p"]


def test_what_gateways_have_in_hand_is_read(scripted: ScriptedWorld) -> None:
    scripted.deploy(deployment())
    loads = (Load("g", 2, 7, time.time()),)
    scripted.functions["f"] = msgspec.structs.replace(scripted.record("f"), loads=loads)
    assert view(scripted).loads == (GatewayLoad("g", 2, 7),)


def test_looping_pipelines_say_so(scripted: ScriptedWorld) -> None:
    pipeline(scripted, KEYSTAGE_SLO='{"ttft_s": 1, "tpot_s": 0.1}')
    scripted.stats["router"] = told(3, "looping")
    assert only(scripted).execution == "looping"
    assert only(scripted).slo.ttft_s == 1


@pytest.mark.parametrize("answer", [None, b"", b"{", b'{"pipeline": 3}', b"[]"])
def test_a_router_that_cannot_be_read_marks_its_pipeline_missing(
    scripted: ScriptedWorld, answer: bytes | None
) -> None:
    pipeline(scripted)
    if answer is None:
        del scripted.stats["router"]
    else:
        scripted.stats["router"] = answer
    assert only(scripted).missing.startswith("router p-1")
    assert len(only(scripted).stages) == 2


def test_a_router_that_is_not_there_marks_its_pipeline_missing(scripted: ScriptedWorld) -> None:
    pipeline(scripted)
    scripted.replicas = [r for r in scripted.replicas if r.function != "p"]
    assert only(scripted).missing == "router p has no ready replica"
    del scripted.functions["p"]
    assert only(scripted).missing == "pipeline p has no router function"


def test_real_cpu_stages_are_capped_with_a_reason(scripted: ScriptedWorld) -> None:
    pipeline(scripted, device="cpu")
    scale = only(scripted).stages[0].scale
    assert scale.cap is not None
    assert scale.cap >= 1
    assert "cores" in scale.cap_reason or "memory" in scale.cap_reason


def test_gpu_stages_get_one_replica_each(scripted: ScriptedWorld) -> None:
    pipeline(scripted, device="cuda")
    scales = [stage.scale for stage in only(scripted).stages]
    assert [scale.cap for scale in scales] == [1] * len(scales)
    assert "one GPU" in scales[0].cap_reason


def test_unreadable_settings_of_a_function_fall_back(scripted: ScriptedWorld) -> None:
    pipeline(scripted, KEYSTAGE_SLO="{nonsense")
    odd = Deployment(
        service="odd",
        envVars={"KEYSTAGE_ROLE": "stage", "KEYSTAGE_STAGES": "x", "KEYSTAGE_PIPELINE": "p"},
        labels={"com.openfaas.scale.min": "-4", "com.openfaas.scale.max": "many"},
    )
    scripted.deploy(odd)
    assert only(scripted).slo.deadline_s is None
    seen = view(scripted, "odd")
    assert (seen.min_replicas, seen.max_replicas) == (1, 20)


@pytest.mark.parametrize("url", ["http://[", "file:///a%00b", "deep"])
def test_a_bundle_that_cannot_be_read_hides_nothing(scripted: ScriptedWorld, folder: Path, url: str) -> None:
    if url == "deep":
        (folder / "pipeline.json").write_text('{"x": ' + "[" * 100_000)
        url = folder.as_uri()
    pipeline(scripted, device="cpu", KEYSTAGE_BUNDLE=url)
    assert [stage.stage for stage in only(scripted).stages] == [0, 1]


def test_published_key_stages_are_kept_per_pipeline(scripted: ScriptedWorld) -> None:
    for name, stage in (("p", 1), ("q", 2), ("p", 3)):
        scripted.platform.apply([PublishKeyStages(name, (KeyStage(stage, 1.5),))])
    lists = json.loads((scripted.home / "key-stages.json").read_text())
    assert lists == {"p": [{"stage": 3, "score": 1.5}], "q": [{"stage": 2, "score": 1.5}]}


def test_a_backlog_seen_over_the_socket_becomes_replicas_within_one_tick(
    scripted: ScriptedWorld, tmp_path: Path
) -> None:
    pipeline(scripted)
    scripted.replicas = [r for r in scripted.replicas if r.state == "ready"]
    loop = Loop(scripted.platform, PolicySettings(), DecisionLog(tmp_path / "d", 1 << 22), tick_s=0.25)
    calm_stats = told(4)  # the same counters again: nothing arrives, however fast the ticks are
    empty = [msgspec.structs.replace(c, queue=0, in_flight=0) for c in calm_stats.stages]
    for _ in range(10):
        scripted.stats["router"] = msgspec.structs.replace(calm_stats, stages=empty)
        assert loop.tick() is not None
    calm = scripted.record("p-stage-0").desired
    busy = told(44)
    queued = [msgspec.structs.replace(c, queue=400) for c in busy.stages]
    scripted.stats["router"] = msgspec.structs.replace(busy, stages=queued)
    loop.tick()
    risen = scripted.record("p-stage-0").desired
    assert calm is not None
    assert risen is not None
    assert risen > calm
