"""The probes of all replicas: a task each that asks whether it is ready, later whether it is alive.

Between `local.supervisor`, which says whom to follow and hears of it in events, and `local.probe`. It must
not judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from keystage.local import probe, starts
from keystage.local.events import Answered, Event, Missed
from keystage.local.program import Program


class Probes:
    """Tasks by replica.

    Args:
        handle: takes what they find.
        is_at_work: whether a replica is known to have requests.
        told: takes what replicas say of their start.
        go: runs a task.

    Attributes:
        session: asks them; None before `open`.
    """

    def __init__(
        self,
        handle: Callable[[Event], None],
        is_at_work: Callable[[str], bool],
        told: starts.Starts,
        go: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._handle = handle
        self._is_at_work = is_at_work
        self._told = told
        self._go = go
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self.session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Makes the session, on the running event loop."""
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0), auto_decompress=False
        )

    async def close(self) -> None:
        """Ends the session; whoever runs the tasks ends them before."""
        if self.session is not None:
            await self.session.close()

    def follow(self, replica: str, command: Program, address: str) -> None:
        """Begins to ask one that runs."""
        assert self.session is not None
        asking = probe.follow(
            self.session,
            command,
            address,
            lambda: self._handle(Answered(replica)),
            lambda is_silent: self._handle(Missed(replica, is_silent)),
            lambda: self._is_at_work(replica),
        )
        self._tasks[replica] = [self._go(asking)]
        if command.tells_start:
            tells = starts.follow(self.session, address, lambda report: self._told.told(replica, report))
            self._tasks[replica].append(self._go(tells))

    def stop(self, replica: str) -> None:
        """Asks it no longer."""
        for task in self._tasks.pop(replica, ()):
            task.cancel()
