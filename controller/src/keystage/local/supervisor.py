"""Runs replicas as processes, as the ledger says: the local world's API server and kubelet.

Between `local.control` (requests) and `local.process` (children). Every request and every thing
that happens to a child becomes a ledger event; the instructions that come back are carried out at
once. All decisions are the ledger's; this module must not make any.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Coroutine, Mapping
from typing import Any, assert_never

import aiohttp

from keystage.local import cores, logs, store
from keystage.local.api import FunctionRecord, View
from keystage.local.errors import UnknownFunction
from keystage.local.events import (
    Answered,
    Deployed,
    Event,
    Exited,
    Instruction,
    Kill,
    Missed,
    Removed,
    SetCores,
    Start,
    Started,
    Terminate,
    Ticked,
)
from keystage.local.home import Home
from keystage.local.ledger import Bounds, Ledger
from keystage.local.probe import follow
from keystage.local.process import Process, spawn
from keystage.local.program import Program, program, threads_of

TICK_S = 0.1


class Lifeline:
    """The pipe whose write end only this process holds."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def close(self) -> None:
        """Cuts it: every child that watches ends."""
        os.close(self._write_fd)
        os.close(self.read_fd)


class Supervisor:
    """Functions, their replicas, and their processes.

    Attributes:
        lifeline: read end goes to every child.
    """

    def __init__(self, home: Home, bounds: Bounds, inherited: Mapping[str, str]) -> None:
        self.lifeline = Lifeline()
        self._home = home
        self._ledger = Ledger(bounds)
        self._inherited = inherited
        self._processes: dict[str, Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lives: set[asyncio.Task[None]] = set()
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._pins = cores.Pins(os.sched_getaffinity(0))
        self._session: aiohttp.ClientSession | None = None
        self._offset_s = time.time() - time.monotonic()
        self._incarnation = secrets.token_hex(8)
        self._version = 1
        self._changed = asyncio.Event()
        self._closing = False

    def now(self) -> float:
        """Unix seconds that never jump."""
        return self._offset_s + time.monotonic()

    async def start(self) -> None:
        """Starts what was deployed when the last run ended.

        Raises:
            CorruptState: functions.json cannot be read.
            BadDeployment: it holds something that cannot run.
        """
        for record in store.load(self._home.functions):
            self._ledger.restore(record)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0), auto_decompress=False
        )
        self._go(self._tick())
        self.handle(Ticked())

    async def stop(self, within_s: float) -> None:
        """Ends every process: SIGTERM, at most `within_s` seconds, then SIGKILL."""
        self._closing = True
        for process in self._processes.values():
            process.terminate()
        if self._lives:
            await asyncio.wait(self._lives, timeout=within_s)
        for process in self._processes.values():
            process.signal_group(signal.SIGKILL)
        if self._lives:
            await asyncio.wait(self._lives)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        self.lifeline.close()
        self._changed.set()

    # ------------------------------------------------------------ requests

    def handle(self, event: Event) -> None:
        """Takes one event and carries out what the ledger answers.

        Raises:
            BadDeployment: see `Ledger.handle`.
            UnknownFunction: see `Ledger.handle`.
        """
        functions, replicas = self._functions(), self._ledger.replicas()
        for instruction in self._ledger.handle(event, self.now()):
            self._perform(instruction)
        is_new = self._functions() != functions
        if is_new or self._ledger.replicas() != replicas:
            self._version += 1
            self._changed.set()
            self._changed = asyncio.Event()
        if is_new:
            durable = isinstance(event, Deployed | Removed)
            store.save(self._home.functions, self._ledger.functions.values(), durable=durable)

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

    def log(self, name: str, *, tail: int | None, since_s: float) -> list[tuple[float, str, str]]:
        """A function's output; see `logs.query`.

        Raises:
            UnknownFunction: there is none of that name.
        """
        self.function(name)
        return logs.query(self._home.logs, name, tail=tail, since_s=since_s)

    def _functions(self) -> tuple[FunctionRecord, ...]:
        return tuple(self._ledger.functions.values())

    # ------------------------------------------------------------ processes

    def _perform(self, instruction: Instruction) -> None:
        if self._closing:
            return
        match instruction:
            case Start(replica, deployment):
                logs.prune(self._home.logs, deployment.service)
                command = program(deployment, replica=replica, run=self._home.run, inherited=self._inherited)
                self._start(replica, command)
            case Terminate(replica):
                self._stop_probe(replica)
                if replica in self._processes:
                    self._processes[replica].terminate()
            case Kill(replica):
                if replica in self._processes:
                    self._processes[replica].signal_group(signal.SIGKILL)
            case SetCores(replica, count, tell):
                self._set_cores(replica, count, tell)
            case _:
                assert_never(instruction)

    def _set_cores(self, replica: str, count: float, tell: bool) -> None:
        process = self._processes.get(replica)
        if process is None or self._session is None:
            return
        cores.pin(process.pid, self._pins.assign(replica, count))
        if tell:
            self._go(cores.tell(self._session, process.address, threads_of(count)))

    def _start(self, replica: str, command: Program) -> None:
        log = logs.ReplicaLog(self._home.logs / f"{replica}.log")
        try:
            process = spawn(command, log=log, lifeline_fd=self.lifeline.read_fd)
        except OSError as error:
            log.close(self.now())
            reason = f"{command.argv[0]} cannot be started: {error.strerror}"
            asyncio.get_running_loop().call_soon(self.handle, Exited(replica, reason))
            return
        self._processes[replica] = process
        life = self._go(self._live(replica, process))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)
        asyncio.get_running_loop().call_soon(self._report_started, replica, process, command)

    def _report_started(self, replica: str, process: Process, command: Program) -> None:
        if replica not in self._processes or self._closing:
            return
        self.handle(Started(replica, process.pid, process.address))
        assert self._session is not None
        self._probes[replica] = self._go(
            follow(
                self._session,
                command,
                process.address,
                lambda: self.handle(Answered(replica)),
                lambda: self.handle(Missed(replica)),
            )
        )

    async def _live(self, replica: str, process: Process) -> None:
        reason = await process.wait(self.now)
        self._stop_probe(replica)
        self._pins.forget(replica)
        del self._processes[replica]
        if not self._closing:
            self.handle(Exited(replica, reason))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.handle(Ticked())

    def _stop_probe(self, replica: str) -> None:
        probe = self._probes.pop(replica, None)
        if probe is not None:
            probe.cancel()

    def _go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
