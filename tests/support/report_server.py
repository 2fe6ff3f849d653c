"""The gateway's management half, real, over a backend that reports what a test says: any state, any size."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvicorn

from keystage.gateway.auth import Credentials
from keystage.gateway.backend import LogLine
from keystage.gateway.metrics import Metrics
from keystage.gateway.rest import Management, make_app
from keystage.observability.api import (
    DecisionReport,
    GpuReport,
    NodeReport,
    PipelineReport,
    ReplicaReport,
    Report,
    StageReport,
)
from keystage.observability.board import Board

USER, PASSWORD = "admin", "tell-nobody-4417"


class ToldBackend:
    """A backend of which only reports and output are asked for.

    Attributes:
        lines: what every function printed.
    """

    def __init__(self) -> None:
        self.board = Board()
        self.lines: list[LogLine] = []

    def get(self, name: str) -> None:
        """Every function is there; what it is, nobody asks."""

    async def logs(self, name: str, *, tail: int | None, since_s: float) -> list[LogLine]:
        """See `gateway.backend.Backend`."""
        found = [line for line in self.lines if line.at_s > since_s]
        return found if tail is None else found[-tail:]

    async def report(self, since: tuple[str, int] | None, wait_s: float) -> bytes | None:
        """See `gateway.backend.Backend`."""
        return await self.board.wait(since, wait_s)


class ReportServer:
    """One server on a port that stays the same when it is stopped and started again.

    Attributes:
        password: that it asks for from its next start on.
    """

    def __init__(self) -> None:
        self.password = PASSWORD
        self.backend = ToldBackend()
        self.number = 0
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serves."""
        management = Management(self.backend, Metrics(), 1.0)  # type: ignore[arg-type]
        app = make_app(management, Credentials(USER, self.password))
        config = uvicorn.Config(
            app, host="127.0.0.1", port=self.port, lifespan="off", log_level="critical", ws="none",
            timeout_graceful_shutdown=2,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        server = self._server
        management.reports.is_leaving = lambda: server.should_exit
        self._task = asyncio.create_task(server.serve())
        while not server.started:
            assert not self._task.done(), "the server ended"
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Ends."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            self._server = None

    def tell(self, report: Report, **changes: Any) -> Report:
        """Reports this, with the next number and the present time."""
        self.number += 1
        told = {"number": self.number, "at_s": time.time(), **changes}
        report = msgspec.structs.replace(report, **told)
        assert self.backend.board.put(msgspec.json.encode(report))
        return report


@contextlib.asynccontextmanager
async def report_server() -> AsyncIterator[ReportServer]:
    """A server that serves until the end of the context."""
    server = ReportServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def a_report(stages: int = 4, *, key: int = 1, round_: int = 0) -> Report:
    """A pipeline with a key stage, a GPU node and a log; `round_` moves its numbers."""
    rows = []
    for i in range(stages):
        is_key = i == key
        replicas = [ReplicaReport(replica=f"big-stage-{i}-{r}", state="ready", node="node-a", gpus=(r % 2,))
                    for r in range(2)]  # fmt: skip
        if is_key:
            replicas.append(ReplicaReport(replica=f"big-stage-{i}-new", state="starting", since_s=1.5))
        rows.append(
            StageReport(
                stage=i, function=f"big-stage-{i}", desired=4 if is_key else 2, ready=2,
                starting=2 if is_key else 0, draining=1 if i == 2 else 0,
                is_key=is_key, rank=0 if is_key else i + (i < key),
                queue=float((31 if is_key else i * 7 + round_) % 40), in_flight=2.0, arrival_rps=12.5,
                arrival_cv=2.4, service_s=0.041, wait_s=0.31 if is_key else 0.004,
                utilisation_ratio=0.97 if is_key else 0.4, share_s=0.08,
                reason="predicted wait 310 ms > 80 ms",
                replicas=tuple(replicas),
            )
        )  # fmt: skip
    return Report(
        controller="told",
        number=1,
        at_s=time.time(),
        version="0.1.0",
        pipelines=(
            PipelineReport(
                pipeline="big", execution="single-pass", stages=tuple(rows), arrival_rps=12.5, latency_s=0.42,
                deadline_s=0.5, attainment_ratio=0.93,
            ),
        ),
        nodes=(
            NodeReport(
                node="node-a",
                gpus=(
                    GpuReport(total_bytes=80 << 30, free_bytes=12 << 30, replicas=3),
                    GpuReport(total_bytes=80 << 30, free_bytes=44 << 30, replicas=1),
                ),
                cores_free=11.5,
                memory_free_bytes=96 << 30,
                in_memory=("big-stage-0", "big-stage-1"),
                on_disk=("big-stage-2",),
            ),
        ),
        decisions=(
            DecisionReport(
                number=1, at_s=time.time() - 3, function="big", kind="key-stages",
                text="big: key stages are now 1, 0",
            ),
            DecisionReport(
                number=2, at_s=time.time() - 2, function="big-stage-1", kind="replicas", before=2, after=4,
                text="stage 1: 2 -> 4, predicted wait 310 ms > 80 ms",
                inputs={"arrival_rps": 12.5, "service_s": 0.041},
            ),
        ),
    )  # fmt: skip
