"""The API server refuses, a watch is silent, objects are nonsense: no flood, nothing twice, nothing stuck."""

from __future__ import annotations

import dataclasses
import time

import pytest
from support.kube.cluster import Kube
from support.kube.fixtures import kube  # noqa: F401  (a fixture)
from support.reconciler_world import (
    SETTINGS,
    ReconcilerWorld,
    router,
    spec_replicas,
    stage,
    world_fixture,  # noqa: F401  (a fixture)
)

from keystage.kubernetes import expected
from keystage.kubernetes.api import OVERRIDE_UNTIL_ANNOTATION
from keystage.kubernetes.client import SERVICES
from keystage.kubernetes.view import annotations_of
from keystage.local.api import Deployment

STAGE = "llm-stage-0"
MANY = 10**6


def turn_for(world: ReconcilerWorld, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    world.kube.until(lambda: world.reconciler.turned_at_s > until_s, what="it goes on turning")


def refused(world: ReconcilerWorld) -> int:
    return sum(MANY - rule.left for rule in world.kube.faults._rules)


@pytest.mark.slow
@pytest.mark.parametrize("code", [403, 409, 422])
def test_what_is_refused_again_and_again_is_tried_less_and_less(world: ReconcilerWorld, code: int) -> None:
    world.deploy(stage())
    world.start()
    world.wishes.set_replicas(STAGE, 2, (), (), time.time())
    world.until_ready(STAGE, 2)
    world.kube.faults.fail(MANY, code=code, verb="patch", resource="pods")
    world.wishes.set_replicas(STAGE, 1, (), (), time.time())
    turn_for(world, 2.0)
    assert 1 <= refused(world) <= 6
    world.kube.faults.clear()
    world.until_ready(STAGE, 1)


@pytest.mark.slow
def test_a_pod_that_a_silent_watch_does_not_show_is_not_made_twice(
    world: ReconcilerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected, "SETTLE_S", 0.2)
    world.deploy(stage())
    world.start()
    world.until_ready(STAGE, 1)
    world.kube.until(lambda: world.status(STAGE).get("ready") == 1)
    world.kube.faults.is_mute = True
    world.wishes.set_replicas(STAGE, 3, (), (), time.time())
    turn_for(world, 2.5)
    assert len(world.pods(STAGE)) == 3
    world.kube.faults.is_mute = False
    world.kube.faults.drop_watches()
    world.until_ready(STAGE, 3)


@pytest.mark.slow
def test_a_pod_that_refused_and_was_not_deleted_is_deleted_later(kube: Kube) -> None:  # noqa: F811
    kube.nodes.add("node1", cpu="8")
    world = ReconcilerWorld(kube, dataclasses.replace(SETTINGS, parked_per_pipeline=1))
    kube.play(start_s=0.02, ready_s=0.02, stop_s=0.02)
    try:
        world.on_face = lambda face: setattr(face, "refusal", "no" if len(world.faces) == 1 else "")
        world.deploy(router(), stage())
        world.start()
        world.until_ready(STAGE, 1)
        world.until_parked(1)
        kube.faults.fail(1, code=500, verb="delete", resource="pods")
        world.wishes.set_replicas(STAGE, 2, (), (), time.time())
        kube.until(lambda: not any(rule.left for rule in kube.faults._rules), what="its deletion failed")
        (bad,) = [name for name, face in world.faces.items() if face.refusal]
        pods = world.until_ready(STAGE, 2)
        assert bad not in {pod["metadata"]["name"] for pod in pods}
    finally:
        world.stop()


def test_a_status_that_somebody_else_wrote_at_that_moment_is_written_again(world: ReconcilerWorld) -> None:
    world.deploy(stage())
    world.start()
    world.until_ready(STAGE, 1)
    world.kube.until(lambda: world.status(STAGE).get("ready") == 1)
    world.kube.faults.fail(1, code=409, verb="patch", resource="functions/status")
    world.wishes.set_replicas(STAGE, 0, (), (), time.time())
    world.kube.until(lambda: world.status(STAGE).get("desired") == 0)


@pytest.mark.slow
@pytest.mark.parametrize("code", [403, 422])
def test_a_status_that_was_refused_is_not_acted_on_and_written_later(
    world: ReconcilerWorld, code: int
) -> None:
    world.deploy(stage())
    world.start()
    world.until_ready(STAGE, 1)
    world.kube.until(lambda: world.status(STAGE).get("ready") == 1)
    world.kube.faults.fail(MANY, code=code, verb="patch", resource="functions/status")
    world.wishes.set_replicas(STAGE, 2, (), (), time.time())
    turn_for(world, 2.0)
    assert 1 <= refused(world) <= 6
    assert len(world.pods(STAGE)) == 1  # another leader would not know of a second one
    world.kube.faults.clear()
    world.until_ready(STAGE, 2)
    world.kube.until(lambda: world.status(STAGE).get("desired") == 2)


@pytest.mark.slow
def test_a_deployment_that_cannot_be_removed_is_tried_less_and_less(world: ReconcilerWorld) -> None:
    fake = world.kube
    world.deploy(Deployment(service=STAGE, image="echo:1"))
    world.start()
    fake.until(lambda: fake.list("deployments"))
    fake.faults.fail(MANY, code=403, verb="delete", resource="deployments")
    world.deploy(stage())
    fake.until(lambda: refused(world), what="its removal is refused")
    turn_for(world, 2.0)
    assert refused(world) <= 6
    fake.faults.clear()
    fake.until(lambda: not fake.list("deployments"))


def test_a_wish_with_a_garbled_end_is_given_one_and_no_wish_none(world: ReconcilerWorld) -> None:
    world.deploy(stage(0), stage(1))
    garbled = {"metadata": {"annotations": {OVERRIDE_UNTIL_ANNOTATION: "soon"}}, "spec": {"replicas": 2}}
    world.kube.patch("functions", STAGE, garbled)
    world.kube.patch("functions", "llm-stage-1", {"spec": {"replicas": None}})
    world.start()

    def until(name: str) -> str:
        return annotations_of(world.kube.get("functions", name)).get(OVERRIDE_UNTIL_ANNOTATION, "")

    world.kube.until(lambda: until(STAGE) not in ("", "soon"))
    assert 500.0 < float(until(STAGE)) - time.time() <= 600.0
    world.until_ready("llm-stage-1", 1)
    assert spec_replicas(world.kube, "llm-stage-1") is None
    assert not until("llm-stage-1")


def test_nonsense_beside_it_does_not_keep_a_function_from_running(world: ReconcilerWorld) -> None:
    world.deploy(
        odd("bad-a", KEYSTAGE_STAGES="9" * 5000, KEYSTAGE_BUNDLE="http://["),
        odd("bad-b", KEYSTAGE_STAGES="0-99999999999", KEYSTAGE_DEVICE="cuda"),
        odd("bad-c", KEYSTAGE_DRAIN_S="1e300", KEYSTAGE_KV_BYTES="9" * 5000),
        stage(),
    )
    world.start()
    world.until_ready(STAGE, 1)
    world.kube.until(lambda: world.status("bad-a").get("trouble"))
    assert max(len(line) for line in world.status("bad-a")["trouble"]) < 2000
    assert not world.crashes


def odd(name: str, **env: str) -> Deployment:
    """A stage of its own pipeline, with this environment."""
    whole = {"KEYSTAGE_ROLE": "stage", "KEYSTAGE_PIPELINE": name, "KEYSTAGE_BUNDLE": "b", **env}
    return Deployment(service=name, image="i", envVars=whole)


@pytest.mark.slow
def test_a_service_that_somebody_else_made_stays_his(world: ReconcilerWorld) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "echo"},
        "spec": {"selector": {"app": "his"}, "ports": [{"name": "http", "port": 8080, "targetPort": 80}]},
    }
    world.kube.cluster().create(SERVICES, body, manager="helm")
    world.deploy(Deployment(service="echo", image="echo:1"))
    world.start()
    world.kube.until(lambda: any("helm" in line for line in world.status("echo").get("trouble", ())))
    assert world.kube.get("services", "echo")["spec"]["selector"] == {"app": "his"}
    world.kube.delete("services", "echo")
    world.kube.until(lambda: len(world.ready("echo")) == 1, timeout_s=20.0)


def test_a_stage_that_becomes_a_plain_function_leaves_its_budget_behind(world: ReconcilerWorld) -> None:
    fake = world.kube
    world.deploy(stage())
    world.start()
    world.wishes.set_replicas(STAGE, 3, (), (), time.time())
    world.until_ready(STAGE, 3)
    fake.until(lambda: fake.list("poddisruptionbudgets"))
    world.deploy(Deployment(service=STAGE, image="echo:1"))
    fake.until(lambda: not fake.list("poddisruptionbudgets"))


def test_nobody_leaves_by_a_decision_that_may_be_old_when_a_leader_begins(
    world: ReconcilerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.deploy(stage())
    world.start()
    world.wishes.set_replicas(STAGE, 2, (), (), time.time())
    world.until_ready(STAGE, 2)
    world.kube.until(lambda: world.status(STAGE).get("ready") == 2)
    monkeypatch.setattr(world.world, "functions_age_s", lambda: float("inf"))
    world.replace_leader()
    world.wishes.set_replicas(STAGE, 1, (), (), time.time())
    turn_for(world, 1.0)
    assert len(world.ready(STAGE)) == 2
    monkeypatch.undo()
    world.until_ready(STAGE, 1)
