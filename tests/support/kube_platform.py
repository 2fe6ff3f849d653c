"""A platform over the fake cluster, and pods that answer over HTTP, for tests."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from support.kube.cluster import Kube

from keystage.controller.platforms.bundles import Bundles
from keystage.controller.platforms.kubernetes import KubernetesPlatform
from keystage.kubernetes.api import (
    GATEWAY_MANAGER,
    OVERRIDE_UNTIL_ANNOTATION,
    SCALE_MANAGER,
    WAKE_ANNOTATION,
    spec_of,
)
from keystage.kubernetes.asking import Asking
from keystage.kubernetes.client import FUNCTIONS, PODS, Object
from keystage.kubernetes.gateway_loads import GatewayLoads
from keystage.kubernetes.resize import Resizer
from keystage.kubernetes.view import record_of
from keystage.kubernetes.wishes import Wishes
from keystage.kubernetes.world import World
from keystage.local.api import Deployment, FunctionRecord, Intent
from keystage.router.api import RouterStats

TOKEN = "t0ken"
Answer = Callable[[bytes], tuple[int, bytes]]
"""Of a request's body."""


class Answering:
    """An HTTP server at one loopback address.

    Args:
        address: its IP.
        port: its port.
        answers: by `METHOD path`.

    Attributes:
        asked: requests so far: method and path, body, bearer token.
    """

    def __init__(self, address: str, port: int, answers: Mapping[str, Answer]) -> None:
        self.asked: list[tuple[str, bytes, str]] = []
        self.answers = dict(answers)
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                what = f"{self.command} {self.path}"
                outer.asked.append((what, body, self.headers.get("Authorization", "")))
                answer = outer.answers.get(what)
                status, text = answer(body) if answer is not None else (404, b"")
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_PUT = do_POST = _answer  # noqa: N815  (names of the base class)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer((address, port), Handler)
        self._server.daemon_threads = True
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def bodies(self, what: str) -> list[bytes]:
        """Bodies of the requests `METHOD path`, the first one first."""
        return [body for asked, body, _ in self.asked if asked == what]

    def stop(self) -> None:
        """Ends."""
        self._server.shutdown()
        self._server.server_close()


def answer(value: Any) -> Answer:
    """Always the same JSON."""
    return lambda _: (200, msgspec.json.encode(value))


class KubeWorld:
    """The platform alone over a fake cluster (a `World` of the platform contract).

    What the reconciler would write stays a wish here: the platform shows it all the same.
    """

    has_intents = True

    def __init__(self, folder: Path) -> None:
        self.kube = Kube()
        self.kube.start()
        self._client = self.kube.cluster()
        self.world = World(self._client, self.kube.cluster("keystage"), watch_s=1.0)
        self.wishes = Wishes()
        self.asking = Asking(TOKEN)
        self.loads = GatewayLoads(self.world, self.asking)
        self.said: list[str] = []
        self.resizer = Resizer(
            self.world,
            self.asking,
            self.wishes.set_cores,
            lambda _, text: self.said.append(text),
            default_requests={"cpu": "100m"},
        )
        self.statuses: dict[str, Any] = {}
        self.bundles = Bundles(folder / "bundles")
        self.platform = KubernetesPlatform(
            self.world,
            self.wishes,
            self.loads,
            lambda: self.statuses,
            self.resizer.capped,
            self.bundles,
            default_requests={"cpu": "100m"},
            stale_s=3.0,
        )
        self.servers: list[Answering] = []
        self.world.start()
        assert self.world.wait_synced(10)
        self.loads.start()

    # ------------------------------------------------------------ the contract's world

    def deploy(self, deployment: Deployment) -> None:
        """As the gateway does, which asks for an image."""
        deployment = msgspec.structs.replace(deployment, image=deployment.image or "example/function:1")
        body = {
            "apiVersion": "keystage.dev/v1",
            "kind": "Function",
            "metadata": {"name": deployment.service},
            "spec": msgspec.to_builtins(spec_of(deployment)),
        }
        self._seen(self._client.apply(FUNCTIONS, deployment.service, body, manager=GATEWAY_MANAGER))

    def intend(self, function: str, intent: Intent) -> None:
        """As the gateway does."""
        annotations: dict[str, str | None] = {}
        patch: Object = {"metadata": {"annotations": annotations}}
        if intent.wake is not msgspec.UNSET:
            annotations[WAKE_ANNOTATION] = f"{time.time():.3f}" if intent.wake else None
        if isinstance(intent.override, msgspec.UnsetType):
            pass
        elif intent.override is None:
            patch["spec"] = {"replicas": None}
        else:
            patch["spec"] = {"replicas": intent.override.replicas}
            annotations[OVERRIDE_UNTIL_ANNOTATION] = f"{intent.override.expires_at_s:.3f}"
        self._seen(self._client.patch(FUNCTIONS, function, patch, manager=SCALE_MANAGER))

    def record(self, function: str) -> FunctionRecord:
        """As decided."""
        wish = self.wishes.read().functions.get(function)
        record = record_of(self.world.functions()[function])
        return msgspec.structs.replace(record, desired=wish.replicas if wish is not None else record.desired)

    def end(self) -> None:
        """The API server is gone, and the view grew old."""
        self.kube.stop()
        self._until(lambda: self.world.age_s() > 3.0)

    def close(self) -> None:
        """Ends everything."""
        for server in self.servers:
            server.stop()
        self.loads.stop()
        self.world.stop()
        self.asking.close()
        self.kube.stop()

    # ------------------------------------------------------------ for tests

    def until(self, found: Callable[[], Any], what: str = "") -> Any:
        """Waits until something is so; gives its value."""
        return self._until(found, what)

    def pod(
        self, name: str, *, ready: bool = True, namespace: str = "", ip: str = "", **fields: Any
    ) -> Object:
        """Makes a pod, runs it, and waits until it is seen. Labels: `labels={...}`, `resources={...}`."""
        body: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": fields.get("labels", {})},
            "spec": {
                "containers": [{"name": "function", "image": "i", "resources": fields.get("resources", {})}],
                **({"nodeName": fields["node"]} if "node" in fields else {}),
            },
        }
        where = self.kube.cluster(namespace) if namespace else self._client
        made = where.create(PODS, body, manager="test")
        (self.kube.kubelet.ready if ready else self.kube.kubelet.run)(
            made, ip=ip or self.kube.kubelet.address()
        )
        return self.kube.get("pods", name, where.namespace)

    def serve(self, address: str, answers: Mapping[str, Answer], port: int = 8080) -> Answering:
        """Answers at a pod's address."""
        self.servers.append(Answering(address, port, answers))
        return self.servers[-1]

    def router(self, name: str, stats: RouterStats) -> Answering:
        """A router's pod that tells statistics."""
        labels = {"keystage.dev/function": name, "keystage.dev/role": "router"}
        made = self.pod(f"{name}-router", labels=labels)
        server = self.serve(made["status"]["podIP"], {"GET /_/stats": answer(stats)})
        self._until(lambda: self.world.pods().get(f"{name}-router", {}).get("status", {}).get("podIP"))
        return server

    def _seen(self, obj: Object) -> None:
        name, version = obj["metadata"]["name"], int(obj["metadata"]["resourceVersion"])
        self._until(
            lambda: (
                int(self.world.functions().get(name, {}).get("metadata", {}).get("resourceVersion", 0))
                >= version
            )
        )

    def _until(self, found: Callable[[], Any], what: str = "") -> Any:
        end_s = time.monotonic() + 15
        while not (value := found()):
            assert time.monotonic() < end_s, f"not so in time: {what or found}"
            time.sleep(0.01)
        return value
