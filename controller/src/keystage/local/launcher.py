"""Starts and ends the processes of replicas: forked by the node's KeysManager, else as plain programs.

Between `local.supervisor`, which says which and hears what became of them, and `local.node` and
`local.process`. What runs our own code is forked where its node has a KeysManager; when that is not possible
the replica becomes a plain process and its record says why. It must not decide which replicas there are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from keystage.local.adopted import Orphans
from keystage.local.events import Start, Started
from keystage.local.handover import KeptProcess
from keystage.local.logs import ReplicaLog
from keystage.local.node import Node, NotForked
from keystage.local.process import Process, spawn
from keystage.local.program import Program

log = logging.getLogger(__name__)

REAP_EVERY_S = 1.0
WITHOUT_PARAMETERS_S = 2.0
"""A router that starts anew waits no longer for a fork server that starts anew, too: its clients wait for it,
and a process of its own is there as soon."""


class Launcher:
    """Processes of replicas by name.

    Args:
        nodes: nodes with a KeysManager, by name.
        lifeline_fd: read end of the lifeline of plain processes.
        logs: folder of their output.
        offset_s: Unix seconds minus `time.monotonic`.
        now: clock in Unix seconds.
        started: called in a later turn of the loop when a process runs.
        exited: likewise when it is gone or could not be started, with one line on how.

    Attributes:
        processes: those that run.
        orphans: what daemons leave behind.
    """

    def __init__(
        self,
        nodes: Mapping[str, Node],
        *,
        lifeline_fd: int,
        logs: Path,
        offset_s: float,
        now: Callable[[], float],
        started: Callable[[Started, Program], None],
        exited: Callable[[str, str], None],
    ) -> None:
        self.processes: dict[str, Process] = {}
        self.orphans = Orphans(lambda: [process.pid for process in self.processes.values()])
        self._nodes = nodes
        self._lifeline_fd = lifeline_fd
        self._logs = logs
        self._offset_s = offset_s
        self._now = now
        self._started = started
        self._exited = exited
        self._forking: dict[str, asyncio.Task[None]] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []
        self._closing = False

    def begin(self) -> None:
        """Begins to follow the nodes."""
        if self._nodes:
            works: Iterable[Coroutine[Any, Any, None]] = (n.watch() for n in self._nodes.values())
            self._background = [asyncio.create_task(work) for work in (self._reap_orphans(), *works)]

    async def end(self, within_s: float) -> None:
        """Ends every process: SIGTERM, at most `within_s` seconds, then SIGKILL."""
        self._closing = True
        for task in (*self._forking.values(), *self._background):
            task.cancel()
        await asyncio.gather(*self._forking.values(), *self._background, return_exceptions=True)
        for process in self.processes.values():
            process.terminate()
        if self._lives:
            await asyncio.wait(self._lives, timeout=within_s)
        for process in self.processes.values():
            process.signal_group(signal.SIGKILL)
        if self._lives:
            await asyncio.wait(self._lives)
        if self._nodes:
            await asyncio.to_thread(self.orphans.end)

    def start(self, start: Start, command: Program) -> None:
        """Starts a replica; `started` or `exited` tells what came of it."""
        try:
            output = ReplicaLog(self._logs / f"{start.replica}.log")
        except OSError as error:
            self._exit(start.replica, f"its log cannot be written: {error}")
            return
        node = self._nodes.get(start.node)
        if node is None or not command.module:
            self._spawn(Started(start.replica, 0, ""), command, output)
            return
        forking = asyncio.get_running_loop().create_task(self._fork(start, node, command, output))
        self._forking[start.replica] = forking
        forking.add_done_callback(lambda task: self._fork_over(start.replica, task, output))

    async def forked(self) -> None:
        """Waits until no KeysManager forks one for us."""
        while self._forking:
            await asyncio.wait(list(self._forking.values()))

    def resume(self, replica: str, kept: KeptProcess) -> None:
        """Goes on with a replica that runs; `exited` tells when it is gone."""
        output = ReplicaLog(self._logs / f"{replica}.log")
        self._follow(replica, Process.resumed(kept, output))

    def refuse(self, replica: str, reason: str) -> None:
        """A replica that cannot be started: `exited` tells why."""
        self._exit(replica, reason)

    def terminate(self, replica: str) -> None:
        """Tells a replica to finish its work and exit."""
        self._give_up_fork(replica)
        if replica in self.processes:
            self.processes[replica].terminate()

    def kill(self, replica: str) -> None:
        """Ends a replica at once."""
        self._give_up_fork(replica)
        if replica in self.processes:
            self.processes[replica].signal_group(signal.SIGKILL)

    async def _fork(self, start: Start, node: Node, command: Program, output: ReplicaLog) -> None:
        replica = start.replica
        bound_s = None if command.tells_start or not node.has_forked else WITHOUT_PARAMETERS_S
        wanted_at_s = start.wanted_at_s - self._offset_s
        try:
            async with asyncio.timeout(bound_s):
                process, forked = await node.fork(
                    replica, command, replica_log=output, wanted_at_s=wanted_at_s
                )
            self._live_with(process, command, Started(replica, 0, "", forked.via, forked.source, forked.note))
        except (NotForked, TimeoutError) as failed:
            error = failed if str(failed) else NotForked(f"it was not forked within {bound_s:g} s")
            log.warning("%s is started as a plain process: %s", replica, error)
            here = dataclasses.replace(command, env={**command.env, **node.env})
            self._spawn(Started(replica, 0, "", note=str(error)), here, output)

    def _fork_over(self, replica: str, task: asyncio.Task[None], output: ReplicaLog) -> None:
        del self._forking[replica]
        if task.cancelled():
            output.close(self._now())
            self._exit(replica, "was told to end before it was forked")
        elif (
            error := task.exception()
        ) is not None:  # no descriptors left, or a bug: the replica must not hang
            log.error("%s was not started", replica, exc_info=error)
            output.close(self._now())
            self._exit(replica, f"was not started: {error or type(error).__name__}")

    def _give_up_fork(self, replica: str) -> None:
        forking = self._forking.get(replica)
        if forking is not None:
            forking.cancel()

    def _spawn(self, started: Started, command: Program, output: ReplicaLog) -> None:
        try:
            process = spawn(command, log=output, lifeline_fd=self._lifeline_fd)
        except OSError as error:
            output.close(self._now())
            self._exit(started.replica, f"{command.argv[0]} cannot be started: {error.strerror}")
            return
        self._live_with(process, command, started)

    def _live_with(self, process: Process, command: Program, started: Started) -> None:
        self._follow(started.replica, process)
        known = dataclasses.replace(started, pid=process.pid, address=process.address)
        asyncio.get_running_loop().call_soon(self._report, known, command)

    def _follow(self, replica: str, process: Process) -> None:
        self.processes[replica] = process
        life = asyncio.get_running_loop().create_task(self._live(replica, process))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    def _report(self, started: Started, command: Program) -> None:
        if started.replica in self.processes and not self._closing:
            self._started(started, command)

    async def _live(self, replica: str, process: Process) -> None:
        try:
            reason = await process.wait(self._now)
        except OSError as error:  # it is reaped all the same
            reason = f"it could not be followed: {error}"
        finally:
            del self.processes[replica]
        if not self._closing:
            self._exited(replica, reason)

    def _exit(self, replica: str, reason: str) -> None:
        if not self._closing:
            asyncio.get_running_loop().call_soon(self._exited, replica, reason)

    async def _reap_orphans(self) -> None:
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            if not self._forking:  # one of them might be a replica that we are about to hear of
                try:
                    self.orphans.reap()
                except OSError as error:
                    log.warning("orphans are looked for again in a moment: %s", error)
