"""Replacing a running system by another version of the program, part by part, while it serves.

Asked over the control socket (`POST /upgrade`, `keystage upgrade`). First the supervisor becomes its
successor (`local.handover`); that one then renews, one after another, controller, gateway, KeysManagers, the
stages of every pipeline, and last the routers. New replicas of a stage are ready before old ones leave; the
gateway's and the router's callers wait in a queue meanwhile. What does not become ready ends the upgrade
there: what ran before goes on. It must not know how parts are started.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from keystage.local.api import Successor, UpgradeRequest, UpgradeStatus, role_of
from keystage.local.errors import NotUpgraded
from keystage.local.events import Renewed
from keystage.local.handover import FORM, MODULE, hand_over
from keystage.wire.versions import VERSIONS, Versions, common, differ

if TYPE_CHECKING:
    from keystage.local.system import SystemProcess
    from keystage.local.world import LocalWorld

CHECK_S = 60.0
"""For a successor to say that it could."""
QUIET_S = 60.0
"""For starts that are under way to come to an end."""
ANSWER_S = 0.2
"""For the answer to reach who asked: the connection ends with this program."""
PART_S = 60.0
"""For gateway, controller or a KeysManager to be started anew."""
POLL_S = 0.05
LEAVE_S = 630.0
"""For a gateway's last requests: a little more than the longest that a request may take by default."""

SUPERVISOR = "supervisor"

log = logging.getLogger(__name__)


def version() -> str:
    """Version of this installation, `unknown` where it is none."""
    try:
        return importlib.metadata.version("keystage")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class Upgrades:
    """Upgrades of one world.

    Args:
        world: the world.
        is_successor: it goes on with what another version began: the upgrade is under way.

    Attributes:
        hindrance: why none may begin now, empty: one may.
    """

    def __init__(self, world: LocalWorld, *, is_successor: bool) -> None:
        self._world = world
        self.hindrance = ""
        step = SUPERVISOR if is_successor else ""
        self._status = UpgradeStatus(version=version(), step=step, is_over=not is_successor, error="")
        self._going: asyncio.Task[None] | None = None

    @property
    def status(self) -> UpgradeStatus:
        """How the last one stands."""
        return self._status

    async def begin(self, request: UpgradeRequest) -> Successor:
        """Looks at the successor; a moment later this program becomes it.

        Raises:
            NotUpgraded: another upgrade is under way, or that installation cannot take over; says why.
        """
        if not self._status.is_over or self._going is not None:
            raise NotUpgraded(f"an upgrade is under way: {self._status.step or 'begins'}")
        if self.hindrance:
            raise NotUpgraded(self.hindrance)
        env = self._environment(request)
        successor = await _ask(request.python, env)
        if successor.form != FORM:
            raise NotUpgraded(
                f"{request.python} (version {successor.version}) takes handovers of form {successor.form}, "
                f"this program makes form {FORM}: end `keystage up` and start it anew"
            )
        theirs = Versions(successor.least, successor.most)
        if common(VERSIONS, theirs) is None:
            told = differ(f"{request.python} (version {successor.version})", theirs, "this program", VERSIONS)
            raise NotUpgraded(f"{told}: end `keystage up` and start it anew")
        self._say(SUPERVISOR)
        self._going = asyncio.get_running_loop().create_task(self._become(request.python, env))
        return successor

    async def renew(self) -> None:
        """What a successor does: renews every part."""
        world = self._world
        try:
            for name, part in (("controller", world.controller), ("gateway", world.gateway)):
                await self._part(name, part)
            for node, part in world.keysmanagers.items():
                await self._part(f"KeysManager of {node}", part)
            for function in self._order():
                await self._function(function)
            if (gateway := world.gateway) is not None and gateway.is_leaving:
                self._say("gateway: its last requests")
                await _until(
                    lambda: not gateway.is_leaving, LEAVE_S + PART_S, "the former gateway did not end"
                )
        except NotUpgraded as error:
            log.error("the upgrade ended: %s", error)
            self._status = msgspec.structs.replace(self._status, is_over=True, error=str(error))
            return
        self._status = msgspec.structs.replace(self._status, is_over=True, step="")

    def _say(self, step: str) -> None:
        log.warning("upgrade: %s", step)
        self._status = msgspec.structs.replace(self._status, step=step, is_over=False, error="")

    @staticmethod
    def _environment(request: UpgradeRequest) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return env | ({"PYTHONPATH": request.path} if request.path else {})

    async def _become(self, python: str, env: dict[str, str]) -> None:
        await asyncio.sleep(ANSWER_S)
        supervisor = self._world.supervisor
        try:
            async with asyncio.timeout(QUIET_S):
                await supervisor.hold()
            hand_over(self._world.handover(), python, env)
        except TimeoutError:
            error = f"starts did not come to an end within {QUIET_S:g} s"
        except OSError as failure:
            error = f"{python} cannot be executed: {failure.strerror}"
        supervisor.go_on()
        self._going = None
        log.error("the upgrade did not begin: %s", error)
        self._status = msgspec.structs.replace(self._status, is_over=True, error=error)

    def _order(self) -> list[str]:
        """Functions of our own programs: stages before routers."""
        deployments = [f.deployment for f in self._world.supervisor.view().functions]
        of_role = {
            role: [d.service for d in deployments if role_of(d) == role] for role in ("stage", "router")
        }
        return of_role["stage"] + of_role["router"]

    async def _part(self, name: str, part: SystemProcess | None) -> None:
        if part is None:
            return
        self._say(name)
        before = part.process
        part.renew(LEAVE_S)
        await _until(lambda: part.process not in (None, before), PART_S, f"{name} was not started anew")

    async def _function(self, name: str) -> None:
        supervisor = self._world.supervisor
        if name not in {f.deployment.service for f in supervisor.view().functions}:
            return  # it was removed meanwhile
        self._say(f"function {name}")
        had_one = any(r.function == name for r in supervisor.view().replicas)
        supervisor.handle(Renewed(name))
        generation = supervisor.function(name).generation

        def is_renewed() -> bool:
            view = supervisor.view()
            records = [f for f in view.functions if f.deployment.service == name]
            mine = [r for r in view.replicas if r.function == name]
            if any(r.generation < generation for r in mine):
                return False  # an old one serves, or ends its work
            is_wanted = had_one and any(record.desired != 0 for record in records)
            ready = [r for r in mine if r.state == "ready"]
            return bool(ready) or not is_wanted

        limit_s = self._world.start_limit_s + self._world.drain_s
        await _until(is_renewed, limit_s, f"function {name} has no ready replica of this version", POLL_S)


async def _until(is_so: Callable[[], bool], within_s: float, what: str, pause_s: float = POLL_S) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not is_so():  # noqa: ASYNC110  (of what is looked at nobody tells changes)
                await asyncio.sleep(pause_s)
    except TimeoutError:
        raise NotUpgraded(f"{what} after {within_s:g} s") from None


async def _ask(python: str, env: dict[str, str]) -> Successor:
    """Lets an installation say what it is.

    Raises:
        NotUpgraded: it does not, or not in time.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-m",
            MODULE,
            "--check",
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise NotUpgraded(f"{python} cannot be executed: {error.strerror}") from None
    try:
        async with asyncio.timeout(CHECK_S):
            told, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise NotUpgraded(f"{python} did not say what it is within {CHECK_S:g} s") from None
    try:
        return msgspec.json.decode(told, type=Successor)
    except msgspec.DecodeError:
        lines = errors.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit code {process.returncode}"
        raise NotUpgraded(f"{python} holds no Keystage that can take over: {why}") from None
