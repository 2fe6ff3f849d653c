"""Runs replicas as processes, as the ledger says: the local world's API server and kubelet.

Between `local.control` (requests) and `local.launcher` (processes). Every request and every thing
that happens to a process becomes a ledger event; the instructions that come back are carried out at
once. All decisions are the ledger's; this module must not make any.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, assert_never

import msgspec

from keystage.keysmanager import inventory
from keystage.local import cores, key_stages, logs, starts, store, strays
from keystage.local import events as ev
from keystage.local.adopted import Orphans
from keystage.local.api import FunctionRecord, KeyStageList, Load, NodeRecord, StartRecord, Usage, View
from keystage.local.errors import BadSecret, UnknownFunction
from keystage.local.gpus import DEVICE, Gpus
from keystage.local.handover import Handover, KeptReplica
from keystage.local.home import Home
from keystage.local.launcher import Launcher
from keystage.local.ledger import Bounds, Ledger
from keystage.local.lifeline import Lifeline
from keystage.local.node import Node
from keystage.local.probes import Probes
from keystage.local.program import Program, program, threads_of
from keystage.local.secret_store import SecretStore
from keystage.local.site import RouterAddresses
from keystage.local.usage import Meter
from keystage.observability.board import Board
from keystage.wire.upkeep import Upkeep

TICK_S = 0.1
HOLD_S = 0.01

log = logging.getLogger(__name__)


class Supervisor:
    """Functions, their replicas, and their processes.

    Args:
        home: state folder, open.
        bounds: time limits of replicas.
        inherited: variables that every replica gets.
        nodes: nodes with a KeysManager; without any, everything is started as a plain process.
        routers: variables that every router gets beside those.
        kept: what a predecessor in this process handed over.

    Attributes:
        lifeline: read end goes to every child.
        secrets: what functions may be given.
        reports: the newest report of the controller, for those who look on.
    """

    def __init__(
        self,
        home: Home,
        bounds: Bounds,
        inherited: Mapping[str, str],
        nodes: Sequence[Node] = (),
        routers: Mapping[str, str] = MappingProxyType({}),
        kept: Handover | None = None,
    ) -> None:
        self.lifeline = Lifeline(kept.lifeline if kept is not None else None)
        self.secrets = SecretStore(home.secrets, home.replica_secrets)
        self.reports = Board()
        self._meter = Meter()
        self._timeout_s = bounds.timeout_s
        self._nodes = {node.name: node for node in nodes}
        self._routers = RouterAddresses(home.run, nodes[0].name if len(nodes) > 1 else "")
        self._key_stages: dict[str, tuple[int, ...]] = {}
        self._home = home
        self._ledger = Ledger(bounds, tuple(self._nodes) or ("",))
        self._inherited, self._for_routers = inherited, routers
        self._tasks: set[asyncio.Task[None]] = set()
        self._pins = cores.Pins(os.sched_getaffinity(0))
        self._gpus = Gpus(inventory.visible(inherited))
        self._kept = kept
        self._held: list[ev.Start] | None = None
        self._offset_s = time.time() - time.monotonic() if kept is None else kept.offset_s
        self._starts = starts.Starts(self._offset_s)
        self._probes = Probes(
            self.handle, lambda replica: self._ledger.is_at_work(replica, self.now()), self._starts, self._go
        )
        self._launcher = Launcher(
            self._nodes,
            lifeline_fd=self.lifeline.read_fd,
            logs=home.logs,
            offset_s=self._offset_s,
            now=self.now,
            started=self._report_started,
            exited=self._gone,
        )
        self._incarnation = secrets.token_hex(8)
        self._version = 1
        self._changed = asyncio.Event()
        self._closing = False

    @property
    def orphans(self) -> Orphans:
        """What KeysManagers leave behind."""
        return self._launcher.orphans

    def now(self) -> float:
        """Unix seconds that never jump."""
        return self._offset_s + time.monotonic()

    async def start(self) -> None:
        """Starts what was deployed when the last run ended.

        Raises:
            CorruptState: functions.json cannot be read.
            BadDeployment: it holds something that cannot run.
        """
        self.secrets.sweep()
        for record in store.load(self._home.functions):
            self._ledger.restore(record)
        self._probes.open()
        if self._kept is not None:
            self._resume(self._kept)
        self.remove_strays()
        self._go(self._tick())
        self._launcher.begin()
        self.handle(ev.Ticked())

    def _resume(self, kept: Handover) -> None:
        """Goes on with what a predecessor started."""
        self._ledger.resume((one.replica for one in kept.replicas), kept.numbers)
        self._routers.known.update(kept.routers)
        for one in kept.replicas:
            if one.process is None:
                continue
            record = one.replica.record
            self._launcher.resume(record.replica, one.process)
            function = self._ledger.functions.get(record.function)
            if function is not None and record.state in ("starting", "ready"):
                asked = program(function.deployment, replica=record.replica, run=self._home.run, inherited={})
                self._probes.follow(record.replica, asked, record.address)

    async def hold(self) -> None:
        """Starts nothing from now on, and waits until no start is under way."""
        self._held = []
        await self._launcher.forked()
        await asyncio.sleep(HOLD_S)  # what was started in this turn is known in the next

    def go_on(self) -> None:
        """Starts again, first what was held back."""
        held, self._held = self._held or [], None
        for start in held:
            self._start(start)

    def kept(self) -> tuple[tuple[KeptReplica, ...], dict[str, int], dict[str, str]]:
        """What a successor goes on with, after `hold`: replicas, next numbers, inbox addresses of routers."""
        replicas, numbers = self._ledger.kept()
        processes = {name: one.kept for name, one in self._launcher.processes.items() if one.alive}
        known = ((replica, processes.get(replica.record.replica)) for replica in replicas)
        kept = tuple(KeptReplica(r, process) for r, process in known if process or r.state == "failed")
        return kept, numbers, dict(self._routers.known)

    async def stop(self, within_s: float) -> None:
        """Ends every process: SIGTERM, at most `within_s` seconds, then SIGKILL."""
        self._closing = True
        await self._launcher.end(within_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._probes.close()
        self.lifeline.close()
        self._changed.set()

    # ------------------------------------------------------------ requests

    def handle(self, event: ev.Event) -> None:
        """Takes one event and carries out what the ledger answers.

        Raises:
            BadDeployment: see `Ledger.handle`; also a deployment with a secret that is not there.
            UnknownFunction: see `Ledger.handle`.
        """
        if isinstance(event, ev.Deployed):
            self.secrets.check(event.deployment.service, event.deployment.secrets)
            strays.check(event.deployment)
        functions, replicas = self._functions(), self._ledger.replicas()
        for instruction in self._ledger.handle(event, self.now()):
            self._perform(instruction)
        is_new = self._functions() != functions
        if is_new or self._ledger.replicas() != replicas:
            self._version += 1
            self._changed.set()
            self._changed = asyncio.Event()
        if is_new:
            self._keep_key_stages()
            if isinstance(event, ev.Removed):
                self._meter.forget(event.function)
            durable = isinstance(event, ev.Deployed | ev.Removed)
            store.keep(self._home.functions, self._ledger.functions.values(), durable=durable)
        if isinstance(event, ev.Deployed) and strays.may_leave(event.deployment):
            self.remove_strays()

    def remove_strays(self) -> None:
        """Removes stage functions that their pipelines do not have any longer; see `local.strays`."""
        for name, reason in strays.strays(f.deployment for f in self._functions()).items():
            log.warning("function %s is removed: %s", name, reason)
            self.handle(ev.Removed(name))

    def function(self, name: str) -> FunctionRecord:
        """Record of a deployed function.

        Raises:
            UnknownFunction: there is none of that name.
        """
        try:
            return self._ledger.functions[name]
        except KeyError:
            raise UnknownFunction(f"function {name} is not deployed") from None

    def view(self) -> View:
        """Everything at this moment."""
        return View(
            version=self._version,
            incarnation=self._incarnation,
            functions=list(self._ledger.functions.values()),
            replicas=self._ledger.replicas(),
        )

    async def watch(self, since: int, timeout_s: float) -> View:
        """Waits for a version above `since`, at most `timeout_s` seconds."""
        if self._version <= since and not self._closing:
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), timeout_s)
        return self.view()

    def loaded(self, name: str | None = None) -> list[FunctionRecord]:
        """Records of all functions, or of one, with what gateways say of their load.

        Raises:
            UnknownFunction: there is none of that name.
        """
        records = self._functions() if name is None else (self.function(name),)
        at_s = self.now()
        return [
            msgspec.structs.replace(record, loads=loads)
            if (loads := self._ledger.loads.of(record.deployment.service, at_s))
            else record
            for record in records
        ]

    def hear(self, name: str, load: Load) -> None:
        """Takes a gateway's report. It is no change that watchers are told.

        Raises:
            UnknownFunction: there is none of that name, nor a replica of a removed one.
            BadDeployment: see `Loads.hear`.
        """
        self.handle(ev.Loaded(name, load))

    async def usage(self, name: str) -> Usage:
        """What a function's replicas use.

        Raises:
            UnknownFunction: there is none of that name.
        """
        self.function(name)

        def groups() -> list[int]:
            return [r.pid for r in self._ledger.replicas() if r.function == name and r.pid > 0]

        return await self._meter.measure(name, groups)

    def log(self, name: str, *, tail: int | None, since_s: float) -> list[tuple[float, str, str]]:
        """A function's output; see `logs.query`.

        Raises:
            UnknownFunction: there is none of that name.
        """
        self.function(name)
        return logs.query(self._home.logs, name, tail=tail, since_s=since_s)

    def set_key_stages(self, ranking: KeyStageList) -> None:
        """Replaces a pipeline's list of key stages; nodes keep them in memory as far as there is room."""
        self._key_stages[ranking.pipeline] = ranking.stages
        self._keep_key_stages()

    def nodes(self) -> list[NodeRecord]:
        """Nodes with a KeysManager."""
        return [node.record() for node in self._nodes.values()]

    def starts(self) -> list[StartRecord]:
        """How the newest starts went."""
        return self._starts.records()

    def monotonic_to_unix(self, monotonic_s: float) -> float:
        """A moment of this machine's `time.monotonic` in Unix seconds; 0 stays 0."""
        return monotonic_s + self._offset_s if monotonic_s else 0.0

    def _keep_key_stages(self) -> None:
        stages = key_stages.resolve(self._key_stages, (f.deployment for f in self._functions()))
        for node in self._nodes.values():
            node.keep(stages)

    def _functions(self) -> tuple[FunctionRecord, ...]:
        return tuple(self._ledger.functions.values())

    # ------------------------------------------------------------ processes

    def _perform(self, instruction: ev.Instruction) -> None:
        if self._closing:
            return
        match instruction:
            case ev.Start() if self._held is not None:
                self._held.append(instruction)
            case ev.Start():
                self._start(instruction)
            case ev.Terminate(replica):
                self._probes.stop(replica)
                self._launcher.terminate(replica)
            case ev.Kill(replica):
                self._launcher.kill(replica)
            case ev.SetCores(replica, count, tell):
                self._set_cores(replica, count, tell)
            case _:
                assert_never(instruction)

    def _set_cores(self, replica: str, count: float, tell: bool) -> None:
        process = self._launcher.processes.get(replica)
        if process is None or self._probes.session is None:
            return
        cores.pin(process.pid, self._pins.assign(replica, count))
        if tell:
            token = self._home.keysmanager_token
            self._go(cores.tell(self._probes.session, process.address, threads_of(count), token))

    def _start(self, start: ev.Start) -> None:
        function = start.deployment.service
        logs.prune(self._home.logs, function)
        try:
            secrets_folder = self.secrets.lay_out(start.replica, start.deployment.secrets)
        except (BadSecret, OSError) as error:
            self._launcher.refuse(start.replica, f"was not started: {error}")
            return
        command = program(
            start.deployment,
            replica=start.replica,
            run=self._home.run,
            inherited=self._inherited,
            router=self._routers.of(start.deployment.envVars.get("KEYSTAGE_PIPELINE", "")),
            secrets=secrets_folder,
            internal_token=self._home.keysmanager_token.absolute(),
            timeout_s=self._timeout_s,
            routers=self._for_routers,
        )
        device = start.deployment.envVars.get(DEVICE, "")
        living = {record.replica for record in self._ledger.replicas()}
        if chosen := self._gpus.assign(start.replica, function, device, living):
            command = dataclasses.replace(command, env={**command.env, **chosen})
        self._starts.wanted(start.replica, function, start.node, start.wanted_at_s)
        self._launcher.start(start, command)

    def _report_started(self, started: ev.Started, command: Program) -> None:
        replica = started.replica
        self._starts.forked(replica, self.now(), via=started.via, source=started.source, note=started.note)
        self.handle(started)
        self._probes.follow(replica, command, started.address)

    def _gone(self, replica: str, reason: str) -> None:
        self._probes.stop(replica)
        self._pins.forget(replica)
        self.secrets.clear(replica)
        self.handle(ev.Exited(replica, reason))

    async def _tick(self) -> None:
        upkeep = Upkeep()
        while True:
            await asyncio.sleep(TICK_S)
            upkeep.now_and_then()
            try:
                self.handle(ev.Ticked())
            except OSError as error:  # descriptors or disk are used up just now; the next tick tries again
                log.warning("tick: %s", error)

    def _go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
