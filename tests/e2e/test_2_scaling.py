"""Scale 1 -> 4 -> 1 under load: no failed request; how long replicas take, beside plain Deployments."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
from support.e2e_load import Load, summary
from support.e2e_starts import Decisions, all_serve, phases, was_parked
from support.e2e_world import FUNCTION_NAMESPACE, MOUNT, World, figure, is_ready, wait_for

from keystage.kubernetes.client import DEPLOYMENTS, PODS, Object

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RATE_RPS = 20.0
"""Twice what one replica serves: items wait when the others come, so each of them works at once."""
EMPTY = "empty"
SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"""


def test_one_to_four_to_one_under_load(world: World, emulated: str) -> None:
    stage = f"{emulated}-stage-1"
    world.scale(stage, 1)
    wait_for(lambda: len(world.pods(stage)) == 1, "one replica")
    wait_for(lambda: len(world.parked()) == 2, "two parked pods are prepared")
    requests = Load(f"{world.url}/function/{emulated}", RATE_RPS)
    with Decisions(world, stage) as decisions, requests as load:
        load.wait(50)
        before = {pod["metadata"]["name"] for pod in world.pods(stage)}
        world.scale(stage, 4)
        wait_for(lambda: len(world.ready_pods(stage)) == 4 and all_serve(world, stage), "four replicas", 90)
        load.wait(100)
        new = [pod for pod in world.ready_pods(stage) if pod["metadata"]["name"] not in before]
        starts = {pod["metadata"]["name"]: (pod, phases(world, pod["metadata"]["name"])) for pod in new}
        world.scale(stage, 1)
        wait_for(lambda: len(world.pods(stage)) == 1, "one replica again", 120)
        load.wait(50)
        load.stop()
    figure("scale 1 -> 4 -> 1 under load", summary(load))
    decided_s = decisions.at(4)
    taken: dict[str, list[float]] = {"parked pod": [], "new pod": []}
    for name, (pod, told) in sorted(starts.items()):
        kind = "parked pod" if was_parked(pod) else "new pod"
        assert told["first_item_s"] > decided_s, f"{name} did no work"
        taken[kind].append(told["first_item_s"] - decided_s)
        via = pod["metadata"].get("annotations", {}).get("keystage.dev/via", "")
        steps = {key: f"{value - decided_s:.3f}" for key, value in told.items()}
        figure(f"{kind} {name} via {via}, seconds from decision", steps)
    for kind, values in taken.items():
        if values:
            figure(f"seconds from decision to first answered item, {kind}", _spread(values))
    assert not load.failed
    # The pipeline's two parked pods are of two shapes, one of them this stage's.
    assert len(taken["parked pod"]) >= 1
    assert sum(map(len, taken.values())) == 3


def _spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.3f}, longest {max(values):.3f} of {len(values)}"


@pytest.mark.parametrize("goal", [4, 8])
def test_beside_it_an_empty_function_as_a_plain_deployment(world: World, goal: int) -> None:
    """The rival: a Deployment with an empty function, probed as OpenFaaS probes, scaled by its number."""
    command = ["python", "-c", SERVER]
    taken = _scaled(world, _deployment(world, EMPTY, "router", command, {}, path="/"), goal)
    figure(
        f"seconds from kubectl scale to Ready, empty function as a plain Deployment, 1 -> {goal}",
        _spread(taken),
    )


def test_beside_it_the_same_worker_as_a_plain_deployment(world: World, emulated: str) -> None:
    """The same worker, image and bundle, without parked pods: a Deployment that is scaled by its number."""
    env = {
        "KEYSTAGE_BUNDLE": f"file://{MOUNT}/{emulated}",
        "KEYSTAGE_PIPELINE": emulated,
        "KEYSTAGE_STAGES": "1",
        "KEYSTAGE_ROLE": "stage",
        "KEYSTAGE_DEVICE": "emulated:beta=0.1",
        "KEYSTAGE_RUN": "/tmp",
        "KEYSTAGE_REPLICA": "plain",
        "KEYSTAGE_WIRE_KEY_FILE": "/var/run/keystage/wire/key",
        # A router of its own that is not there: the replica gets ready and takes no work from the others.
        "KEYSTAGE_ROUTER": "tcp://127.0.0.1:7800",
    }
    command = ["python", "-m", "keystage.worker.app"]
    taken = _scaled(world, _deployment(world, "plain-stage", "stage", command, env, path="/_/ready"), 4)
    figure(
        "seconds from kubectl scale to Ready, the same worker as a plain Deployment, 1 -> 4", _spread(taken)
    )


def _scaled(world: World, deployment: Object, goal: int) -> list[float]:
    """Seconds from the wish to each new pod's Ready."""
    name = deployment["metadata"]["name"]
    world.functions.create(DEPLOYMENTS, deployment, manager="e2e")
    try:
        wait_for(lambda: _ready(world, name) == 1, f"{name} is Ready", 120)
        begun_s = time.time()
        world.functions.patch(DEPLOYMENTS, name, {"spec": {"replicas": goal}}, manager="e2e")
        taken: list[float] = []

        def all_ready() -> bool:
            found = _ready(world, name)
            while len(taken) < found - 1:
                taken.append(time.time() - begun_s)
            return found == goal

        wait_for(all_ready, f"{name} has {goal}", 120, 0.05)
        return taken
    finally:
        world.functions.delete(DEPLOYMENTS, name)
        wait_for(lambda: not world.functions.list(PODS, labels=f"app={name}").items, f"{name} is gone", 120)


def _ready(world: World, name: str) -> int:
    return sum(is_ready(pod) for pod in world.functions.list(PODS, labels=f"app={name}").items)


def _deployment(
    world: World, name: str, image: str, command: list[str], env: dict[str, str], *, path: str
) -> Object:
    """As faas-netes makes one: probes of 2 s after 2 s, no surge of resources."""
    probe: dict[str, Any] = {
        "httpGet": {"path": path, "port": 8080},
        "initialDelaySeconds": 2,
        "periodSeconds": 2,
        "timeoutSeconds": 1,
    }
    mounts = [
        {"name": "bundles", "mountPath": MOUNT},
        {"name": "wire", "mountPath": "/var/run/keystage/wire"},
    ]
    container = {
        "name": name,
        "image": f"{world.settings.registry}/{image}:{world.settings.tag}",
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "readinessProbe": probe,
        "livenessProbe": probe | {"failureThreshold": 30},
        "volumeMounts": mounts,
    }
    volumes = [
        {"name": "bundles", "hostPath": {"path": str(world.settings.bundles)}},
        {"name": "wire", "secret": {"secretName": "keystage-wire", "defaultMode": 0o440}},
    ]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": FUNCTION_NAMESPACE},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": name}},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "containers": [container],
                    "volumes": volumes,
                    "securityContext": {"fsGroup": 12000},
                    "terminationGracePeriodSeconds": 5,
                },
            },
        },
    }
