"""Keeps gateway and controller running beside the functions.

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


class SystemProcess:
    """One kept process.

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
    ) -> None:
        self.name = name
        self.process: Process | None = None
        self.restarts = 0
        self._program = program
        self._logs = logs
        self._lifeline_fd = lifeline_fd
        self._now = now
        self._server = server
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts it and keeps it running until `stop`."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

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
        in_a_row = 0
        while not self._closing:
            started_at_s = self._now()
            log = ReplicaLog(self._logs / f"_{self.name}.log")
            self.process = spawn(self._program, log=log, lifeline_fd=self._lifeline_fd, server=self._server)
            await self.process.wait(self._now)
            self.process = None
            if self._closing:
                return
            self.restarts += 1
            in_a_row = 1 if self._now() - started_at_s >= HEALTHY_S else in_a_row + 1
            await asyncio.sleep(backoff_s(in_a_row))
