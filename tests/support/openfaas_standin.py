"""A stand-in for a stock OpenFaaS gateway: it answers as the documented behaviour says.

It is no OpenFaaS: neither gateway nor provider may be copied, and they cannot run without a cluster. It was
written from the API's description and its known statuses (which write is answered 202 and which 200, what
the community edition refuses, clamps and drops without a word), so that clients meet those before users do.
Functions are real processes or imagined ones, as its `Runner` has it.
"""

from __future__ import annotations

import base64
import datetime as dt
import http.client
import http.server
import json
import threading
import time
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from keystage.local.api import Deployment

USER, PASSWORD = "admin", "open sesame"
EXPECTED = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
PROVIDERS = {
    "openfaas-ce": ("faas-netes-ce", "kubernetes"),
    "openfaas-pro": ("faas-netes", "kubernetes"),
    "faasd": ("faasd-ce", "containerd"),
}
PRIVATE = "registry.example/private/"
"""Images that cannot be pulled without credentials."""
MIN = "com.openfaas.scale.min"


class Runner(Protocol):
    """What runs the functions."""

    def start(self, deployment: Deployment, replicas: int) -> None: ...
    def scale(self, name: str, replicas: int) -> None: ...
    def remove(self, name: str) -> None: ...
    def available(self, name: str) -> int: ...
    def addresses(self, name: str) -> list[str]: ...
    def logs(self, name: str) -> list[str]: ...


class Imagined:
    """Replicas that are ready after a while, and answer nothing unless a test gives their addresses."""

    def __init__(self, lag_s: float = 0.05) -> None:
        self.lag_s = lag_s
        self.answering: dict[str, list[str]] = {}
        self._ready_at_s: dict[str, list[float]] = {}

    def start(self, deployment: Deployment, replicas: int) -> None:
        self._ready_at_s.setdefault(deployment.service, [])
        self.scale(deployment.service, replicas)

    def scale(self, name: str, replicas: int) -> None:
        kept = self._ready_at_s[name][:replicas]
        self._ready_at_s[name] = kept + [time.monotonic() + self.lag_s] * (replicas - len(kept))

    def remove(self, name: str) -> None:
        del self._ready_at_s[name]

    def available(self, name: str) -> int:
        return sum(at_s <= time.monotonic() for at_s in self._ready_at_s.get(name, ()))

    def addresses(self, name: str) -> list[str]:
        return self.answering.get(name, [])

    def logs(self, name: str) -> list[str]:
        return ["one", "two"]


class StandIn:
    """The gateway, listening on a port of its own.

    Attributes:
        url: its address.
        deployed: the functions' deployments as they were taken.
        replicas: wanted replicas by function.
        highest: the most that were stated, by function.
        secrets: names and values.
        asked: method and path of every request, oldest first.
        cache_s: numbers in lists may be as old as this, as those of a provider that reads from a cache.
    """

    def __init__(self, kind: str = "openfaas-ce", runner: Runner | None = None) -> None:
        self.kind = kind
        self.runner: Runner = runner if runner is not None else Imagined()
        self.deployed: dict[str, Deployment] = {}
        self.replicas: dict[str, int] = {}
        self.highest: dict[str, int] = {}
        self.secrets: dict[str, str] = {}
        self.asked: list[str] = []
        self.cache_s = 0.0
        self.lock = threading.RLock()
        self._cache: tuple[float, list[dict[str, Any]]] = (-1e9, [])
        self._turn = 0
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.world = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._is_up = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def is_ce(self) -> bool:
        return self.kind == "openfaas-ce"

    def end(self) -> None:
        if self._is_up:
            self._is_up = False
            self._server.shutdown()
            self._server.server_close()

    # ------------------------------------------------------------ what the provider does

    def listed(self) -> list[dict[str, Any]]:
        is_old = time.monotonic() - self._cache[0] >= self.cache_s
        if is_old or {told["name"] for told in self._cache[1]} != set(self.deployed):
            self._cache = (time.monotonic(), [self.status(name) for name in self.deployed])
        return self._cache[1]

    def status(self, name: str) -> dict[str, Any]:
        """A function's status; what is zero or empty is left out."""
        d = self.deployed[name]
        env = dict(d.envVars) | ({"fprocess": d.envProcess} if d.envProcess else {})
        told = {
            "name": name,
            "image": d.image,
            "namespace": "openfaas-fn",
            "envProcess": d.envProcess,
            "envVars": env,
            "secrets": d.secrets,
            "labels": {"faas_function": name, **d.labels},
            "annotations": {"prometheus.io.scrape": "false", **d.annotations},
            "limits": _amounts(d.limits, self.kind),
            "requests": _amounts(d.requests, self.kind),
            "replicas": self.replicas[name],
            "availableReplicas": self.runner.available(name),
        }
        created = dt.datetime.now(dt.UTC).isoformat()
        return {key: value for key, value in told.items() if value} | {"createdAt": created}

    def refusal(self, d: Deployment) -> str:
        """Why a deployment is refused before it is looked up."""
        if not d.image:
            return "validation failed: image: is required"
        if d.namespace not in ("", "openfaas-fn"):
            return "namespace must be: openfaas-fn"
        if not self.is_ce:
            return ""
        for label in ("zero-duration", "target", "type"):
            if f"com.openfaas.scale.{label}" in d.labels:
                return f"validation failed: com.openfaas.scale.{label} not available for Community Edition"
        if d.labels.get("com.openfaas.scale.zero") == "true":
            return "validation failed: com.openfaas.scale.zero not available for Community Edition"
        for label in ("max", "min"):
            if int(d.labels.get(f"com.openfaas.scale.{label}", "1")) > 5:
                return f"validation failed: com.openfaas.scale.{label} is set too high for Community Edition"
        if any("amazonaws.com" in a or "gke.io" in a for a in d.annotations):
            return "annotation is not supported in the Community Edition"
        if "," in d.annotations.get("topic", ""):
            return "the topic annotation may only support one value in the Community Edition"
        return ""

    def trouble(self, d: Deployment) -> str:
        """Why the cluster cannot take it: an update only logs this."""
        missing = [s for s in d.secrets if s not in self.secrets]
        if missing:
            return f"unable to fetch secrets: need to have the secret {missing[0]}"
        if self.is_ce and d.image.startswith(PRIVATE):
            return "the Community Edition license agreement only supports public images"
        return ""

    def create(self, d: Deployment) -> tuple[int, str]:
        refused = self.refusal(d) or self.trouble(d)
        if refused:
            return 400, refused
        if self.kind != "openfaas-pro" and len(self.deployed) + 1 > 15:
            return 400, "unable to create function, maximum: 15"
        if d.service in self.deployed:
            return 500, f'unable create Deployment: deployments.apps "{d.service}" already exists'
        self.deployed[d.service] = d
        self.replicas[d.service] = 1 if self.kind == "faasd" else max(1, int(d.labels.get(MIN, "1")))
        self.runner.start(d, self.replicas[d.service])
        return (200 if self.kind == "faasd" else 202), ""

    def update(self, d: Deployment) -> tuple[int, str]:
        refused = self.refusal(d)
        if refused:
            return 400, refused
        if d.service not in self.deployed:
            return 404, f"unable update Deployment: {d.service}.openfaas-fn, error: not found"
        if self.trouble(d):
            return 200, ""  # written to the provider's log, and nowhere else
        self.deployed[d.service] = d
        if self.kind != "faasd" and int(d.labels.get(MIN, "0")) > 0:
            self.replicas[d.service] = int(d.labels[MIN])
        self.runner.start(d, self.replicas[d.service])
        return (200 if self.kind == "faasd" else 202), ""

    def delete(self, name: str) -> tuple[int, str]:
        if name not in self.deployed:
            return 404, f'deployments.apps "{name}" not found'
        del self.deployed[name], self.replicas[name]
        self.runner.remove(name)
        return 202, ""

    def scale(self, name: str, replicas: int) -> tuple[int, str]:
        if self.kind != "openfaas-pro":
            replicas = max(1, min(5, replicas))  # by the gateway, without a word
        if name not in self.deployed:
            if self.kind == "faasd":
                return 404, f"service {name} not found"
            return 500, f"Unable to lookup function deployment {name}"
        if self.kind != "faasd":
            self.replicas[name] = replicas
            self.highest[name] = max(replicas, self.highest.get(name, 0))
            self.runner.scale(name, replicas)
        return 202, ""

    def change_secret(self, method: str, name: str, value: str) -> tuple[int, str]:
        exists = name in self.secrets
        if method == "POST" and exists:
            return 409, ""
        if method != "POST" and not exists:
            return 404, ""
        if method == "DELETE":
            del self.secrets[name]
        else:
            self.secrets[name] = value
        return 202, ""

    def address(self, name: str) -> str | None:
        """One replica; every next request gets the next one."""
        found = self.runner.addresses(name)
        self._turn += 1
        return found[self._turn % len(found)] if found else None


def _amounts(amounts: dict[str, str] | None, kind: str) -> dict[str, str]:
    """Resources that are kept: others vanish."""
    kept = (amounts or {}).items()
    return {k: v for k, v in kept if kind == "openfaas-pro" or k in ("cpu", "memory")}


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 1024
    world: StandIn


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: _Server

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        first, _, rest = parts.path.lstrip("/").partition("/")
        self.server.world.asked.append(f"{self.command} {parts.path}")
        if first == "function":
            self._invoke(rest, body)
        elif self.headers.get("Authorization") != EXPECTED:
            self._answer(401, b"invalid credentials\n")
        else:
            with self.server.world.lock:
                self._system(rest, {k: v[0] for k, v in parse_qs(parts.query).items()}, body)

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815  (names fixed by the base class)

    def _system(self, path: str, query: dict[str, str], body: bytes) -> None:
        what, _, name = path.partition("/")
        name = unquote(name)
        if (self.command, what) == ("GET", "info"):
            provider, orchestration = PROVIDERS[self.server.world.kind]
            version = {"release": "0.18.17", "sha": "0"}
            told = {"provider": provider, "orchestration": orchestration, "version": version}
            self._json({"provider": told, "version": version, "arch": "x86_64"})
        elif what == "namespaces":
            self._json(["openfaas-fn"])
        elif (self.command, what) == ("GET", "functions"):
            self._json(self.server.world.listed() or None)
        elif what == "function":
            self._json(
                self.server.world.status(name)
            ) if name in self.server.world.deployed else self._answer(404, b"")
        elif what == "logs":
            lines = self.server.world.runner.logs(query["name"])[-int(query.get("tail") or "100") :]
            at = dt.datetime.now(dt.UTC).isoformat()
            told_lines = [{"name": query["name"], "instance": "x", "timestamp": at, "text": t} for t in lines]
            self._answer(200, b"".join(json.dumps(line).encode() + b"\n" for line in told_lines))
        elif (self.command, what) == ("GET", "secrets"):
            self._json([{"name": s, "namespace": "openfaas-fn"} for s in self.server.world.secrets])
        else:
            self._change(what, name, json.loads(body))

    def _change(self, what: str, name: str, told: dict[str, Any]) -> None:
        status, text = 404, "404 page not found"
        if what == "scale-function":
            status, text = self.server.world.scale(name, told["replicas"])
        elif what == "secrets":
            status, text = self.server.world.change_secret(self.command, told["name"], told.get("value", ""))
        elif what == "functions" and self.command == "DELETE":
            status, text = self.server.world.delete(told["functionName"])
        elif what == "functions":
            deployment = msgspec.convert(told, Deployment)
            do = self.server.world.create if self.command == "POST" else self.server.world.update
            status, text = do(deployment)
        self._answer(status, text.encode())

    def _invoke(self, rest: str, body: bytes) -> None:
        name, _, path = rest.partition("/")
        with self.server.world.lock:
            address = self.server.world.address(unquote(name).removesuffix(".openfaas-fn"))
        if address is None:
            self._answer(503, f"No endpoints available for: {name}.".encode())
            return
        connection = http.client.HTTPConnection(address, timeout=20)
        try:
            connection.request(self.command, "/" + path, body or None)
            answer = connection.getresponse()
            self._answer(answer.status, answer.read())
        except OSError:
            self._answer(502, b"")
        finally:
            connection.close()

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
