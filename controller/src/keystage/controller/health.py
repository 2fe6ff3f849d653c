"""The controller's own HTTP port on a cluster: is it alive, does it see, and its metrics.

Before it: `clustered`. After it: the kubelet's probes, and Prometheus. It answers from memory, on threads of
its own, so that neither a busy loop nor a slow client holds up the other. It must tell nothing secret: there
is no password on it.
"""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable

TIMEOUT_S = 5.0
"""Of one client's silence."""
TEXT = "text/plain; charset=utf-8"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HealthServer:
    """Serves `/healthz`, `/readyz` and `/metrics`.

    Args:
        port: of all addresses, 0: any free one.
        ill: why this process should be started anew, empty while it is well.
        unready: why it is not to be counted on now, empty while it is.
        metrics: Prometheus text.
    """

    def __init__(
        self, port: int, ill: Callable[[], str], unready: Callable[[], str], metrics: Callable[[], bytes]
    ) -> None:
        def state(why: str) -> tuple[int, bytes, str]:
            return (503, f"{why}\n".encode(), TEXT) if why else (200, b"ok\n", TEXT)

        answers: dict[str, Callable[[], tuple[int, bytes, str]]] = {
            "/healthz": lambda: state(ill()),
            "/readyz": lambda: state(unready()),
            "/metrics": lambda: (200, metrics(), METRICS_TYPE),
        }

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = TIMEOUT_S

            def do_GET(self) -> None:
                """One answer (the name is the base class')."""
                answer = answers.get(self.path.partition("?")[0])
                status, body, kind = answer() if answer is not None else (404, b"not found\n", TEXT)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Probes come every second: nothing is logged."""

        self._server = http.server.ThreadingHTTPServer(("", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="health", daemon=True
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Ends; connections in progress are left to their threads."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
