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
from keystage.local.home import Home, read_credentials
from keystage.local.ledger import Bounds
from keystage.local.process import listening_socket
from keystage.local.program import Program
from keystage.local.site import Site, daemon_program, nodes_of, sites_of
from keystage.local.supervisor import Supervisor
from keystage.local.sweeper import Sweeper
from keystage.local.system import SystemProcess

GATEWAY_HOST = "127.0.0.1"
GATEWAY_READY_S = 30.0
GATEWAY_RESTARTS = 3
"""Crashes before its first answer after which it is not waited for any longer."""
SYSTEM_STOP_S = 5.0


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
        self._stack = contextlib.AsyncExitStack()
        self._supervisor: Supervisor | None = None

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
        async with self._stack as stack:
            self.home.open()
            stack.callback(self.home.close)
            faces = [stack.enter_context(self._listen(0)) for _ in self._node_names]
            sites = sites_of(self._node_names, self.home, faces)
            if sites:
                stack.enter_context(subreaper())
            nodes = [site.node for site in sites]
            self._supervisor = Supervisor(self.home, self._bounds, self._general, nodes)
            stack.push_async_callback(self._supervisor.stop, self._shutdown_s)
            sweeper = Sweeper(self.home.run, self._supervisor.lifeline.read_fd)
            stack.callback(sweeper.stop)
            sweeper.start()
            server = None if self._port is None else self._listen(self._port)
            if server is not None:
                stack.callback(server.close)
            for site in sites:
                self.keysmanagers[site.node.name] = self._start_keysmanager(site)
                stack.push_async_callback(self.keysmanagers[site.node.name].stop, SYSTEM_STOP_S)
            await self._supervisor.start()
            control = Control(self._supervisor)
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
        """Creates or replaces functions; one that is deployed just so already is left alone."""
        known = {f.deployment.service: f.deployment for f in self.supervisor.view().functions}
        for deployment in deployments:
            if known.get(deployment.service) != deployment:
                self.supervisor.handle(Deployed(deployment))

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
        program = Program((sys.executable, "-m", f"keystage.{name}.app"), env, serves_http=server is not None)
        return self._keep(name, program, server)

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
    ) -> SystemProcess:
        kept = SystemProcess(
            name,
            program,
            logs=self.home.logs,
            lifeline_fd=self.supervisor.lifeline.read_fd,
            now=self.supervisor.now,
            server=server,
            started=started,
        )
        kept.start()
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
