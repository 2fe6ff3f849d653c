"""What one pod cannot do to another: the node's socket, the shared memory, limits, and ends.

Runs against the language model's stages where parameters are real; a pod of ours plays the stranger.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.e2e_world import MOUNT, NAMESPACE, World, figure, is_ready, wait_for

from keystage.kubernetes.client import PODS, Object

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODEL = "smollm2"
SOCKET = "/var/run/keystage/node/pods.sock"
ASK = """
import json, mmap, os, sys
from pathlib import Path
from keystage.keysmanager.api import StageName
from keystage.keysmanager.client import KeysManagerGone, KeysManagerRefused, get_segment
told = {}
try:
    got = get_segment(Path(sys.argv[1]), StageName(bundle=sys.argv[2], stage=int(sys.argv[3])))
except (KeysManagerRefused, KeysManagerGone) as error:
    told["refused"] = str(error)
    told["status"] = getattr(error, "status", 0)
else:
    fd = got.fd
    told["bytes"] = os.fstat(fd).st_size
    for what, act in {
        "pwrite": lambda: os.pwrite(fd, b"x", 0),
        "ftruncate": lambda: os.ftruncate(fd, 1),
        "mmap": lambda: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        "reopen": lambda: os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x", 0),
    }.items():
        try:
            act()
            told[what] = "DONE"
        except OSError as error:
            told[what] = error.strerror
print(json.dumps(told))
"""
EAT = """
held = []
while True:
    held.append(bytearray(32 << 20))
    print(len(held) * 32, flush=True)
"""


@pytest.fixture(scope="module")
def model(world: World) -> Iterator[str]:
    stack = world.stack(MODEL, env={"*": {"KEYSTAGE_THREADS": "1"}})
    world.deploy(stack)
    yield MODEL
    world.remove(stack)


def _stranger(world: World, node: str, name: str, command: list[str], **limits: str) -> Object:
    """A pod as any other of the functions' namespace, on a stage's node, that sees its socket."""
    mounts = [
        {"name": "node", "mountPath": "/var/run/keystage/node", "readOnly": True},
        {"name": "bundles", "mountPath": MOUNT, "readOnly": True},
    ]
    container: dict[str, Any] = {
        "name": name,
        "image": f"{world.settings.registry}/stage:{world.settings.tag}",
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "resources": {"limits": limits, "requests": {"cpu": "10m"}},
        "volumeMounts": mounts,
    }
    spec = {
        "nodeName": node,
        "restartPolicy": "Never",
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
        "volumes": [
            {"name": "node", "hostPath": {"path": f"/run/keystage/{NAMESPACE}"}},
            {"name": "bundles", "hostPath": {"path": str(world.settings.bundles)}},
        ],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    return world.functions.create(PODS, pod, manager="e2e")


def _ask(world: World, pod: str, stage: int) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(
        world.python(pod, ASK, SOCKET, f"file://{MOUNT}/{MODEL}", str(stage)).splitlines()[-1]
    )
    return told


def test_a_pod_that_is_no_worker_of_the_stage_is_refused_at_the_socket(world: World, model: str) -> None:
    (stage,) = world.ready_pods(f"{model}-stage-1")
    node = stage["spec"]["nodeName"]
    pod = _stranger(world, node, "stranger", ["sleep", "600"])
    try:
        wait_for(lambda: is_ready(world.functions.get(PODS, "stranger")), "the stranger runs")
        told = _ask(world, "stranger", 1)
        figure("a stranger that asks for a stage's parameters", told)
        assert told.get("status") == 403
    finally:
        world.delete_pod(world.functions, pod, 0)
    other = _ask(world, stage["metadata"]["name"], 2)
    figure("a worker of stage 1 that asks for stage 2", other)
    assert other.get("status") == 403


def test_the_memory_it_gets_cannot_be_written(world: World, model: str) -> None:
    (stage,) = world.ready_pods(f"{model}-stage-1")
    told = _ask(world, stage["metadata"]["name"], 1)
    figure("a worker that tries to write its shared parameters", told)
    assert told["bytes"] > 1 << 20
    assert "DONE" not in told.values()


def test_the_limits_of_a_pod_bite(world: World) -> None:
    node = world.ready_nodes()[-1]["metadata"]["name"]
    pod = _stranger(world, node, "eater", ["python", "-c", EAT], memory="128Mi", cpu="500m")
    try:

        def killed() -> Any:
            statuses = world.functions.get(PODS, "eater")["status"].get("containerStatuses", [])
            return [s["state"]["terminated"] for s in statuses if "terminated" in s["state"]]

        (ended,) = wait_for(killed, "the eater is killed")
        lines = world.functions.logs("eater", "eater").decode().splitlines()
        figure(
            "a pod of 128 MiB that takes memory without end", f"{ended['reason']} after {len(lines) * 32} MiB"
        )
        assert ended["reason"] == "OOMKilled" or ended["exitCode"] == 137
        assert len(lines) * 32 <= 128
    finally:
        world.delete_pod(world.functions, pod, 0)


def test_deleting_a_pod_ends_its_worker_within_two_seconds(world: World, emulated: str) -> None:
    name = f"{emulated}-stage-1"
    (pod, *_) = world.ready_pods(name)
    node, uid = pod["spec"]["nodeName"], pod["metadata"]["uid"]
    (manager,) = [p for p in world.release_pods("keysmanager") if p["spec"]["nodeName"] == node]
    # The KeysManager sees the node's processes; it looks for those in the pod's cgroup.
    look = (
        "import glob, sys, time\n"
        "uid = sys.argv[1]; forms = (uid, uid.replace('-', '_')); end = time.time() + 60\n"
        "def there():\n"
        "    for f in glob.glob('/proc/[0-9]*/cgroup'):\n"
        "        try:\n"
        "            if any(x in open(f).read() for x in forms): return True\n"
        "        except OSError: pass\n"
        "print('there' if there() else 'absent', flush=True)\n"
        "while there() and time.time() < end: time.sleep(0.02)\n"
        "print(time.time(), flush=True)\n"
    )
    found: list[str] = []
    name_of = manager["metadata"]["name"]

    def run() -> None:
        found.append(
            world.kubectl(
                "-n", NAMESPACE, "exec", name_of, "-c", "keysmanager", "--", "python", "-c", look, uid
            )
        )

    watcher = threading.Thread(target=run)
    watcher.start()
    time.sleep(2.0)
    deleted_s = time.time()
    world.delete_pod(world.functions, pod)
    watcher.join(90)
    state, ended_s = found[0].split()
    assert state == "there"
    figure(
        "seconds from deleting a stage's pod to the end of its processes", f"{float(ended_s) - deleted_s:.2f}"
    )
    assert float(ended_s) - deleted_s < 2.0
    wait_for(lambda: len(world.ready_pods(name)) >= 1, "another replica serves")
