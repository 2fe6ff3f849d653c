"""Watches the pipeline while a replay runs: router counters and the gateway's replica numbers.

Runs beside `sender` in the same event loop, on connections of its own, and feeds `series`. A
reading that fails is counted and left out; it never disturbs the replay.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import re
import time

import aiohttp
import msgspec

from keystage.loadgen.series import StageSeries
from keystage.router.api import RouterStats
from keystage.wire.unreadable import UNREADABLE

POLL_S = 0.5
"""Twice the controller's tick: every scaling step is seen within one reading or the next."""

_READ_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """Basic-auth credentials of the gateway's management API."""

    user: str
    password: str = dataclasses.field(repr=False)

    @property
    def header(self) -> str:
        """Value of the `Authorization` header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


@dataclasses.dataclass(frozen=True, slots=True)
class Watched:
    """What to watch.

    Attributes:
        stats_url: the router's counters.
        functions_url: the gateway's list of functions, None without a gateway.
        pipeline: name of the pipeline; its stages are functions `<pipeline>-stage-<k>`.
        credentials: for the list of functions.
    """

    stats_url: str
    functions_url: str | None = None
    pipeline: str = ""
    credentials: Credentials | None = None


class _Function(msgspec.Struct):
    name: str
    replicas: int = 0


class Monitor:
    """Polls until cancelled.

    Attributes:
        series: what was seen.
        polls: readings tried.
        missed: readings of the router's counters that failed.
        last_error: why the newest failed, empty if none did.
    """

    def __init__(self, watched: Watched, start_s: float, poll_s: float = POLL_S) -> None:
        self._watched = watched
        self._start_s = start_s
        self._poll_s = poll_s
        self._stage_name = re.compile(re.escape(watched.pipeline) + r"-stage-(\d+)")
        self.series = StageSeries()
        self.polls = 0
        self.missed = 0
        self.last_error = ""

    async def run(self) -> None:
        """Polls at a fixed pace; ends by cancellation only."""
        timeout = aiohttp.ClientTimeout(total=_READ_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                begun_s = time.monotonic()
                await self.poll(session)
                await asyncio.sleep(max(self._poll_s - (time.monotonic() - begun_s), 0.0))

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """Makes one reading."""
        self.polls += 1
        try:
            async with session.get(self._watched.stats_url) as response:
                response.raise_for_status()
                stats = msgspec.json.decode(await response.read(), type=RouterStats)
        except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE) as error:
            self.missed += 1
            self.last_error = f"{self._watched.stats_url}: {type(error).__name__}: {error}"
            return
        at_s = time.monotonic() - self._start_s
        self.series.add(at_s, stats, await self._desired(session))

    async def _desired(self, session: aiohttp.ClientSession) -> dict[int, int] | None:
        if self._watched.functions_url is None:
            return None
        login = self._watched.credentials
        auth = {} if login is None else {"Authorization": login.header}
        try:
            async with session.get(self._watched.functions_url, headers=auth) as response:
                response.raise_for_status()
                functions = msgspec.json.decode(await response.read(), type=list[_Function])
        except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE) as error:
            self.last_error = f"{self._watched.functions_url}: {type(error).__name__}: {error}"
            return None
        stages = ((self._stage_name.fullmatch(function.name), function) for function in functions)
        return {int(match[1]): function.replicas for match, function in stages if match}
