"""Parked pods over a fake API server: kept, activated, several at once, and taken over by a new leader."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from support.kube.cluster import Kube
from support.kube.fixtures import kube  # noqa: F401  (a fixture)
from support.reconciler_world import SETTINGS, ParkedPod, ReconcilerWorld, router, stage

from keystage.controller.domain.decision import Site
from keystage.kubernetes import reconciler
from keystage.kubernetes.api import ACTIVATED_ANNOTATION, FUNCTION_LABEL, POOL_LABEL, SERVING_ANNOTATION
from keystage.kubernetes.view import annotations_of, labels_of, replica_of


@pytest.fixture
def world(kube: Kube) -> Iterator[ReconcilerWorld]:  # noqa: F811
    for name in ("node1", "node2"):
        kube.nodes.add(name, cpu="8")
    made = ReconcilerWorld(kube, dataclasses.replace(SETTINGS, parked_per_pipeline=4))
    kube.play(start_s=0.02, ready_s=0.02, stop_s=0.02)
    try:
        yield made
    finally:
        made.stop()


def test_parked_pods_become_workers_of_the_stage_that_wants_them(world: ReconcilerWorld) -> None:
    world.deploy(router(), stage(0), stage(1))
    world.start()
    world.until_ready("llm-stage-0", 1)
    world.until_parked(4)
    parked = {p["metadata"]["name"]: p for p in world.parked()}
    world.wishes.set_replicas("llm-stage-1", 4, (), (), time.time())
    pods = world.until_ready("llm-stage-1", 4)
    taken = [p for p in pods if POOL_LABEL in labels_of(p)]
    assert len(taken) == 3
    assert {p["metadata"]["name"] for p in taken} <= parked.keys()
    uid = world.kube.get("functions", "llm-stage-1")["metadata"]["uid"]
    for pod in taken:
        assert [o["uid"] for o in pod["metadata"]["ownerReferences"]] == [uid]
        record = replica_of(pod, time.time())
        assert record is not None
        assert (record.via, record.source, record.state) == ("standby", "memory", "ready")
        told = world.faces[pod["metadata"]["name"]].activations
        assert [(a.function, a.env["KEYSTAGE_STAGES"]) for a in told] == [("llm-stage-1", "1")]
    world.until_parked(4)  # the pool is filled again
    # Nobody else counts these starts on a cluster.
    nodes = Counter(pod["spec"]["nodeName"] for pod in taken)
    shown = [s for s in world.starts.samples() if s.labels["via"] == "standby"]
    assert {s.labels["node"]: s.value for s in shown if s.name == "keystage_starts"} == nodes
    for sample in (s for s in shown if s.name == "keystage_start_seconds"):
        assert (sample.labels["pipeline"], sample.labels["phase"]) == ("llm", "ready")
        assert sample.counts[-1] == nodes[sample.labels["node"]]
        assert 0 < sample.value < 60


def test_the_pool_serves_first_wherever_it_is_and_new_pods_keep_to_their_site(world: ReconcilerWorld) -> None:
    world.deploy(router(), stage())
    world.start()
    (first,) = world.until_ready("llm-stage-0", 1)
    world.until_parked(4)
    parked = {p["metadata"]["name"]: p["spec"]["nodeName"] for p in world.parked()}
    assert set(parked.values()) == {"node1", "node2"}
    wanted = len(parked) + 2
    world.wishes.set_replicas("llm-stage-0", wanted, [Site("node1")] * wanted, (), time.time())
    pods = world.until_ready("llm-stage-0", wanted)
    nodes = {p["metadata"]["name"]: p["spec"]["nodeName"] for p in pods}
    assert parked.items() <= nodes.items()
    (made,) = nodes.keys() - parked.keys() - {first["metadata"]["name"]}
    assert nodes[made] == "node1"


@pytest.mark.slow
def test_one_that_hangs_holds_up_no_other(world: ReconcilerWorld) -> None:
    world.deploy(router(), stage())
    slow: list[ParkedPod] = []

    def slow_first(face: ParkedPod) -> None:
        if not slow:
            face.delay_s = 3.0
            slow.append(face)

    world.on_face = slow_first
    world.start()
    world.until_ready("llm-stage-0", 1)
    world.until_parked(4)
    world.wishes.set_replicas("llm-stage-0", 5, (), (), time.time())
    world.kube.until(lambda: len(world.ready("llm-stage-0")) == 4)
    assert not slow[0].is_serving
    world.until_ready("llm-stage-0", 5)


@pytest.mark.slow
def test_one_that_refuses_is_replaced_and_the_reason_told(world: ReconcilerWorld) -> None:
    world.deploy(router(), stage())

    def refuse_first(face: ParkedPod) -> None:
        if len(world.faces) == 1:
            face.refusal = "stage 0 of llm is corrupt"

    world.on_face = refuse_first
    world.start()
    world.until_ready("llm-stage-0", 1)
    world.until_parked(4)
    bad = next(name for name, face in world.faces.items() if face.refusal)
    world.wishes.set_replicas("llm-stage-0", 5, (), (), time.time())
    world.until_ready("llm-stage-0", 5)
    assert bad not in {p["metadata"]["name"] for p in world.pods("llm-stage-0")}
    world.kube.until(lambda: any("is corrupt" in line for line in world.events("llm-stage-0")))


def test_a_new_leader_ends_what_the_last_one_began(world: ReconcilerWorld) -> None:
    world.deploy(router(), stage())
    world.on_face = lambda face: setattr(face, "delay_s", 0.5)
    world.start()
    world.until_ready("llm-stage-0", 1)
    world.until_parked(4)
    world.wishes.set_replicas("llm-stage-0", 3, (), (), time.time())
    world.kube.until(lambda: sum(bool(face.activations) for face in world.faces.values()) == 2)
    world.reconciler.stop()  # while both are being told
    world.replace_leader()
    pods = world.until_ready("llm-stage-0", 3)
    assert sum(POOL_LABEL in labels_of(pod) for pod in pods) == 2
    assert all(len(face.activations) <= 1 for face in world.faces.values())


@pytest.mark.slow
def test_the_pool_goes_with_its_pipeline_and_with_its_shape(world: ReconcilerWorld) -> None:
    world.deploy(router(), stage())
    world.start()
    world.until_parked(4)
    before = {p["metadata"]["name"] for p in world.parked()}
    world.deploy(stage(image="stage:2"))
    world.kube.until(lambda: not before & {p["metadata"]["name"] for p in world.parked()})
    world.until_parked(4)
    world.kube.delete("functions", "llm-stage-0")
    world.kube.until(lambda: not world.parked())
    world.kube.until(lambda: not world.kube.list("pods", labels=f"{FUNCTION_LABEL}=llm-stage-0"))


def test_from_decision_to_serving_nothing_waits_for_a_clock(
    world: ReconcilerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.deploy(router(), stage())
    world.start()
    world.until_ready("llm-stage-0", 1)
    world.until_parked(4)
    monkeypatch.setattr(reconciler, "EVERY_S", 600.0)
    monkeypatch.setattr(reconciler, "SOON_S", 600.0)
    turned_s = world.reconciler.turned_at_s
    world.wishes.set_replicas("llm-stage-0", 2, (), (), time.time())
    pods = world.until_ready("llm-stage-0", 2)
    assert world.reconciler.turned_at_s > turned_s
    notes = annotations_of(next(p for p in pods if POOL_LABEL in labels_of(p)))
    assert float(notes[SERVING_ANNOTATION]) >= float(notes[ACTIVATED_ANNOTATION])
