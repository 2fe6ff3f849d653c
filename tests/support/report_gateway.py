"""A stand-in for Keystage's gateway of a given clock, version and report: no real one is wrong at will."""

from __future__ import annotations

import base64
import http.server
import json
import threading
import time
from typing import Any

from support.reports import encoded, report

from keystage.observability.api import EVENTS_PATH, REPORT_PATH, Report

USER, PASSWORD = "admin", "open sesame"
EXPECTED = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


class ReportGateway:
    """The gateway, listening on a port of its own.

    Attributes:
        url: its address.
        version: release it says it is.
        ahead_s: how far its clock, and its controller's, are ahead.
        fixed: the report; None: a new one at every question, looked at now.
        refusal: status and text in place of the report, None for none.
        functions: what GET /system/functions tells.
        asked: paths, oldest first.
    """

    def __init__(self) -> None:
        self.version = "0.1.0"
        self.ahead_s = 0.0
        self.fixed: Report | None = None
        self.refusal: tuple[int, str] | None = None
        self.functions: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self._number = 0
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.world = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def now_s(self) -> float:
        return time.time() + self.ahead_s

    def report(self) -> Report:
        if self.fixed is not None:
            return self.fixed
        self._number += 1
        return report(at_s=self.now_s(), number=self._number, version=self.version)


class _Server(http.server.ThreadingHTTPServer):
    world: ReportGateway


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: _Server

    def do_GET(self) -> None:
        world = self.server.world
        world.asked.append(self.path)
        if self.path == "/healthz":
            self._answer(200, b"ok\n")
        elif self.headers.get("Authorization") != EXPECTED:
            self._answer(401, b"invalid credentials\n")
        elif self.path == "/system/info":
            version = {"release": world.version, "sha": "0"}
            provider = {"provider": "keystage-local", "orchestration": "keystage", "version": version}
            self._answer(200, json.dumps({"provider": provider, "version": version, "arch": "x"}).encode())
        elif self.path == "/system/functions":
            self._answer(200, json.dumps(world.functions).encode())
        elif self.path in (REPORT_PATH, EVENTS_PATH) and world.refusal is not None:
            self._answer(world.refusal[0], world.refusal[1].encode())
        elif self.path == REPORT_PATH:
            self._answer(200, encoded(world.report()))
        elif self.path == EVENTS_PATH:
            clock = b'retry: 1000\nevent: clock\ndata: {"now_s":%.3f}\n\n' % world.now_s()
            self._answer(200, clock + b"event: report\nid: x/1\ndata: %b\n\n" % encoded(world.report()))
        else:
            self._answer(404, b"not found\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
