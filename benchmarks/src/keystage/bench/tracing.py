"""`keystage bench tracing`: CPU seconds per request of the router, with metrics and with traces, on and off.

Three pipelines of eight emulated zero-time stages stand side by side, alike but for what their routers note
of requests: nothing beyond what the controller needs (`KEYSTAGE_METRICS=0`), metrics that are scraped every
second, and traces of every request besides, sent to a collector that reads and forgets them. A round asks
each of them in turn for the same streams, every other round in the opposite order, so that a drift of the
machine meets all alike; a figure is the ratio of two routers' CPU per request in one round. Who waits costs
nothing: the other pipelines' processes are not the ones that are measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from keystage.bench.client import ClientReport, closed_loop
from keystage.bench.frame import BenchResult, Figure
from keystage.bench.router import (
    ACTIVATION_BYTES,
    CONCURRENCY,
    REQUEST_BYTES,
    STAGES,
    TOKENS,
    WAVES,
    body,
    cpu_s,
)
from keystage.bench.sender_target import running
from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

ROUNDS = 36
ROUND_S = 2.0
"""Short and many: two equal routers differ by 5 % from one moment of such a machine to the next."""
SCRAPE_S = 1.0
"""Fifteen times as often as the chart has Prometheus ask."""
KINDS = ("bare", "metrics", "traces")
METRICS_MOST, TRACES_MOST = 1.03, 1.10
_OPEN_METRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


def run(*, quick: bool = False) -> BenchResult:
    """Measures in rounds of bare, metrics, traces.

    Args:
        quick: six rounds only.
    """
    return asyncio.run(_run(6 if quick else ROUNDS))


async def _run(rounds: int) -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="keystage-bench-") as folder, running(_forget) as collector:
        env = {"KEYSTAGE_MAX_BATCH": "256", "KEYSTAGE_WAVE_TOKENS": "32768", "KEYSTAGE_WAVES": str(WAVES)}
        own = {
            "bare": {"KEYSTAGE_METRICS": "0", "KEYSTAGE_TRACES": "off"},
            "metrics": {"KEYSTAGE_TRACES": "off"},
            "traces": {"KEYSTAGE_TRACES": "on", "OTEL_EXPORTER_OTLP_ENDPOINT": collector},
        }
        async with LocalWorld(Path(folder) / "home", gateway_port=None, controller=False) as world:
            routers: dict[str, tuple[str, int]] = {}
            for kind in KINDS:
                pipeline = emulated(
                    f"bench-{kind}", STAGES, execution="looping", activation_bytes=ACTIVATION_BYTES,
                    context_length=8192,
                )  # fmt: skip
                bundle = Path(folder) / kind
                bundle.mkdir()
                write(bundle, pipeline)
                await world.deploy(
                    *deployments_for(bundle, pipeline, device="emulated", slots=256, env={**env, **own[kind]})
                )
                router = (await world.wait_ready(pipeline.name, 1))[0]
                routers[kind] = f"http://{router.address}", router.pid
                for stage in range(STAGES):
                    await world.wait_ready(f"{pipeline.name}-stage-{stage}", 1)
            return await asyncio.to_thread(_measure, routers, rounds)


def _measure(routers: dict[str, tuple[str, int]], rounds: int) -> BenchResult:
    asked = body(TOKENS, stream=True)
    for address, _ in routers.values():
        closed_loop(f"{address}/v1/completions", asked, 8, 1.0)
    used_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    reports: dict[str, list[ClientReport]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS if number % 2 == 0 else reversed(KINDS):
            address, pid = routers[kind]
            with _scraped(address) if kind != "bare" else contextlib.nullcontext():
                before_s = cpu_s([pid])
                report = closed_loop(f"{address}/v1/completions", asked, CONCURRENCY, ROUND_S)
                used_s[kind].append((cpu_s([pid]) - before_s) / report.requests)
            reports[kind].append(report)
    return _result(used_s, reports)


def _result(used_s: dict[str, list[float]], reports: dict[str, list[ClientReport]]) -> BenchResult:
    rows: list[dict[str, object]] = [
        {
            "router": kind,
            "cpu_ms_per_request": 1e3 * float(np.median(used_s[kind])),
            "requests_per_s": float(np.median([r.requests / r.elapsed_s for r in reports[kind]])),
            "p50_ms": 1e3 * float(np.median(np.concatenate([r.latencies_s for r in reports[kind]]))),
            "failed": sum(r.failed for r in reports[kind]),
        }
        for kind in KINDS
    ]
    figures = {
        "metrics_cpu_ratio": Figure(
            _ratios(used_s["metrics"], used_s["bare"]),
            "router CPU per request with metrics / without",
            f"at most {METRICS_MOST}",
        ),
        "traces_cpu_ratio": Figure(
            _ratios(used_s["traces"], used_s["metrics"]),
            "router CPU per request with every request traced / with metrics alone",
            f"at most {TRACES_MOST}",
        ),
    }
    how = (
        f"{CONCURRENCY} requests of {REQUEST_BYTES} bytes in flight, {TOKENS} tokens streamed each, "
        f"{STAGES} stages; {ROUND_S:g} s each, order turned every round; "
        f"scraped every {SCRAPE_S:g} s as OpenMetrics"
    )
    notes = [how]
    return BenchResult(rows, figures, notes)


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


@contextlib.contextmanager
def _scraped(address: str) -> Iterator[None]:
    """Asks for metrics as Prometheus does, meanwhile."""
    end = threading.Event()

    def ask() -> None:
        where = urlsplit(address).netloc
        while not end.wait(SCRAPE_S):
            connection = http.client.HTTPConnection(where, timeout=10)
            connection.request("GET", "/metrics", headers=_OPEN_METRICS)
            connection.getresponse().read()
            connection.close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(10)


def _forget(listening: socket.socket) -> None:
    """A collector that reads and forgets."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Reads and forgets (the name is the base class')."""
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(listening.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.serve_forever()
