"""The reconciler over a fake API server: decisions become pods, and stay so whatever happens."""

from __future__ import annotations

import time

from support.kube.fixtures import kube  # noqa: F401  (a fixture)
from support.reconciler_world import ReconcilerWorld, router, stage, world_fixture  # noqa: F401  (a fixture)

from keystage.controller.domain.decision import Site
from keystage.kubernetes.view import annotations_of, is_leaving


def until_gone(world: ReconcilerWorld, name: str) -> None:
    world.kube.until(lambda: name not in {pod["metadata"]["name"] for pod in world.pods("llm-stage-0")})


def test_a_pipeline_comes_up_and_its_status_tells(world: ReconcilerWorld) -> None:
    world.deploy(router(), stage(0), stage(1))
    world.start()
    world.until_ready("llm-stage-0", 1)
    world.until_ready("llm-stage-1", 1)
    world.until_ready("llm", 1)
    assert world.kube.get("services", "llm")["spec"]["ports"][1]["port"] == 7800
    fake = world.kube
    fake.until(lambda: world.status("llm-stage-0").get("ready") == 1)
    fake.until(lambda: world.status("llm").get("ready") == 1)
    status = world.status("llm-stage-0")
    assert status["replicas"] == 1
    assert status["selector"] == "keystage.dev/function=llm-stage-0"
    assert "desired" not in status  # nobody decided yet


def test_scale_up_to_sites_and_down_by_victims(world: ReconcilerWorld) -> None:
    world.deploy(stage())
    world.start()
    first = world.until_ready("llm-stage-0", 1)[0]
    world.wishes.set_replicas("llm-stage-0", 3, [Site("node2"), Site("node2")], (), time.time())
    pods = world.until_ready("llm-stage-0", 3)
    new = [p for p in pods if p["metadata"]["name"] != first["metadata"]["name"]]
    assert [p["spec"]["nodeName"] for p in new] == ["node2", "node2"]

    def counted() -> dict[str, float]:
        return {s.labels["node"]: s.value for s in world.starts.samples() if s.name == "keystage_starts"}

    world.kube.until(lambda: sum(counted().values()) == 3)  # fresh pods, from the decision on
    assert counted()["node2"] >= 2
    assert {(s.labels["via"], s.labels.get("phase", "ready")) for s in world.starts.samples()} == {
        ("process", "ready")
    }
    world.kube.until(lambda: world.status("llm-stage-0").get("desired") == 3)
    name = first["metadata"]["name"]
    world.requests[name] = 1
    world.wishes.set_replicas("llm-stage-0", 2, (), [name], time.time())
    world.kube.until(lambda: is_leaving(world.kube.get("pods", name)))
    world.until_ready("llm-stage-0", 2)
    world.kube.until(lambda: "Scaled: replicas 3 -> 2" in world.events("llm-stage-0"))
    assert not world.kube.get("pods", name)["metadata"].get(
        "deletionTimestamp"
    )  # a gateway has a request there
    world.requests[name] = 0
    world.kube.until(lambda: not [p for p in world.kube.list("pods") if p["metadata"]["name"] == name])


def test_a_redeploy_rolls_over_without_a_gap(world: ReconcilerWorld) -> None:
    world.deploy(stage())
    world.start()
    world.wishes.set_replicas("llm-stage-0", 2, (), (), time.time())
    before = {p["metadata"]["name"] for p in world.until_ready("llm-stage-0", 2)}
    world.deploy(stage(image="stage:2"))
    seen: list[tuple[int, int]] = []

    def rolled() -> bool:
        pods, ready = world.pods("llm-stage-0"), world.ready("llm-stage-0")
        seen.append((len(pods), len(ready)))
        return len(ready) == len(pods) == 2 and not before & {p["metadata"]["name"] for p in pods}

    world.kube.until(rolled, what="both are of the new image")
    # Two, one beyond, and one whose leave is on its way beside the creation of its successor.
    assert max(count for count, _ in seen) <= 4
    assert min(ready for _, ready in seen) >= 2
    assert {p["spec"]["containers"][0]["image"] for p in world.pods("llm-stage-0")} == {"stage:2"}


def test_a_pod_that_ended_is_replaced(world: ReconcilerWorld) -> None:
    world.deploy(stage())
    world.start()
    for _ in range(3):
        pod = world.until_ready("llm-stage-0", 1)[0]
        world.kube.kubelet.fail(pod, "OOMKilled", exit_code=137)
        until_gone(world, pod["metadata"]["name"])
    world.until_ready("llm-stage-0", 1)
    assert any("OOMKilled" in line for line in world.events("llm-stage-0"))


def test_a_person_s_wish_is_given_an_end_and_taken_back(world: ReconcilerWorld) -> None:
    world.deploy(stage())
    world.start()
    world.until_ready("llm-stage-0", 1)
    fake = world.kube
    fake.patch("functions", "llm-stage-0", {"spec": {"replicas": 3}})
    until = "keystage.dev/override-until"
    fake.until(lambda: until in annotations_of(fake.get("functions", "llm-stage-0")))
    ends_s = float(annotations_of(fake.get("functions", "llm-stage-0"))[until])
    assert 590 < ends_s - time.time() < 610
    world.wishes.lift_override("llm-stage-0")
    fake.until(lambda: "replicas" not in fake.get("functions", "llm-stage-0")["spec"])
    assert until not in annotations_of(fake.get("functions", "llm-stage-0"))
    fake.patch("functions", "llm-stage-0", {"metadata": {"annotations": {"keystage.dev/wake": "1"}}})
    world.wishes.clear_wake("llm-stage-0")
    fake.until(lambda: "keystage.dev/wake" not in annotations_of(fake.get("functions", "llm-stage-0")))
