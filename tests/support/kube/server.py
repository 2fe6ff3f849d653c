"""The HTTP face of the fake API server: real sockets, JSON bodies, chunked watches, discovery.

It may be taken away and brought back on the same port while the objects stay: an API server that restarts.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.kube.access import Access
from support.kube.answers import Object, Refused
from support.kube.discovery import discovered
from support.kube.faults import Faults
from support.kube.forms import in_form
from support.kube.metrics import GROUP as METRICS_GROUP
from support.kube.metrics import Metrics
from support.kube.pod_logs import PodLogs
from support.kube.registry import Registry
from support.kube.requests import Asking, read
from support.kube.routing import REVIEWS, Routing
from support.kube.watching import Broken, checked, events

BOOKMARK_S = 1.0
"""The real one sends bookmarks about once a minute."""


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, port: int, face: Face) -> None:
        self.face = face
        self.connections: set[socket.socket] = set()
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.lock:
            self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections may break at any time: clients are killed, outages are asked for."""

    def cut(self) -> None:
        """Breaks every connection."""
        with self.lock:
            for connection in self.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class Face:
    """Listens and answers.

    Args:
        registry: objects.
        access: who may do what.
        faults: what goes wrong.
        logs: output of pods.
        metrics: use of pods.
    """

    def __init__(
        self, registry: Registry, access: Access, faults: Faults, logs: PodLogs, metrics: Metrics
    ) -> None:
        self.registry, self.access, self.faults, self.metrics = registry, access, faults, metrics
        self.routing = Routing(registry, access, logs, metrics)
        self.bookmark_s = BOOKMARK_S
        self.port = 0
        self.errors: list[BaseException] = []
        """Bugs of the fake itself; a fixture fails the test if there are any."""
        self._listener: _Listener | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listens; on the same port as before, if there was one."""
        self._listener = _Listener(self.port, self)
        self.port = self._listener.server_port
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=(0.05,), name="fake-apiserver", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Listens no more; every connection breaks."""
        if self._listener is None or self._thread is None:
            return
        self._listener.shutdown()
        self._listener.server_close()
        self._listener.cut()
        self._thread.join(5)
        self._listener = None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Listener

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
        """Nothing is printed."""

    def _serve(self) -> None:
        face = self.server.face
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            asking = read(self.command, self.path)
            user = face.access.user(self.headers.get("Authorization", ""))
            asked = asking.asked()
            face.faults.before(asking.verb, asked.resource)
            if asking.plural not in REVIEWS:
                face.access.check(user, asked)
            if asking.verb == "watch":
                self._watch(asking)
                return
            if asking.plural:
                content = self.headers.get("Content-Type", "").partition(";")[0].strip()
                agent = self.headers.get("User-Agent", "")
                status, body = face.routing.answer(asking, user, raw, content, agent)
                if isinstance(body, dict):
                    body = in_form(self.headers.get("Accept", ""), body)
            else:
                if asking.path.startswith(f"/apis/{METRICS_GROUP}"):
                    face.metrics.check()
                status, body = 200, discovered(asking.path, face.registry.resources())
        except Refused as refused:
            status, body = refused.code, refused.body()
        except OSError:
            raise
        except BaseException as error:
            face.errors.append(error)
            raise
        self._send(status, body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815  (the base class's names)

    def _send(self, status: int, body: Object | bytes) -> None:
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(body, bytes) else "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(encoded)
        self.wfile.flush()

    def _watch(self, asking: Asking) -> None:
        face = self.server.face
        resource = face.registry.resource(asking.group, asking.version, asking.plural)
        stream = events(face.registry.store, resource, asking, face.faults, face.bookmark_s, self._is_gone)
        checked(resource, asking)  # a refusal comes before the head
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        try:
            for event in stream:
                self._chunk(event)
            self.wfile.write(b"0\r\n\r\n")
            self.wfile.flush()
        except Broken:
            self.close_connection = True

    def _chunk(self, event: Object) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
        self.wfile.flush()

    def _is_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
