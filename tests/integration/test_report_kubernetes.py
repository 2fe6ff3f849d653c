"""The report on Kubernetes: the leading controller tells every gateway, and a gateway takes the newest."""

from __future__ import annotations

import functools
import http.client
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.kube.cluster import FUNCTION_NAMESPACE, SYSTEM_NAMESPACE, Kube
from support.kube_platform import TOKEN, Answering, KubeWorld
from support.local_function import authorization
from support.processes import get, wait_for

from keystage.controller.telling import Telling
from keystage.kubernetes.api import GATEWAY_MANAGER, REPORT_PATH, spec_of
from keystage.kubernetes.asking import Asking, NotAnswered, internal_token
from keystage.kubernetes.client import FUNCTIONS, PODS
from keystage.kubernetes.gateway_reports import GatewayReports
from keystage.local.api import Deployment
from keystage.observability.api import REPORT_PATH as SERVED_PATH
from keystage.observability.api import Report
from keystage.wire.endpoints import listen
from keystage.wire.secret import create_secret

PUT = f"PUT {REPORT_PATH}"
WAIT_S = 60.0


def body(number: int, controller: str = "a", at_s: float | None = None) -> bytes:
    at_s = time.time() if at_s is None else at_s
    return msgspec.json.encode(Report(controller=controller, number=number, at_s=at_s))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KubeWorld]:
    made = KubeWorld(tmp_path)
    made.kube.nodes.add("node1")
    yield made
    made.close()
    made.platform.close()


def gateway(world: KubeWorld, name: str, answer: Callable[[bytes], tuple[int, bytes]]) -> Answering:
    labels = {"app.kubernetes.io/component": "gateway"}
    made = world.pod(name, namespace="keystage", node="node1", labels=labels)
    server = world.serve(made["status"]["podIP"], {PUT: answer})
    world.until(lambda: world.world.gateways().get(name, {}).get("status", {}).get("podIP"))
    return server


def taken(_: bytes) -> tuple[int, bytes]:
    return 200, b"ok\n"


def test_every_gateway_is_told_with_the_internal_token(world: KubeWorld) -> None:
    one, two = gateway(world, "g1", taken), gateway(world, "g2", taken)
    reports = GatewayReports(world.world, world.asking)
    reports.tell(body(1))
    world.until(lambda: one.bodies(PUT) and two.bodies(PUT))
    assert [token for what, _, token in one.asked + two.asked if what == PUT] == [f"Bearer {TOKEN}"] * 2
    three = gateway(world, "g3", taken)
    second = body(2)
    reports.tell(second)
    world.until(lambda: second in three.bodies(PUT) and second in one.bodies(PUT))
    reports.close()


def test_a_gateway_that_hangs_or_refuses_delays_no_other_and_is_told_again_later(
    world: KubeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()

    def hang(_: bytes) -> tuple[int, bytes]:
        go_on.wait(WAIT_S)
        return 200, b"ok\n"

    slow = gateway(world, "slow", hang)
    old = gateway(world, "old", lambda _: (405, b"it takes GET, HEAD\n"))
    well = gateway(world, "well", taken)
    reports = GatewayReports(world.world, world.asking)

    def told(server: Answering, number: int) -> bool:
        """Tells it, as often as it takes: who still answers the last report is passed over."""
        reports.tell(body(number))
        return any(msgspec.json.decode(b, type=Report).number == number for b in server.bodies(PUT))

    try:
        for number in range(1, 6):
            for server in (well, old):
                world.until(functools.partial(told, server, number))
        assert 1 <= len(slow.bodies(PUT)) < 5
        go_on.set()
        world.until(functools.partial(told, slow, 9))
    finally:
        go_on.set()
        reports.close()
    said = [r.getMessage() for r in caplog.records if "does not take reports" in r.getMessage()]
    assert len([text for text in said if "gateway old" in text]) == 1
    assert "answered 405: it takes GET, HEAD" in caplog.text


def test_gateways_that_are_gone_are_not_told(world: KubeWorld) -> None:
    server = gateway(world, "g1", taken)
    reports = GatewayReports(world.world, world.asking)
    telling = Telling("c", reports, every_s=0.0)
    telling.start()
    telling.hear(None, "cannot observe: a test")
    world.until(lambda: server.bodies(PUT))
    assert msgspec.json.decode(server.bodies(PUT)[0], type=Report).trouble == "cannot observe: a test"
    world.kube.cluster("keystage").delete(PODS, "g1", grace_s=0)
    world.until(lambda: not world.world.gateways())
    world.until(lambda: all(done.done() for done in reports._pending.values()))
    reports.tell(body(5))
    assert reports._pending == {}
    telling.stop()
    assert len(server.bodies(PUT)) == 1


# ------------------------------------------------------------------ real processes


class Cluster:
    """A gateway process at its pod's address, and a controller process, over a fake cluster."""

    def __init__(self, kube: Kube, folder: Path) -> None:
        self._kube, self._folder = kube, folder
        self._running: list[subprocess.Popen[bytes]] = []
        (folder / "basic-auth-user").write_text("admin")
        (folder / "basic-auth-password").write_text("password")
        create_secret(folder / "key")
        self.asking = Asking(internal_token(folder / "key"))
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KEYSTAGE_")},
            "KEYSTAGE_BACKEND": "kubernetes",
            "KEYSTAGE_NAMESPACE": SYSTEM_NAMESPACE,
            "KEYSTAGE_FUNCTION_NAMESPACE": FUNCTION_NAMESPACE,
            "KEYSTAGE_KUBECONFIG": str(kube.kubeconfig(folder / "kubeconfig")),
            "KEYSTAGE_WIRE_KEY_FILE": str(folder / "key"),
        }
        self.address = ""

    def start_gateway(self) -> None:
        """One that is ready."""
        labels = {"app.kubernetes.io/component": "gateway"}
        containers = [{"name": "gateway", "image": "i"}]
        made = self._kube.cluster(SYSTEM_NAMESPACE).create(
            PODS,
            {
                "metadata": {"name": "g", "labels": labels},
                "spec": {"nodeName": "node1", "containers": containers},
            },
            manager="test",
        )
        self._kube.kubelet.ready(made, ip=self._kube.kubelet.address())
        self.address = f"{self._kube.get('pods', 'g', SYSTEM_NAMESPACE)['status']['podIP']}:8080"
        listening = listen(self.address)
        env = {
            **self._env,
            "KEYSTAGE_CREDENTIALS": str(self._folder),
            "KEYSTAGE_HTTP": f"fd://{listening.fileno()}",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "keystage.gateway.app"], env=env, pass_fds=(listening.fileno(),)
        )
        listening.close()
        self._running.append(process)
        url = f"http://{self.address}/readyz"
        wait_for(lambda: process.poll() is not None or get(url)[0] == 200, "gateway ready")
        assert process.poll() is None

    def start_controller(self) -> subprocess.Popen[bytes]:
        """One that will lead."""
        home = self._folder / f"state-{len(self._running)}"
        env = {
            **self._env,
            "KEYSTAGE_HOME": str(home),
            "KEYSTAGE_HEALTH_PORT": "0",
            "KEYSTAGE_LEASE_S": "3",
            "KEYSTAGE_POD_PARKED": "0",
        }
        process = subprocess.Popen([sys.executable, "-m", "keystage.controller.app"], env=env)
        self._running.append(process)
        return process

    def put(self, report: bytes) -> None:
        """As the controller does."""
        self.asking.ask("PUT", self.address, REPORT_PATH, body=report, timeout_s=WAIT_S)

    def served(self) -> tuple[int, bytes]:
        """The report as an operator gets it."""
        request = urllib.request.Request(
            f"http://{self.address}{SERVED_PATH}", headers=authorization("admin", "password")
        )
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def until(self, condition: Callable[[Report], bool], what: str) -> Report:
        """Waits for a report."""

        def look() -> Report | None:
            status, content = self.served()
            if status == http.client.SERVICE_UNAVAILABLE:
                return None
            report = msgspec.json.decode(content, type=Report)
            return report if condition(report) else None

        found = wait_for(look, what)
        assert isinstance(found, Report)
        return found

    def stop(self) -> None:
        """Ends everything."""
        for process in self._running:
            process.kill()
            process.wait()
        self.asking.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Kube, Cluster]]:
    kube = Kube()
    kube.start()
    kube.nodes.add("node1")
    made = Cluster(kube, tmp_path)
    yield kube, made
    made.stop()
    kube.stop()


def refused(call: Callable[[], Any]) -> tuple[int, str]:
    with pytest.raises(NotAnswered) as caught:
        call()
    return caught.value.status, str(caught.value)


def test_a_gateway_takes_the_newest_from_who_bears_the_token(cluster: tuple[Kube, Cluster]) -> None:
    _, made = cluster
    made.start_gateway()
    assert made.served()[0] == http.client.SERVICE_UNAVAILABLE
    now_s = time.time()
    first, second = body(1, at_s=now_s), body(2, at_s=now_s + 1)
    made.put(second)
    made.put(first)  # late
    assert made.served() == (http.client.OK, second)
    made.put(body(70, "old", at_s=now_s - 1))
    assert made.served() == (http.client.OK, second)
    new = body(1, "new", at_s=now_s + 2)
    made.put(new)
    assert made.served() == (http.client.OK, new)
    ask = made.asking.ask
    assert refused(lambda: made.put(b"{}"))[0] == http.client.BAD_REQUEST
    assert refused(lambda: ask("GET", made.address, REPORT_PATH))[0] == http.client.METHOD_NOT_ALLOWED
    assert refused(lambda: ask("PUT", made.address, REPORT_PATH + "/x", body=new))[0] == http.client.NOT_FOUND
    stranger = Asking("no token")
    status, text = refused(lambda: stranger.ask("PUT", made.address, REPORT_PATH, body=body(9, "new")))
    stranger.close()
    assert (status, "internal token is missing or wrong" in text) == (http.client.UNAUTHORIZED, True)
    assert made.served() == (http.client.OK, new)


@pytest.mark.slow
def test_what_a_controller_decides_is_served_and_so_is_its_successors_word(
    cluster: tuple[Kube, Cluster],
) -> None:
    kube, made = cluster
    made.start_gateway()
    kube.play()
    first = made.start_controller()
    deployment = Deployment(service="f", image="example/f:1", labels={"com.openfaas.scale.min": "2"})
    spec = msgspec.to_builtins(spec_of(deployment))
    function = {"apiVersion": "keystage.dev/v1", "kind": "Function", "metadata": {"name": "f"}, "spec": spec}
    kube.cluster().apply(FUNCTIONS, "f", function, manager=GATEWAY_MANAGER)
    report = made.until(lambda r: any(f.ready == 2 for f in r.functions), "two replicas")
    assert report.trouble == ""
    kube.patch("functions", "f", {"spec": {"replicas": 3}})
    report = made.until(lambda r: any(f.desired == 3 for f in r.functions), "what a person asked for")
    assert "f: 2 -> 3, a person asked for 3" in [entry.text for entry in report.decisions]
    assert [node.node for node in report.nodes] == ["node1"]
    first.kill()
    made.start_controller()
    after = made.until(lambda r: r.controller != report.controller, "another controller's report")
    assert [function.desired for function in after.functions] == [3]
