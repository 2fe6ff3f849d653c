"""The controller as a process on a (fake) cluster: it steers, tells its health, another one takes over."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.kube.cluster import FUNCTION_NAMESPACE, SYSTEM_NAMESPACE, Kube
from support.kube_platform import Answering

from keystage.bundle.api import CPU_PROFILE, CpuProfile, CpuRow
from keystage.bundle.split import bundle_emulated
from keystage.controller.decisions import replay
from keystage.kubernetes.api import GATEWAY_MANAGER, spec_of
from keystage.kubernetes.client import FUNCTIONS, LEASES
from keystage.kubernetes.cores import quantity
from keystage.local.api import Deployment
from keystage.router.api import ReplicaStats, RouterStats, StageCounters
from keystage.wire.secret import create_secret

LEASE_S = 3


@pytest.fixture
def kube() -> Iterator[Kube]:
    made = Kube()
    made.start()
    made.nodes.add("node1")
    made.play()
    yield made
    made.stop()


class Controller:
    """A process with a health port of its own."""

    def __init__(self, kube: Kube, home: Path, **more: str) -> None:
        home.mkdir()
        key = home / "key"
        create_secret(key)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.home = home
        self.output = home / "log"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KEYSTAGE_")},
            "KEYSTAGE_BACKEND": "kubernetes",
            "KEYSTAGE_KUBECONFIG": str(kube.kubeconfig(home / "kubeconfig")),
            "KEYSTAGE_NAMESPACE": SYSTEM_NAMESPACE,
            "KEYSTAGE_FUNCTION_NAMESPACE": FUNCTION_NAMESPACE,
            "KEYSTAGE_WIRE_KEY_FILE": str(key),
            "KEYSTAGE_HOME": str(home / "state"),
            "KEYSTAGE_HEALTH_PORT": str(self.port),
            "KEYSTAGE_LEASE_S": str(LEASE_S),
            "KEYSTAGE_POD_PARKED": "0",
            **more,
        }
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "keystage.controller.app"], env=environment, stdout=out, stderr=out
            )

    def get(self, path: str) -> tuple[int, str]:
        """Status and body; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str) -> float | None:
        """One value of its metrics, None where there is none."""
        lines = self.get("/metrics")[1].splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(name)), None)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits."""
        self.process.send_signal(number)
        return self.process.wait(20)


@pytest.fixture
def start(kube: Kube, tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    made: list[Controller] = []

    def begin(name: str, **more: str) -> Controller:
        made.append(Controller(kube, tmp_path / name, **more))
        return made[-1]

    yield begin
    for controller in made:
        with contextlib.suppress(ProcessLookupError):
            controller.process.kill()
        controller.process.wait(20)
        print(controller.output.read_text(errors="replace")[-8000:])  # shown where the test failed


def deploy(
    kube: Kube,
    name: str,
    env: dict[str, str] | None = None,
    asked: dict[str, str] | None = None,
    **labels: str,
) -> None:
    deployment = Deployment(
        service=name, image="example/f:1", labels=labels, envVars=env or {}, requests=asked, limits=asked
    )
    spec = msgspec.to_builtins(spec_of(deployment))
    body = {"apiVersion": "keystage.dev/v1", "kind": "Function", "metadata": {"name": name}, "spec": spec}
    kube.cluster().apply(FUNCTIONS, name, body, manager=GATEWAY_MANAGER)


def status(kube: Kube, name: str) -> dict[str, Any]:
    return kube.get("functions", name).get("status", {})


def until(found: Callable[[], Any], what: str, timeout_s: float = 40.0) -> Any:
    end_s = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < end_s, f"not so in time: {what}"
        time.sleep(0.02)
    return value


@pytest.mark.slow
def test_it_steers_and_tells_its_health(kube: Kube, start: Callable[[str], Controller]) -> None:
    deploy(kube, "f", **{"com.openfaas.scale.min": "2"})
    controller = start("one")
    until(lambda: status(kube, "f").get("ready") == 2, "two replicas")
    assert status(kube, "f")["desired"] == 2
    assert controller.get("/healthz") == (200, "ok\n")
    assert controller.get("/readyz") == (200, "ok\n")
    assert controller.get("/nothing")[0] == 404
    assert controller.metric("keystage_leader") == 1
    assert controller.metric("keystage_view_age_seconds") is not None
    until(
        lambda: controller.metric('keystage_function_ready_replicas{function_name="f"}') == 2, "its metrics"
    )
    kube.patch("functions", "f", {"spec": {"replicas": 3}})
    until(lambda: status(kube, "f").get("desired") == 3, "what a person asked for")
    assert controller.end() == 0
    lease = kube.get("leases", "keystage-controller", SYSTEM_NAMESPACE)
    assert not lease["spec"].get("holderIdentity")
    count, differences = replay(controller.home / "state" / "decisions.jsonl")
    assert count > 0
    assert differences == []


def told(queue: int, arrivals: int) -> RouterStats:
    stage = StageCounters(
        stage=0, arrivals=arrivals, gap_sum_s=arrivals * 0.1, gap_sq_sum_s2=arrivals * 0.02, queue=queue,
        in_flight=1, waits=arrivals, wait_sum_s=0.0, services=arrivals, service_sum_s=arrivals * 0.05,
        service_sq_sum_s2=arrivals * 0.0025, sojourn_sum_s=arrivals * 0.06,
    )  # fmt: skip
    return RouterStats(
        "p", "i", time.monotonic(), time.time(), "single-pass", arrivals, arrivals, {}, 0, 0, [stage], []
    )


@pytest.mark.slow
def test_a_backlog_becomes_pods_at_the_sites_that_were_decided(
    kube: Kube, start: Callable[[str], Controller]
) -> None:
    kube.nodes.cordon("node1")
    kube.nodes.add("node2")
    common = {"KEYSTAGE_PIPELINE": "p", "KEYSTAGE_SLO": '{"deadline_s": 0.5}'}
    deploy(kube, "p", {**common, "KEYSTAGE_ROLE": "router"})
    device = "emulated:alpha=0,beta=0.05"
    stage = {**common, "KEYSTAGE_ROLE": "stage", "KEYSTAGE_STAGES": "0", "KEYSTAGE_MAX_BATCH": "1"}
    stage["KEYSTAGE_DEVICE"] = device
    deploy(kube, "p-stage-0", stage, **{"com.openfaas.scale.max": "4"})
    start("one")
    until(lambda: status(kube, "p-stage-0").get("ready") == 1, "a first worker")
    until(lambda: status(kube, "p").get("ready") == 1, "a router")
    (router,) = kube.list("pods", labels="keystage.dev/function=p")
    assert status(kube, "p-stage-0")["desired"] == 1
    arrivals = itertools.count(10)
    busy = {"GET /_/stats": lambda _: (200, msgspec.json.encode(told(400, next(arrivals))))}
    server = Answering(router["status"]["podIP"], 8080, busy)
    try:
        until(lambda: status(kube, "p-stage-0").get("ready") == 4, "four workers")
    finally:
        server.stop()
    pods = kube.list("pods", labels="keystage.dev/function=p-stage-0")
    assert {pod["spec"]["nodeName"] for pod in pods} == {"node2"}
    assert [pod["metadata"]["annotations"]["keystage.dev/site"] for pod in pods] == ["node2"] * 4


def told_lately(since_s: float, replica: str) -> RouterStats:
    """15 requests a second at one worker, 40 ms of service each."""
    items = int(15 * (time.monotonic() - since_s))
    stage = StageCounters(
        stage=0, arrivals=items, gap_sum_s=items / 15, gap_sq_sum_s2=2 * items / 225, queue=1, in_flight=1,
        waits=items, wait_sum_s=0.06 * items, services=items, service_sum_s=0.04 * items,
        service_sq_sum_s2=0.0016 * items, sojourn_sum_s=0.1 * items,
    )  # fmt: skip
    worker = ReplicaStats(replica, (0,), "ready", 1.0, 1, 1, [0.04 * items], [items], [items])
    return RouterStats(
        "p", "i", time.monotonic(), time.time(), "single-pass", items, items, {}, 0, 0, [stage], [worker]
    )


@pytest.mark.slow
def test_cores_are_given_in_place_where_the_profile_says_that_they_help(
    kube: Kube, start: Callable[[str], Controller], tmp_path: Path
) -> None:
    rows = [
        CpuRow(latency_s=0.01 + 0.03 / cores + 1e-5 * repeat, cores=cores)
        for cores in (0.5, 1.0, 1.5, 2.0)
        for repeat in range(3)
    ]
    bundle_emulated("p", 1, "single-pass", activation_bytes=64, context_length=0, out=tmp_path / "p")
    (tmp_path / "p" / CPU_PROFILE).write_bytes(msgspec.json.encode(CpuProfile(1, [rows])))
    common = {"KEYSTAGE_PIPELINE": "p", "KEYSTAGE_BUNDLE": f"file://{tmp_path}/p", "KEYSTAGE_MAX_BATCH": "1"}
    deploy(kube, "p", {**common, "KEYSTAGE_ROLE": "router", "KEYSTAGE_SLO": '{"deadline_s": 0.06}'})
    stage = {"KEYSTAGE_ROLE": "stage", "KEYSTAGE_STAGES": "0", "KEYSTAGE_DEVICE": "emulated:beta=0.04"}
    asked = {"cpu": "500m", "memory": "192Mi"}
    deploy(kube, "p-stage-0", {**common, **stage}, asked, **{"com.openfaas.scale.max": "1"})
    start("one")
    until(lambda: status(kube, "p").get("ready") == 1 == status(kube, "p-stage-0").get("ready"), "both")
    (router,) = kube.list("pods", labels="keystage.dev/function=p")
    (worker,) = kube.list("pods", labels="keystage.dev/function=p-stage-0")
    name, since_s = worker["metadata"]["name"], time.monotonic()
    busy = {"GET /_/stats": lambda _: (200, msgspec.json.encode(told_lately(since_s, name)))}
    threads = {"PUT /_/threads": lambda _: (204, b"")}
    servers = [
        Answering(router["status"]["podIP"], 8080, busy),
        Answering(worker["status"]["podIP"], 8080, threads),
    ]
    try:
        cores = until(lambda: status(kube, "p-stage-0").get("cores"), "the policy gives cores")
        assert cores > 0.5

        def limit() -> float:
            (container,) = kube.get("pods", name)["spec"]["containers"]
            return quantity(container["resources"]["limits"]["cpu"])

        until(lambda: limit() == status(kube, "p-stage-0")["cores"] > 0.5, "the pod is asked to have them")
        kube.kubelet.resize(name, "done")
        until(
            lambda: any(json.loads(body)["threads"] > 1 for body in servers[1].bodies("PUT /_/threads")),
            "threads",
        )
    finally:
        for server in servers:
            server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_another_takes_over_without_a_bump(
    kube: Kube, start: Callable[[str], Controller], number: int
) -> None:
    deploy(kube, "f", **{"com.openfaas.scale.min": "1", "com.openfaas.scale.max": "9"})
    first = start("one")
    until(lambda: first.metric("keystage_leader") == 1, "a leader")
    second = start("two")
    until(lambda: second.get("/readyz")[0] == 200, "a second one that sees")
    assert second.metric("keystage_leader") == 0
    kube.patch("functions", "f", {"spec": {"replicas": 4}})
    until(lambda: status(kube, "f").get("ready") == 4, "four replicas")
    kube.patch("functions", "f", {"spec": {"replicas": None}})
    until(lambda: not kube.get("functions", "f")["metadata"].get("annotations"), "no wish")
    before = {pod["metadata"]["uid"] for pod in kube.list("pods")}
    seen: list[int | None] = []
    first.end(number)

    def leads() -> bool:
        seen.append(status(kube, "f").get("desired"))
        return second.metric("keystage_leader") == 1

    until(leads, "the second one leads")
    decisions = second.home / "state" / "decisions.jsonl"
    until(lambda: decisions.exists() and decisions.read_bytes().count(b"\n") >= 8, "decisions of the second")
    assert set(seen) == {4}
    assert status(kube, "f")["desired"] == 4
    assert {pod["metadata"]["uid"] for pod in kube.list("pods")} == before
    assert second.get("/healthz")[0] == 200


SET_CLOCK = """
import os, time
read = time.time
def told():
    with open(os.environ["CLOCK_IS_AHEAD_S"]) as file:
        return read() + float(file.read())
time.time = told
"""


@pytest.mark.slow
@pytest.mark.parametrize("ahead_s", [-3 * 3600, 3 * 3600])
def test_its_machines_clock_may_be_set_by_hours(
    kube: Kube, start: Callable[..., Controller], tmp_path: Path, ahead_s: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SET_CLOCK)
    clock = tmp_path / "ahead"
    clock.write_text("0")
    deploy(kube, "f", **{"com.openfaas.scale.min": "2"})
    controller = start("one", PYTHONPATH=str(tmp_path), CLOCK_IS_AHEAD_S=str(clock))
    until(lambda: status(kube, "f").get("ready") == 2, "two replicas")
    before = {pod["metadata"]["uid"] for pod in kube.list("pods")}
    following = tmp_path / "following"  # replaced as a whole: it is read at every look at the clock
    following.write_text(str(ahead_s))
    following.replace(clock)
    end_s = time.time() + 6
    annotations = {"keystage.dev/override-until": f"{end_s:.3f}"}
    kube.patch("functions", "f", {"metadata": {"annotations": annotations}, "spec": {"replicas": 3}})
    until(lambda: status(kube, "f").get("ready") == 3, "what a person asked for")
    until(lambda: not kube.get("functions", "f")["metadata"].get("annotations"), "the wish ends")
    assert time.time() >= end_s - 1.5  # to the second, as the server's answers tell it
    assert {pod["metadata"]["uid"] for pod in kube.list("pods")} > before
    kube.delete("pods", min(pod["metadata"]["name"] for pod in kube.list("pods")))
    until(lambda: status(kube, "f").get("ready") == 3, "what is gone is replaced")
    assert controller.get("/healthz")[0] == 200
    assert controller.metric("keystage_leader") == 1


def test_who_loses_the_lease_ends_at_once(kube: Kube, start: Callable[[str], Controller]) -> None:
    deploy(kube, "f")
    controller = start("one")
    until(lambda: controller.metric("keystage_leader") == 1, "a leader")
    kube.patch("leases", "keystage-controller", {"spec": {"holderIdentity": "another"}}, SYSTEM_NAMESPACE)
    assert controller.process.wait(20) == 1
    assert "the lease is lost" in controller.output.read_text()
    assert kube.get("leases", "keystage-controller", SYSTEM_NAMESPACE)["spec"]["holderIdentity"] == "another"


def test_an_api_server_that_is_away_ends_nobody_who_stands_by(
    kube: Kube, start: Callable[[str], Controller]
) -> None:
    deploy(kube, "f")
    kube.cluster(SYSTEM_NAMESPACE).create(
        LEASES,
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": "keystage-controller"},
            "spec": {"holderIdentity": "another", "leaseDurationSeconds": 3600},
        },
        manager="another",
    )
    controller = start("one")
    until(lambda: controller.get("/readyz")[0] == 200, "it sees")
    with kube.outage():
        until(lambda: "grows old" in controller.output.read_text(), "it notices")
    assert controller.process.poll() is None
    deploy(kube, "g")
    until(
        lambda: controller.metric('keystage_function_ready_replicas{function_name="g"}') == 0, "it sees again"
    )
    assert controller.metric("keystage_leader") == 0
    assert status(kube, "f").get("desired") is None
    assert controller.end() == 0


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    environment = {**os.environ, "KEYSTAGE_BACKEND": "kubernetes", "KEYSTAGE_NAMESPACE": "keystage"}
    done = subprocess.run(
        [sys.executable, "-m", "keystage.controller.app"],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert b"KEYSTAGE_WIRE_KEY_FILE" in done.stderr
