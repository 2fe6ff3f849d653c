"""The live system: `keystage up --nodes 2` as a process, a Redis beside it, a pipeline at its gateway.

Before it: `model` wrote a bundle. After it: `load` sends to `url`, `faults` asks who is who. It talks to the
system as anybody does: management API, control socket, `/_/stats`; process ids come from the supervisor's
records and from the process table below `up`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import psutil
from support.servers import RedisServer, free_port

from chaos.network import listening, reap_with_parent
from keystage.bundle.api import Pipeline
from keystage.local.api import ReplicaRecord
from keystage.local.home import control_socket, read_credentials
from keystage.local.pipeline import deployments_for
from keystage.router.api import RouterStats

NAME = "tiny"
READY_S = 120.0
STOP_S = 30.0
FORKED = {"holder": "ks-hold", "forkserver": "ks-forkserver"}
"""Parts that are forked, and so have their parent's command line: how their names begin."""
T = TypeVar("T")


class WorldError(Exception):
    """The system does not come up, or cannot be asked; says what."""


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A process of the system.

    Attributes:
        name: of it.
        process: it, safe against a process id that was given out again.
        node: of a worker.
        held: sessions that the router says it holds, of a worker; of a router, those of all workers.
    """

    name: str
    process: psutil.Process
    node: str = ""
    held: int = 0


class World:
    """Everything that runs.

    Args:
        folder: short path for all state.
        bundle: to serve.
        pipeline: its content.
        replicas: of each stage.
        has_redis: whether gateway and router get a Redis.
    """

    def __init__(
        self, folder: Path, bundle: Path, pipeline: Pipeline, replicas: int, *, has_redis: bool
    ) -> None:
        self.folder = folder
        self.events = folder / "events"
        self.home = folder / "home"
        self.redis = RedisServer(folder / "redis") if has_redis else None
        self._bundle = bundle
        self._pipeline = pipeline
        self._replicas = replicas
        self._port = free_port()
        self._up: subprocess.Popen[bytes] | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def gateway(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        """Of the pipeline's function."""
        return f"{self.gateway}/function/{NAME}"

    async def start(self) -> None:
        """Brings everything up and waits until every replica is ready.

        Raises:
            WorldError: it was not within bounds.
        """
        if self.redis is not None:
            await asyncio.to_thread(self.redis.start)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("KEYSTAGE_")}
        redis = {"KEYSTAGE_REDIS": self.redis.url} if self.redis is not None else {}
        budget = len(self._pipeline.stages) * self._replicas
        env = {**kept, **redis, "KEYSTAGE_BUDGET_REPLICAS": str(budget)}
        argv = [sys.executable, "-m", "keystage.cli.main", "up", "--nodes", "2", "--port", str(self._port)]
        with (self.folder / "up.log").open("ab") as log:
            self._up = subprocess.Popen(
                [*argv, "--home", str(self.home)],
                env=env,
                stdout=log,
                stderr=log,
                preexec_fn=reap_with_parent,
            )
        await self._until(self._is_healthy, "the gateway answers")
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(control_socket(self.home))))
        told = {
            "KEYSTAGE_EVENTS": str(self.events),
            **redis,
        }
        stages = [self._replicas] * len(self._pipeline.stages)
        for deployment in deployments_for(self._bundle, self._pipeline, replicas=stages, env=told):
            await self._deploy(msgspec.to_builtins(deployment))
        await self._until(self.is_whole, "every replica is ready")

    async def stop(self) -> list[str]:
        """Ends everything; command lines of what was left over."""
        below = self._below()
        if self._session is not None:
            await self._session.close()
        if self._up is not None and self._up.poll() is None:
            self._up.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(self._up.wait, STOP_S)
            except subprocess.TimeoutExpired:
                self._up.kill()
                await asyncio.to_thread(self._up.wait)
        if self.redis is not None:
            self.redis.kill()
        _, left = await asyncio.to_thread(psutil.wait_procs, below, 10.0)
        said = [f"{p.pid} {_line(p)}" for p in left]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return said

    # ------------------------------------------------------------ who is who

    async def replicas(self) -> list[ReplicaRecord]:
        """What the supervisor keeps."""
        assert self._session is not None, "the world is not up"
        async with self._session.get("http://localhost/replicas") as answer:
            return msgspec.json.decode(await answer.read(), type=list[ReplicaRecord])

    async def is_whole(self) -> bool:
        """Whether every replica that is wanted is ready, and the router knows all workers."""
        records = [r for r in await self.replicas() if r.state == "ready"]
        wanted = 1 + len(self._pipeline.stages) * self._replicas
        if len(records) < wanted:
            return False
        stats = await self.stats()
        return stats is not None and sum(r.state == "ready" for r in stats.replicas) >= wanted - 1

    async def stats(self) -> RouterStats | None:
        """What the router counts, None: there is none to ask."""
        for record in await self.replicas():
            if record.function == NAME and record.state == "ready":
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
                    timeout = aiohttp.ClientTimeout(total=1.0)
                    async with (
                        aiohttp.ClientSession(timeout=timeout) as session,
                        session.get(f"http://{record.address}/_/stats") as answer,
                    ):
                        return msgspec.json.decode(await answer.read(), type=RouterStats)
        return None

    async def members(self, part: str) -> list[Member]:
        """Processes of a part, by name; a `far worker` is on another node than its router."""
        if part == "redis":
            return [] if self.redis is None else [Member(part, psutil.Process())]
        if part.endswith("worker"):
            stats = await self.stats()
            held = {r.replica: r.held_slots for r in stats.replicas} if stats is not None else {}
            every = [r for r in await self.replicas() if r.state == "ready"]
            near = {r.node for r in every if r.function == NAME} if part == "far worker" else set()
            records = [r for r in every if r.function != NAME and r.node not in near]
            found = [(r.replica, r.pid, r.node, held.get(r.replica, 0)) for r in records]
            return [_member(*one) for one in sorted(found) if psutil.pid_exists(one[1])]
        if part == "router":
            stats = await self.stats()
            held = sum(r.held_slots for r in stats.replicas) if stats is not None else 0
            records = [r for r in await self.replicas() if r.function == NAME and r.state == "ready"]
            found = [(r.replica, r.pid, r.node, held) for r in records]
            return [_member(*one) for one in found if psutil.pid_exists(one[1])]
        below = await asyncio.to_thread(self._below)
        if part in FORKED:
            return [Member(_name(p), p) for p in below if _name(p).startswith(FORKED[part])]
        return [Member(part, p) for p in below if f"keystage.{part}.app" in _line(p)]

    async def wire_ports(self, links: str) -> set[int]:
        """TCP ports that carry what goes between nodes.

        Args:
            links: `workers`: those from worker to worker; `nodes`: the router's inbox, too.
        """
        ports: set[int] = set()
        for record in await self.replicas():
            if record.pid and (links == "nodes" or record.function != NAME):
                http = int(record.address.rpartition(":")[2] or 0)
                ports |= await asyncio.to_thread(listening, record.pid) - {http}
        return ports

    # ------------------------------------------------------------ inside

    def _below(self) -> list[psutil.Process]:
        if self._up is None:
            return []
        try:
            return psutil.Process(self._up.pid).children(recursive=True)
        except psutil.Error:
            return []

    async def _deploy(self, deployment: dict[str, Any]) -> None:
        user, password = read_credentials(self.home / "credentials")
        token = base64.b64encode(f"{user}:{password}".encode()).decode()
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Basic {token}"}) as session,
            session.post(f"{self.gateway}/system/functions", json=deployment) as answer,
        ):
            if answer.status >= 300:
                raise WorldError(f"{deployment['service']}: {answer.status} {await answer.text()}")

    async def _is_healthy(self) -> bool:
        if self._up is not None and self._up.poll() is not None:
            raise WorldError(f"`keystage up` ended: {(self.folder / 'up.log').read_text()[-1000:]}")
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session,
            session.get(f"{self.gateway}/healthz") as answer,
        ):
            return answer.status == 200

    async def _until(self, condition: Any, what: str) -> None:
        end_s = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                if await condition():
                    return
            if time.monotonic() > end_s:
                raise WorldError(f"not within {READY_S:g} s: {what}; see {self.folder}")
            await asyncio.sleep(0.1)


def _member(name: str, pid: int, node: str = "", held: int = 0) -> Member:
    return Member(name, psutil.Process(pid), node, held)


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""


def _name(process: psutil.Process) -> str:
    """As the process calls itself, at most 15 bytes; empty: it is gone."""
    try:
        return process.name()
    except psutil.Error:
        return ""
