"""Tells the backend what this gateway has in hand for each function, and on which replicas.

The controller scales by it, and replicas that leave are let finish. Before it: `gateway.metrics` and
`gateway.replicas` count. After it: `Backend.tell_load`. A function's first request is told at once, and so is
that a replica left the routing, and that the last request on such a one ended; other changes once a second,
and nothing while nothing happens; what lasts is repeated, since the backend forgets gateways that are
silent. It must not slow a request, nor decide anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid

from keystage.gateway.backend import Backend, GatewayError, UnknownFunction
from keystage.gateway.forever import forever
from keystage.gateway.metrics import Metrics
from keystage.gateway.replicas import Replicas
from keystage.local.api import Load

EVERY_S = 1.0
REPEAT_S = 10.0
"""Several times within the minute for which the backend keeps a report."""
LAST_WORD_S = 1.0
VIEW_S = 3600.0
RETRY_S = 0.1
"""After what nobody foresaw; less than `EVERY_S`, so that the other functions come first then."""
_log = logging.getLogger(__name__)


class LoadReporter:
    """Reports until stopped.

    Args:
        backend: takes reports.
        metrics: counts by function.
        replicas: counts by replica.
        every_s: seconds between two reports on one function.
        repeat_s: seconds after which a function that has requests in flight is told again.

    Attributes:
        gateway: this gateway's name, new with each start.
    """

    def __init__(
        self,
        backend: Backend,
        metrics: Metrics,
        replicas: Replicas,
        *,
        every_s: float = EVERY_S,
        repeat_s: float = REPEAT_S,
    ) -> None:
        self.gateway = f"gateway-{uuid.uuid4().hex}"
        self._backend = backend
        self._metrics = metrics
        self._replicas = replicas
        self._every_s = every_s
        self._repeat_s = repeat_s
        self._stirred = asyncio.Event()
        self._told: dict[str, tuple[float, int]] = {}
        """By function: when it was told last (monotonic seconds), and how much was in flight."""
        self._urgent: set[str] = set()
        self._ready: dict[str, frozenset[str]] = {}
        """Replicas of each function that was told, as the newest view had them."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins to report."""
        self._metrics.stir = self._stirred.set
        self._replicas.let_go = self._hurry
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(forever(self._run, RETRY_S, "telling loads")),
            loop.create_task(forever(self._follow, RETRY_S, "following the view for loads")),
        ]

    async def stop(self) -> None:
        """Ends, and says that nothing is in hand any longer."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        busy = [function for function, (_, in_flight) in self._told.items() if in_flight]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                for function in busy:
                    with contextlib.suppress(GatewayError):
                        load = Load(self.gateway, 0, self._metrics.invocations(function))
                        await self._backend.tell_load(function, load)

    def present(self) -> list[tuple[str, Load]]:
        """What is in hand now, of every function that is deployed or still has requests here."""
        names = {state.deployment.service for state in self._backend.functions()} | self._replicas.busy()
        return [(name, self._load(name)) for name in sorted(names)]

    def _hurry(self, function: str) -> None:
        self._urgent.add(function)
        self._stirred.set()

    async def _follow(self) -> None:
        """Sees replicas leave the routing, and has that told at once; then waits for the next change."""
        self._replicas.note_left()
        for function, before in list(self._ready.items()):
            now = self._replicas.ready(function)
            if before - now:
                self._hurry(function)
            self._ready[function] = now
        await self._backend.changed(VIEW_S)

    async def _run(self) -> None:
        """Tells what is due; then waits until something is."""
        self._stirred.clear()
        for function in self._due(time.monotonic()):
            await self._tell(function)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stirred.wait(), self._pause_s(time.monotonic()))

    def _due(self, now_s: float) -> list[str]:
        return [function for function, at_s in self._times().items() if at_s <= now_s]

    def _pause_s(self, now_s: float) -> float | None:
        """Seconds until something is due, None while nothing will be."""
        times = self._times()
        return max(0.0, min(times.values()) - now_s) if times else None

    def _times(self) -> dict[str, float]:
        """When each function is to be told (again)."""
        times = {f: at_s + self._repeat_s for f, (at_s, in_flight) in self._told.items() if in_flight}
        for function in self._metrics.touched:
            told = self._told.get(function)
            times[function] = 0.0 if told is None else told[0] + self._every_s
        return times | dict.fromkeys(self._urgent, 0.0)

    async def _tell(self, function: str) -> None:
        self._metrics.touched.discard(function)
        self._urgent.discard(function)
        load = self._load(function)
        self._ready[function] = self._replicas.ready(function)
        self._told[function] = (time.monotonic(), load.in_flight)
        try:
            await self._backend.tell_load(function, load)
        except UnknownFunction:
            del self._told[function], self._ready[function]  # removed meanwhile
        except GatewayError as error:
            _log.warning("load of function %s is not told: %s", function, error)
            self._metrics.touched.add(function)
        except Exception:
            self._metrics.touched.add(function)
            raise

    def _load(self, function: str) -> Load:
        return Load(
            self.gateway,
            self._metrics.in_flight(function),
            self._metrics.invocations(function),
            replicas=self._replicas.in_hand(function),
        )
