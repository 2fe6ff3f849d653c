"""A reconciler over the fake cluster, with pods that really answer on their addresses.

Parked pods speak the protocol of `keysmanager.pod_face`: they take one activation, refuse a second one with
409, and are told apart by `/_/ready`. No Keystage worker runs in them.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
from support.kube.cluster import FUNCTION_NAMESPACE, SYSTEM_NAMESPACE, Kube

from keystage.keysmanager.pod_api import ACTIVATE_PATH, Activated, Activation
from keystage.kubernetes.api import FUNCTION_LABEL, POOL_LABEL, FunctionSpec, spec_of
from keystage.kubernetes.asking import Asking
from keystage.kubernetes.client import FUNCTIONS, Cluster
from keystage.kubernetes.manifests import Settings
from keystage.kubernetes.pod_starts import PodStarts
from keystage.kubernetes.reconciler import Links, Reconciler
from keystage.kubernetes.view import is_leaving, is_ready, labels_of, name_of, state_of
from keystage.kubernetes.wishes import Wishes
from keystage.kubernetes.world import World
from keystage.local.api import Deployment

TOKEN = "of-this-release"
Object = dict[str, Any]
SETTINGS = Settings(namespace=SYSTEM_NAMESPACE, function_namespace=FUNCTION_NAMESPACE, parked_per_pipeline=0)


def stage(index: int = 0, *, image: str = "stage:1", **env: str) -> Deployment:
    """Stage `index` of pipeline `llm`."""
    variables = {
        "KEYSTAGE_ROLE": "stage",
        "KEYSTAGE_PIPELINE": "llm",
        "KEYSTAGE_BUNDLE": "file:///bundles/llm",
        "KEYSTAGE_STAGES": str(index),
        **env,
    }
    return Deployment(service=f"llm-stage-{index}", image=image, envVars=variables)


def router(**env: str) -> Deployment:
    """The router of pipeline `llm`."""
    variables = {
        "KEYSTAGE_ROLE": "router",
        "KEYSTAGE_PIPELINE": "llm",
        "KEYSTAGE_BUNDLE": "file:///bundles/llm",
    }
    return Deployment(service="llm", image="router:1", envVars={**variables, **env})


class ParkedPod:
    """The HTTP face of one pod."""

    def __init__(self, address: str) -> None:
        self.activations: list[Activation] = []
        self.delay_s = 0.0
        self.refusal = ""
        self.is_serving = False
        pod = self

        class Face(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = b"ready" if pod.is_serving else json.dumps({"parked": True}).encode()
                self._answer(200, body)

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(*pod.activate(self.path, self.headers.get("Authorization", ""), text))

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer((address, 8080), Face)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def activate(self, path: str, credentials: str, body: bytes) -> tuple[int, bytes]:
        """Answers an activation."""
        if path != ACTIVATE_PATH or credentials != f"Bearer {TOKEN}":
            return 401, b"who are you?"
        if self.activations:
            return 409, b"activated before"
        self.activations.append(msgspec.json.decode(body, type=Activation))
        if self.delay_s:
            threading.Event().wait(self.delay_s)
        if self.refusal:
            return 500, self.refusal.encode()
        self.is_serving = True
        return 200, msgspec.json.encode(Activated(via="standby", source="memory"))

    def stop(self) -> None:
        """Ends."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class ReconcilerWorld:
    """Everything around one reconciler.

    Args:
        kube: the fake cluster.
        settings: of pods.
        service_account: whose rights the reconciler has, empty: all.
    """

    def __init__(self, kube: Kube, settings: Settings = SETTINGS, service_account: str = "") -> None:
        self.kube = kube
        self.settings = settings
        self.cluster: Cluster = kube.cluster()
        self.world = World(
            kube.cluster(FUNCTION_NAMESPACE, service_account),
            kube.cluster(SYSTEM_NAMESPACE, service_account),
        )
        self.wishes = Wishes()
        self.requests: dict[str, int | None] = {}
        self.parameter_bytes: int | None = 0
        self.faces: dict[str, ParkedPod] = {}
        self.on_face: Callable[[ParkedPod], None] = lambda face: None
        self.crashes: list[BaseException] = []
        self.asking = Asking(TOKEN)
        self.starts = PodStarts()
        self.reconciler = self.leader()
        kube.players.is_ready = self._probe

    def leader(self) -> Reconciler:
        """A new one, with wishes of its own."""
        self.wishes = Wishes()
        links = Links(
            asking=self.asking,
            requests_on=lambda function, replica, since_s: self.requests.get(replica, 0),
            parameter_bytes=lambda deployment: self.parameter_bytes,
            starts=self.starts,
        )
        return Reconciler(
            self.world,
            self.wishes,
            self.settings,
            links,
            identity="controller-0",
            on_crash=self.crashes.append,
        )

    def start(self) -> None:
        """Informers, then the reconciler."""
        self.world.start()
        assert self.world.wait_synced(10.0)
        self.reconciler.start()

    def replace_leader(self) -> None:
        """The leader ends; another one takes over."""
        self.reconciler.stop()
        self.reconciler = self.leader()
        self.reconciler.start()

    def stop(self) -> None:
        """Ends everything; a bug that ended the reconciler comes out here."""
        self.reconciler.stop()
        self.kube.players.stop()  # no pod comes up any longer
        self.world.stop()
        self.asking.close()
        for face in self.faces.values():
            face.stop()
        for error in self.crashes:
            raise error

    def deploy(self, *deployments: Deployment) -> None:
        """As the gateway writes them."""
        for deployment in deployments:
            spec = msgspec.to_builtins(spec_of(deployment))
            body = {
                "apiVersion": "keystage.dev/v1",
                "kind": "Function",
                "metadata": {"name": deployment.service},
                "spec": spec,
            }
            self.cluster.apply(FUNCTIONS, deployment.service, body, manager="keystage-gateway")

    def pods(self, function: str) -> list[Object]:
        """A function's pods that stay."""
        found = self.kube.list("pods", labels=f"{FUNCTION_LABEL}={function}")
        return [pod for pod in found if not is_leaving(pod)]

    def parked(self) -> list[Object]:
        """Parked pods that stay."""
        found = self.kube.list("pods", labels=POOL_LABEL)
        return [p for p in found if FUNCTION_LABEL not in labels_of(p) and not is_leaving(p)]

    def ready(self, function: str) -> list[Object]:
        """Those that serve."""
        return [pod for pod in self.pods(function) if state_of(pod) == "ready"]

    def status(self, function: str) -> Mapping[str, Any]:
        """As the custom resource has it."""
        return self.kube.get("functions", function).get("status") or {}

    def events(self, function: str) -> list[str]:
        """`reason: message` of every event on a function."""
        found = self.kube.list("events")
        mine = [event for event in found if event["involvedObject"]["name"] == function]
        return [f"{event['reason']}: {event['message']}" for event in mine]

    def until_ready(self, function: str, count: int, timeout_s: float = 30.0) -> list[Object]:
        """Waits until so many serve and no more are there, and the reconciler sees that.

        The policy looks through the same informers. A wish that names a victim before they show what the
        cluster has is another one: pods that do not serve yet, as far as is seen, go before all victims.
        """

        def found() -> list[Object] | bool:
            ready = self.ready(function)
            is_so = len(ready) == len(self.pods(function)) == count
            is_seen = self._seen(function) == {name_of(pod): "ready" for pod in ready}
            return (ready or True) if is_so and is_seen else False

        ready = self.kube.until(found, timeout_s=timeout_s, what=f"{count} of {function} are ready and seen")
        return ready if isinstance(ready, list) else []

    def until_parked(self, count: int) -> list[Object]:
        """Waits until so many are parked and can be activated at once, and the reconciler sees that."""

        def found() -> list[Object]:
            parked = self.parked()
            seen = {name for name, pod in self.world.pods().items() if is_ready(pod)}
            is_so = all(is_ready(pod) and name_of(pod) in seen for pod in parked)
            return parked if is_so and len(parked) == count else []

        return self.kube.until(found, what=f"{count} are parked and seen")

    def _seen(self, function: str) -> dict[str, str]:
        """States of a function's pods that stay, as the reconciler's informer has them."""
        pods = self.world.pods().items()
        mine = {name: pod for name, pod in pods if labels_of(pod).get(FUNCTION_LABEL) == function}
        return {name: state_of(pod) for name, pod in mine.items() if not is_leaving(pod)}

    def _probe(self, pod: Object) -> bool:
        name, address = pod["metadata"]["name"], pod["status"]["podIP"]
        if POOL_LABEL in labels_of(pod) and name not in self.faces:
            self.faces[name] = ParkedPod(address)
            self.on_face(self.faces[name])
        return True


def spec_replicas(kube: Kube, function: str) -> int | None:
    """A person's wish as it stands."""
    return msgspec.convert(kube.get("functions", function)["spec"], FunctionSpec).replicas


@pytest.fixture(name="world")
def world_fixture(kube: Kube) -> Iterator[ReconcilerWorld]:
    """Two nodes that play by themselves, and a reconciler; to be started."""
    for name in ("node1", "node2"):
        kube.nodes.add(name, cpu="8")
    made = ReconcilerWorld(kube)
    kube.play(start_s=0.02, ready_s=0.02, stop_s=0.02)
    try:
        yield made
    finally:
        made.stop()
