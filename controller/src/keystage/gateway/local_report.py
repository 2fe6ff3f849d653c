"""The controller's report in the local world: the supervisor keeps it, and one reader here follows it.

Before it: the control socket (`GET /report`). After it: `gateway.local` answers everybody who looks
on, from memory: a hundred open pages ask the supervisor no more than one does, and it is asked nothing
while nobody looks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlencode

from keystage.gateway.backend import BackendUnavailable
from keystage.observability.board import Board, NoReport, Since, stamp_of

WAIT_S = 15.0
"""Of one question; the supervisor answers earlier when there is news."""
ANSWER_S = 10.0
"""More, and it does not answer."""
IDLE_S = 60.0
"""After so long without anybody who looks it is not followed any longer."""
RETRY_S = 0.5
_log = logging.getLogger(__name__)
Ask = Callable[[str, float], Awaitable[bytes]]
"""Asks the supervisor for a path within a time; raises `BackendUnavailable`."""


class ReportReader:
    """Follows the report while somebody looks.

    Args:
        ask: exchanges with the supervisor.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._board = Board()
        self._have: Since = None
        self._task: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        self._looked_at_s = 0.0

    async def report(self, since: Since, wait_s: float) -> bytes | None:
        """See `gateway.backend.Backend.report`."""
        self._looked_at_s = time.monotonic()
        async with self._beginning:
            if self._task is None or self._task.done():  # then what is known here may be of long ago
                await self._fetch(0.0)
                self._task = asyncio.get_running_loop().create_task(self._follow())
        return await self._board.wait(since, wait_s)

    async def stop(self) -> None:
        """Ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        failures = 0
        while time.monotonic() - self._looked_at_s < IDLE_S:
            try:
                await self._fetch(WAIT_S)
            except (BackendUnavailable, NoReport) as error:
                if not failures:
                    _log.warning("the report is not followed: %s", error)
                failures += 1
                await asyncio.sleep(RETRY_S)
            else:
                failures = 0

    async def _fetch(self, wait_s: float) -> None:
        have = self._have
        query = {"wait": f"{wait_s:g}"}
        if have is not None:
            query |= {"controller": have[0], "since": str(have[1])}
        body = await self._ask(f"/report?{urlencode(query)}", wait_s + ANSWER_S)
        if body:
            self._have = stamp_of(body).since  # whether it is news here or not: it is not asked for again
            self._board.put(body)
