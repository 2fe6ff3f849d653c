"""Keeps gateway, controller and KeysManagers running beside the functions.

They are restarted with the same back-off as replicas, and nothing else is touched when one of
them ends. The gateway's listening socket stays open here across its restarts: callers wait in
its queue instead of being refused. Started by `local.up`; must not know functions.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from keystage.local.handover import KeptSystem
from keystage.local.ledger import backoff_s
from keystage.local.logs import ReplicaLog
from keystage.local.process import Process, spawn
from keystage.local.program import Program

HEALTHY_S = 30.0
SECOND_SIGNAL_S = 0.1
FAILING = 4
"""Crashes in a row, each sooner than `HEALTHY_S`, after which nobody should wait for it."""


class SystemProcess:
    """One kept process.

    Args:
        name: see below.
        program: what it runs.
        logs: folder of its log.
        lifeline_fd: read end of the lifeline.
        now: clock in Unix seconds.
        server: listening socket it gets at every start; closed by `stop`.
        started: told the process id at every start.
        stays: it serves on for a while after SIGTERM, and ends at once after a second one.

    Attributes:
        name: name of its log file, `_<name>.log`.
        process: what runs now, None between two runs.
        restarts: how often it was started anew.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        *,
        logs: Path,
        lifeline_fd: int,
        now: Callable[[], float],
        server: socket.socket | None = None,
        started: Callable[[int], None] | None = None,
        stays: bool = False,
    ) -> None:
        self.name = name
        self.process: Process | None = None
        self.restarts = 0
        self._program = program
        self._logs = logs
        self._lifeline_fd = lifeline_fd
        self._now = now
        self._server = server
        self._started = started
        self._stays = stays
        self._in_a_row = 0
        self._closing = False
        self._started_at_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._renewed: set[int] = set()
        self._leaving: dict[asyncio.Task[None], Process] = {}

    @property
    def is_failing(self) -> bool:
        """Whether it crashes again and again."""
        return self._in_a_row >= FAILING

    @property
    def kept(self) -> KeptSystem | None:
        """What a successor needs to go on with it, None between two runs."""
        if self.process is None:
            return None
        return KeptSystem(self.name, self.process.kept, self._started_at_s, self.restarts)

    def start(self, kept: KeptSystem | None = None) -> None:
        """Starts it and keeps it running until `stop`.

        Args:
            kept: one that runs already.
        """
        if kept is not None:
            self.restarts, self._started_at_s = kept.restarts, kept.started_at_s
            self.process = Process.resumed(kept.process, self._log())
            if self._started is not None:
                self._started(self.process.pid)
        self._task = asyncio.get_running_loop().create_task(self._keep())

    @property
    def is_leaving(self) -> bool:
        """Whether one that was renewed has not ended yet."""
        return bool(self._leaving)

    def renew(self, within_s: float) -> None:
        """Starts it anew. One with a socket of ours finishes its work beside its successor.

        Args:
            within_s: seconds that it gets for that.
        """
        old, keeping = self.process, self._task
        if old is None or keeping is None:
            return
        self._renewed.add(old.pid)
        old.terminate()
        if self._server is None:
            return  # the loop that keeps it starts it anew when it has ended
        # Callers wait in the socket's queue until the new one takes them.
        self.process = None
        self._task = asyncio.get_running_loop().create_task(self._keep())
        leaving = asyncio.get_running_loop().create_task(_bounded(old, keeping, within_s))
        self._leaving[leaving] = old
        leaving.add_done_callback(lambda task: self._leaving.pop(task, None))

    def kill(self) -> None:
        """Ends it at once; it is started anew."""
        if self.process is not None:
            self.process.signal_group(signal.SIGKILL)

    async def stop(self, within_s: float) -> None:
        """SIGTERM, at most `within_s` seconds, then SIGKILL; closes the listening socket."""
        self._closing = True
        processes = [one for one in (self.process, *self._leaving.values()) if one is not None]
        tasks = [one for one in (self._task, *self._leaving) if one is not None]
        for process in processes:
            process.terminate()
        if tasks and self._stays:
            _, tasks_left = await asyncio.wait(tasks, timeout=SECOND_SIGNAL_S)
            for process in processes if tasks_left else ():
                process.terminate()
        if tasks:
            _, tasks_left = await asyncio.wait(tasks, timeout=within_s)
            for process in processes if tasks_left else ():
                process.signal_group(signal.SIGKILL)
            if self._task is not None and self.process is None:
                self._task.cancel()  # it waits to start one
            await asyncio.wait(tasks)
        if self._server is not None:
            self._server.close()

    async def _keep(self) -> None:
        while not self._closing:
            process = self.process
            if process is None:
                process = self.process = self._spawn()
            started_at_s = self._started_at_s
            await process.wait(self._now)
            is_renewed = process.pid in self._renewed
            self._renewed.discard(process.pid)
            if self.process is not process:
                return  # another one was started in its place
            self.process = None
            if self._closing:
                return
            if is_renewed:
                continue
            self.restarts += 1
            self._in_a_row = 1 if self._now() - started_at_s >= HEALTHY_S else self._in_a_row + 1
            await asyncio.sleep(backoff_s(self._in_a_row))

    def _log(self) -> ReplicaLog:
        return ReplicaLog(self._logs / f"_{self.name}.log")

    def _spawn(self) -> Process:
        self._started_at_s = self._now()
        process = spawn(self._program, log=self._log(), lifeline_fd=self._lifeline_fd, server=self._server)
        if self._started is not None:
            self._started(process.pid)
        return process


async def _bounded(process: Process, keeping: asyncio.Task[None], within_s: float) -> None:
    """Waits for the end of one that was told to end; kills it when its time is over."""
    await asyncio.wait([keeping], timeout=within_s)
    process.signal_group(signal.SIGKILL)
    await asyncio.wait([keeping])
