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

from keystage.local.ledger import backoff_s
from keystage.local.logs import ReplicaLog
from keystage.local.process import Process, spawn
from keystage.local.program import Program

HEALTHY_S = 30.0
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
        self._in_a_row = 0
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_failing(self) -> bool:
        """Whether it crashes again and again."""
        return self._in_a_row >= FAILING

    def start(self) -> None:
        """Starts it and keeps it running until `stop`."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def kill(self) -> None:
        """Ends it at once; it is started anew."""
        if self.process is not None:
            self.process.signal_group(signal.SIGKILL)

    async def stop(self, within_s: float) -> None:
        """SIGTERM, at most `within_s` seconds, then SIGKILL; closes the listening socket."""
        self._closing = True
        if self.process is not None:
            self.process.terminate()
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=within_s)
            if not done:
                if self.process is not None:
                    self.process.signal_group(signal.SIGKILL)
                else:
                    self._task.cancel()
                await asyncio.wait([self._task])
        if self._server is not None:
            self._server.close()

    async def _keep(self) -> None:
        while not self._closing:
            started_at_s = self._now()
            log = ReplicaLog(self._logs / f"_{self.name}.log")
            self.process = spawn(self._program, log=log, lifeline_fd=self._lifeline_fd, server=self._server)
            if self._started is not None:
                self._started(self.process.pid)
            await self.process.wait(self._now)
            self.process = None
            if self._closing:
                return
            self.restarts += 1
            self._in_a_row = 1 if self._now() - started_at_s >= HEALTHY_S else self._in_a_row + 1
            await asyncio.sleep(backoff_s(self._in_a_row))
