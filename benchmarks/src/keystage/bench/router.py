"""`keystage bench router`: what router, wire and workers cost when stages take no time.

Eight emulated zero-time stages, each a process, and their router; a client process keeps requests
of 4 KiB in flight, each streaming 16 tokens. In the same rounds a trivial FastAPI application
answers the same bodies with one small JSON object. Everything shares this machine's cores.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from keystage.bench.client import ClientReport, closed_loop
from keystage.bench.frame import BenchResult, Figure
from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

STAGES = 8
REQUEST_BYTES = 4096
TOKENS = 16
ACTIVATION_BYTES = 16
WAVES = 1
"""Zero-time stages are bound by this machine's cores, so more waves only cut the batches smaller."""
CONCURRENCY = 64
ROUNDS = 5
ROUND_S = 6.0


def run(*, quick: bool = False) -> BenchResult:
    """Measures throughput and added latency, in rounds of router, FastAPI and single requests.

    Args:
        quick: two rounds only.
    """
    return asyncio.run(_run(2 if quick else ROUNDS, ROUND_S, CONCURRENCY))


async def _run(rounds: int, round_s: float, concurrency: int) -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="keystage-bench-") as folder:
        pipeline = emulated(
            "bench", STAGES, execution="looping", activation_bytes=ACTIVATION_BYTES, context_length=8192
        )
        bundle = Path(folder) / "bundle"
        bundle.mkdir()
        write(bundle, pipeline)
        env = {"KEYSTAGE_MAX_BATCH": "256", "KEYSTAGE_WAVE_TOKENS": "32768", "KEYSTAGE_WAVES": str(WAVES)}
        async with LocalWorld(Path(folder) / "home", gateway_port=None, controller=False) as world:
            await world.deploy(*deployments_for(bundle, pipeline, device="emulated", slots=256, env=env))
            router = (await world.wait_ready("bench", 1))[0]
            for stage in range(STAGES):
                await world.wait_ready(f"bench-stage-{stage}", 1)
            pids = {"router": [router.pid], "workers": [r.pid for r in world.supervisor.view().replicas]}
            pids["workers"].remove(router.pid)
            with _fastapi() as (fastapi_url, fastapi_pid):
                pids["fastapi"] = [fastapi_pid]
                return await asyncio.to_thread(
                    _measure, f"http://{router.address}", fastapi_url, pids, rounds, round_s, concurrency
                )


def _measure(
    router_url: str,
    fastapi_url: str,
    pids: dict[str, list[int]],
    rounds: int,
    round_s: float,
    concurrency: int,
) -> BenchResult:
    asked = body(TOKENS, stream=True)
    single = body(1, stream=False)
    url = f"{router_url}/v1/completions"
    closed_loop(url, asked, 8, 1.0)
    closed_loop(fastapi_url, asked, 8, 1.0)
    load: list[ClientReport] = []
    plain: list[ClientReport] = []
    added_ms: list[float] = []
    used: dict[str, float] = dict.fromkeys(pids, 0.0)
    for _ in range(rounds):
        before = {part: cpu_s(ids) for part, ids in pids.items()}
        load.append(closed_loop(url, asked, concurrency, round_s))
        for part in ("router", "workers"):
            used[part] += cpu_s(pids[part]) - before[part]
        before = {part: cpu_s(ids) for part, ids in pids.items()}
        plain.append(closed_loop(fastapi_url, asked, concurrency, round_s / 2))
        used["fastapi"] += cpu_s(pids["fastapi"]) - before["fastapi"]
        alone = closed_loop(url, single, 1, round_s / 4)
        alone_plain = closed_loop(fastapi_url, single, 1, round_s / 4)
        added_ms.append(1e3 * float(np.median(alone.latencies_s) - np.median(alone_plain.latencies_s)))
    return _result(load, plain, added_ms, used, concurrency)


def _result(
    load: list[ClientReport],
    plain: list[ClientReport],
    added_ms: list[float],
    used: dict[str, float],
    concurrency: int,
) -> BenchResult:
    rows = [
        _row(f"router + {STAGES} stages", load),
        _row("FastAPI", plain),
    ]
    requests = sum(report.requests for report in load)
    elapsed_s = sum(report.elapsed_s for report in load)
    client_s = sum(report.cpu_s for report in load)
    per_request = {
        "router": used["router"] / requests,
        "workers": used["workers"] / requests,
        "client": client_s / requests,
    }
    rates = [report.requests / report.elapsed_s for report in load]
    plain_rates = [report.requests / report.elapsed_s for report in plain]
    figures = {
        "requests_per_s": Figure(rates, "answered streams per second", "at least 500"),
        "tokens_per_s": Figure(
            [report.tokens / report.elapsed_s for report in load],
            "streamed tokens per second",
            "at least 8000",
        ),
        "added_ms_p50": Figure(
            added_ms, f"p50 of a one-token request through {STAGES} stages, less FastAPI's p50, one at a time"
        ),
        "ratio_fastapi": Figure(
            [ours / theirs for ours, theirs in zip(rates, plain_rates, strict=True)],
            "our requests/s / FastAPI's (which answers one small object)",
        ),
    }
    share = ", ".join(f"{part} {1e3 * seconds:.2f} ms" for part, seconds in per_request.items())
    busy = (used["router"] + used["workers"] + client_s) / elapsed_s
    how = (
        f"{concurrency} requests of {REQUEST_BYTES} bytes in flight, {TOKENS} tokens streamed each, "
        f"{WAVES} waves on the path"
    )
    notes = [
        how,
        f"failed: {sum(report.failed for report in load)} of {requests}",
        f"where the time goes, CPU per request: {share}; {busy:.2f} cores busy in all",
    ]
    return BenchResult(rows, figures, notes)


def _row(name: str, reports: list[ClientReport]) -> dict[str, object]:
    latencies_ms = 1e3 * np.concatenate([report.latencies_s for report in reports])
    elapsed_s = sum(report.elapsed_s for report in reports)
    return {
        "server": name,
        "requests_per_s": sum(report.requests for report in reports) / elapsed_s,
        "tokens_per_s": sum(report.tokens for report in reports) / elapsed_s,
        "p50_ms": float(np.percentile(latencies_ms, 50)),
        "p99_ms": float(np.percentile(latencies_ms, 99)),
        "failed": sum(report.failed for report in reports),
    }


def body(tokens: int, *, stream: bool) -> bytes:
    """A request of `REQUEST_BYTES` for so many tokens."""
    fields = {"prompt": "", "max_tokens": tokens, "temperature": 0, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    fields["prompt"] = "x" * (REQUEST_BYTES - len(json.dumps(fields)))
    return msgspec.json.encode(fields)


def cpu_s(pids: list[int]) -> float:
    """CPU seconds that processes have used so far."""
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total


class _fastapi:  # noqa: N801  used as a context manager only
    """A trivial FastAPI application in a process of its own: (url, pid)."""

    def __enter__(self) -> tuple[str, int]:
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        url = "http://{}:{}/".format(*listening.getsockname()[:2])
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve_fastapi, args=(listening,), daemon=True
        )
        self._process.start()
        listening.close()
        assert self._process.pid is not None
        return url, self._process.pid

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join(5)


def _serve_fastapi(listening: socket.socket) -> None:
    import uvicorn
    from fastapi import FastAPI

    app = FastAPI()

    @app.post("/")
    async def answer(fields: dict[str, Any]) -> dict[str, object]:
        return {"text": "x" * fields["max_tokens"], "tokens": fields["max_tokens"]}

    config = uvicorn.Config(
        app, loop="uvloop", http="httptools", log_level="error", access_log=False, lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[listening])
