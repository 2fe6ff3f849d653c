"""The local world as a library: supervisor, KeysManagers, gateway and controller in one `async with`.

Used by `local.up` (the command), tests and benchmarks. It puts the parts together in order and
takes them apart in reverse, also when a step fails. It must not interpret deployments.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from keystage.local.adopted import subreaper
from keystage.local.api import Deployment, FunctionRecord, ReplicaRecord, StartRecord
from keystage.local.config import LocalSettings, inherited_environment, runtime_folder
from keystage.local.control import Control
from keystage.local.errors import NotReady, PortInUse
from keystage.local.events import Deployed, Removed, Scaled
from keystage.local.handover import FORM, Handover
from keystage.local.home import Home, read_credentials
from keystage.local.ledger import Bounds
from keystage.local.process import listening_socket
from keystage.local.program import Program
from keystage.local.site import Site, daemon_program, nodes_of, sites_of
from keystage.local.supervisor import Supervisor
from keystage.local.sweeper import Sweeper
from keystage.local.system import SystemProcess
from keystage.local.upgrades import Upgrades

GATEWAY_HOST = "127.0.0.1"
GATEWAY_READY_S = 30.0
GATEWAY_RESTARTS = 3
"""Crashes before its first answer after which it is not waited for any longer."""
SYSTEM_STOP_S = 5.0
LEAVE_S = "1"
"""Seconds for which a gateway that is renewed takes requests of clients that do not know it yet."""
REDIS = "KEYSTAGE_REDIS"
"""The one setting of `up` that routers get too: with it they keep requests with a key."""


class LocalWorld:
    """Everything on one machine.

    Args:
        home: state folder.
        gateway_port: 0 picks a free port, None runs no gateway.
        controller: run the controller; without it desired numbers change by `scale` alone.
        bounds: time limits of replicas, None for those of the environment.
        env: more variables for gateway, controller and KeysManagers (`KEYSTAGE_*` settings).
        nodes: how many nodes this machine plays, each with a KeysManager of its own.
        keysmanager: whether replicas are forked by KeysManagers, None for what the environment says.
        kept: what a predecessor in this process handed over: it goes on, see `resumed`.

    Attributes:
        keysmanagers: the kept daemons by node, empty without.
    """

    def __init__(
        self,
        home: Path,
        *,
        gateway_port: int | None = 0,
        controller: bool = True,
        bounds: Bounds | None = None,
        env: Mapping[str, str] | None = None,
        nodes: int = 1,
        keysmanager: bool | None = None,
        kept: Handover | None = None,
    ) -> None:
        settings = LocalSettings(home=home)
        general, ours = inherited_environment()
        self.home = Home(home, runtime_folder())
        self.gateway_url = ""
        self.gateway: SystemProcess | None = None
        self.controller: SystemProcess | None = None
        self.keysmanagers: dict[str, SystemProcess] = {}
        self._general = general
        self._system_env = {**general, **ours, **(env or {})}
        self._port = gateway_port
        self._with_controller = controller
        self._bounds = bounds or settings.bounds()
        if timeout_s := self._system_env.get("KEYSTAGE_TIMEOUT_S"):  # the gateway has it from there, too
            self._bounds = dataclasses.replace(self._bounds, timeout_s=float(timeout_s))
        self._shutdown_s = settings.shutdown_s
        is_on = not settings.keysmanager_off if keysmanager is None else keysmanager
        self._node_names = nodes_of(nodes, settings.node) if is_on else ()
        if kept is not None:
            self._node_names = kept.nodes
        self._kept = kept
        self._kept_system = {one.name: one for one in kept.system} if kept is not None else {}
        self._env = dict(env or {})
        self._faces: list[socket.socket] = []
        self._server: socket.socket | None = None
        self._sweeper: Sweeper | None = None
        self._stack = contextlib.AsyncExitStack()
        self._supervisor: Supervisor | None = None
        self.upgrades = Upgrades(self, is_successor=kept is not None)

    @classmethod
    def resumed(cls, kept: Handover) -> Self:
        """The world that a predecessor in this process handed over."""
        return cls(
            Path(kept.home),
            gateway_port=0 if kept.gateway >= 0 else None,
            controller=kept.controller,
            bounds=kept.bounds,
            env=kept.env,
            nodes=max(1, len(kept.nodes)),
            keysmanager=bool(kept.nodes),
            kept=kept,
        )

    def handover(self) -> Handover:
        """What a successor goes on with, while the supervisor holds."""
        assert self._sweeper is not None
        replicas, numbers, routers = self.supervisor.kept()
        system = (one.kept for one in (self.gateway, self.controller, *self.keysmanagers.values()) if one)
        return Handover(
            form=FORM,
            home=str(self.home.path),
            run=str(self.home.run),
            lock=self.home.lock_fd,
            lifeline=self.supervisor.lifeline.ends,
            offset_s=self.supervisor.now() - time.monotonic(),
            bounds=self._bounds,
            env=self._env,
            nodes=self._node_names,
            faces=tuple(face.fileno() for face in self._faces),
            gateway=self._server.fileno() if self._server is not None else -1,
            controller=self._with_controller,
            system=tuple(one for one in system if one is not None),
            sweeper=self._sweeper.pid,
            replicas=replicas,
            numbers=numbers,
            routers=routers,
        )

    @property
    def start_limit_s(self) -> float:
        """Seconds that a replica may take to become ready."""
        return self._bounds.start_limit_s

    @property
    def drain_s(self) -> float:
        """Seconds that a replica may take to end, where its function does not say."""
        return self._bounds.drain_s

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor, while the world is up."""
        assert self._supervisor is not None, "the world is not up"
        return self._supervisor

    @property
    def credentials(self) -> tuple[str, str]:
        """User and password of the gateway's management API."""
        return read_credentials(self.home.credentials)

    async def __aenter__(self) -> Self:
        """Brings everything up.

        Raises:
            HomeLocked: another process holds the state folder.
            CorruptState: functions.json cannot be read.
            PortInUse: somebody else listens on the gateway's port.
            NotReady: the gateway does not answer.
        """
        kept = self._kept
        async with self._stack as stack:
            if kept is None:
                self.home.open()
            else:
                self.home.resume(Path(kept.run), kept.lock)
            stack.callback(self.home.close)
            self._open_sockets(stack)
            sites = sites_of(self._node_names, self.home, self._faces)
            if sites:
                stack.enter_context(subreaper())
            nodes = [site.node for site in sites]
            self._supervisor = Supervisor(
                self.home, self._bounds, self._general, nodes, self._for_routers(), kept
            )
            stack.push_async_callback(self._supervisor.stop, self._shutdown_s)
            lifeline_fd = self._supervisor.lifeline.read_fd
            self._sweeper = Sweeper(self.home.run, lifeline_fd, kept.sweeper if kept is not None else 0)
            stack.callback(self._sweeper.stop)
            if kept is None:
                self._sweeper.start()
            server = self._server
            for site in sites:
                self.keysmanagers[site.node.name] = self._start_keysmanager(site)
                stack.push_async_callback(self.keysmanagers[site.node.name].stop, SYSTEM_STOP_S)
            await self._supervisor.start()
            control = Control(self._supervisor, self.upgrades)
            stack.push_async_callback(control.stop)
            await control.start(self.home.control)
            if server is not None:
                host, port = server.getsockname()[:2]
                self.gateway_url = f"http://{host}:{port}"
                self.gateway = self._system("gateway", server=server)
                stack.push_async_callback(self.gateway.stop, SYSTEM_STOP_S)
                await self._wait_gateway()
            if self._with_controller:
                self.controller = self._system("controller")
                stack.push_async_callback(self.controller.stop, SYSTEM_STOP_S)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends every process and removes sockets and run folder."""
        await self._stack.aclose()

    # ------------------------------------------------------------ functions

    async def deploy(self, *deployments: Deployment) -> None:
        """Creates or replaces functions; one that is deployed just so already is left alone.

        Stage functions that a pipeline among them does not have any longer are removed.
        """
        known = {f.deployment.service: f.deployment for f in self.supervisor.view().functions}
        for deployment in deployments:
            if known.get(deployment.service) != deployment:
                self.supervisor.handle(Deployed(deployment))
        self.supervisor.remove_strays()

    async def remove(self, function: str) -> None:
        """Drains and removes a function."""
        self.supervisor.handle(Removed(function))

    async def scale(self, function: str, replicas: int) -> None:
        """Writes desired replicas, in the controller's place."""
        self.supervisor.handle(Scaled(function, replicas))

    def function(self, name: str) -> FunctionRecord:
        """Record of a function."""
        return self.supervisor.function(name)

    def replicas(self, function: str) -> list[ReplicaRecord]:
        """Replicas of a function, in whatever state."""
        return [r for r in self.supervisor.view().replicas if r.function == function]

    def starts(self, function: str) -> list[StartRecord]:
        """How starts of a function's replicas went, oldest first, ended ones included."""
        return [s for s in self.supervisor.starts() if s.function == function]

    async def wait_ready(
        self, function: str, replicas: int = 1, timeout_s: float = 60.0
    ) -> list[ReplicaRecord]:
        """Waits until at least so many replicas of the function's newest generation are ready.

        Raises:
            NotReady: they were not in time; names their states and reasons.
            UnknownFunction: it is not deployed.
        """
        deadline_s = self.supervisor.now() + timeout_s
        while True:
            view = self.supervisor.view()
            generation = self.function(function).generation
            mine = [r for r in view.replicas if r.function == function]
            ready = [r for r in mine if r.state == "ready" and r.generation == generation]
            if len(ready) >= replicas:
                return ready
            left_s = deadline_s - self.supervisor.now()
            if left_s <= 0:
                states = ", ".join(f"{r.replica} {r.state} {r.reason}".strip() for r in mine) or "none exists"
                raise NotReady(
                    f"function {function}: {len(ready)} of {replicas} replicas ready after {timeout_s:g} s "
                    f"({states}); logs in {self.home.logs}"
                )
            await self.supervisor.watch(view.version, left_s)

    # ------------------------------------------------------------ parts

    def _for_routers(self) -> dict[str, str]:
        """Where routers keep requests with a key, and what tells this world's from others' there."""
        told = {"KEYSTAGE_INSTALLATION": str(self.home.path)}
        if REDIS in self._system_env:
            told[REDIS] = self._system_env[REDIS]
        return told

    def _open_sockets(self, stack: contextlib.AsyncExitStack) -> None:
        """Those of KeysManagers and gateway, in our hands whoever serves on them."""
        kept = self._kept
        if kept is None:
            self._faces = [stack.enter_context(self._listen(0)) for _ in self._node_names]
            self._server = None if self._port is None else self._listen(self._port)
        else:
            self._faces = [stack.enter_context(socket.socket(fileno=fd)) for fd in kept.faces]
            self._server = socket.socket(fileno=kept.gateway) if kept.gateway >= 0 else None
        if self._server is not None:
            stack.callback(self._server.close)

    def _listen(self, port: int) -> socket.socket:
        try:
            return listening_socket(GATEWAY_HOST, port)
        except OSError as error:
            raise PortInUse(
                f"port {port} of {GATEWAY_HOST} is in use ({error.strerror}): end the program that listens "
                "there, or choose another port with KEYSTAGE_GATEWAY_PORT"
            ) from error

    def _system(self, name: str, *, server: socket.socket | None = None) -> SystemProcess:
        env = self._system_env | {
            "KEYSTAGE_CONTROL": str(self.home.control),
            "KEYSTAGE_CREDENTIALS": str(self.home.credentials),
            "KEYSTAGE_HOME": str(self.home.path),
        }
        if server is not None:
            # One that is renewed stays until its last request is answered.
            longest = f"{self._bounds.timeout_s:.10g}"
            stays = {"KEYSTAGE_STOP_S": longest, "KEYSTAGE_ASYNC_DRAIN_S": longest}
            env = {"KEYSTAGE_LEAVE_S": LEAVE_S, **stays, **env}
        program = Program((sys.executable, "-m", f"keystage.{name}.app"), env, serves_http=server is not None)
        return self._keep(name, program, server, stays=server is not None)

    def _start_keysmanager(self, site: Site) -> SystemProcess:
        program = daemon_program({**self._system_env, **site.env})
        name = f"keysmanager-{site.node.name}"
        kept = self._keep(name, program, site.face, self.supervisor.orphans.add_session)
        site.node.is_failing = lambda: kept.is_failing
        site.node.restart = kept.kill
        return kept

    def _keep(
        self,
        name: str,
        program: Program,
        server: socket.socket | None,
        started: Callable[[int], None] | None = None,
        *,
        stays: bool = False,
    ) -> SystemProcess:
        kept = SystemProcess(
            name,
            program,
            logs=self.home.logs,
            lifeline_fd=self.supervisor.lifeline.read_fd,
            now=self.supervisor.now,
            server=server,
            started=started,
            stays=stays,
        )
        kept.start(self._kept_system.get(name))
        return kept

    async def _wait_gateway(self) -> None:
        assert self.gateway is not None
        asking = asyncio.create_task(_answers(f"{self.gateway_url}/healthz"))
        while not asking.done() and self.gateway.restarts < GATEWAY_RESTARTS:
            await asyncio.wait([asking], timeout=0.1)
        if asking.done() and asking.result():
            return
        asking.cancel()
        log = self.home.logs / "_gateway.log"
        tail = await asyncio.to_thread(_tail, log)
        raise NotReady(
            f"the gateway did not answer within {GATEWAY_READY_S:g} s and {self.gateway.restarts} restarts; "
            f"{log} ends: {tail}"
        )


async def _answers(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=GATEWAY_READY_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-400:].strip() if log.exists() else ""
