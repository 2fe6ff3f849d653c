"""Forks and fills: a replica from fork server, holder or standby, its claim, and what its owner is told.

Below `daemon`. A start ends in one outcome, `Spawned` or `SpawnFailed`; a child whose forker died
before it could tell is ended first, so a failed start leaves no process. A replica whose asker has
gone is ended too: nobody would own it. This module must not choose how a replica is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from keystage.keysmanager import api, events
from keystage.keysmanager.api import Fork, Forked, Parameters, Progress, Via
from keystage.keysmanager.asked import Asked, close_all
from keystage.keysmanager.channel import pair
from keystage.keysmanager.claims import Claims, inode
from keystage.keysmanager.daemon_forker import ForkerError, end_strays
from keystage.keysmanager.metrics import Counts

log = logging.getLogger("keystage.keysmanager")

TRIES = 3
DESCRIPTORS = 3
"""Beside a `Fork`: lifeline, output, HTTP socket."""

Start = Callable[[Sequence[int]], Awaitable[int]]
"""Starts with these descriptors (lifeline, output, HTTP socket, claim); gives the process id."""


class Order:
    """A `Fork` on its way.

    Attributes:
        asked: who waits.
        fork: what is wanted.
        env: the replica's environment, which may differ from the one asked for.
        identities: of the parameters it needs.
        pipeline: for metrics; empty where the replica needs no parameters.
        asked_at_s: `time.monotonic` when it came in.
        via: how it was started.
    """

    def __init__(
        self, asked: Asked, fork: Fork, env: Mapping[str, str], parameters: Sequence[Parameters]
    ) -> None:
        self.asked = asked
        self.fork = fork
        self.env = dict(env)
        self.identities = tuple(each.identity for each in parameters)
        self.pipeline = parameters[0].pipeline if parameters else ""
        self.asked_at_s = time.monotonic()
        self.via: Via = "fork-server"

    def spawn(self) -> api.Spawn:
        """The message to a forker."""
        return api.Spawn(
            replica=self.fork.replica, module=self.fork.module, env=self.env, sharing=self.fork.sharing
        )


class Spawns:
    """Starts under way and the claims of those that run.

    Args:
        tell: takes the outcomes.
        counts: of starts and their phases.

    Attributes:
        claims: of replicas that run.
        starting: forks under way.
        settled: set while there are none.
    """

    def __init__(self, tell: Callable[[events.Event], None], counts: Counts) -> None:
        self._tell = tell
        self._counts = counts
        self._orders: dict[int, Order] = {}
        self.starting = 0
        self.settled = asyncio.Event()
        self.settled.set()
        self.claims = Claims(self._progressed, self._released)

    def expect(self, order: Order) -> None:
        """A `Fork` was taken on."""
        self._orders[order.asked.number] = order

    def order(self, request: int) -> Order | None:
        """The order of a request, None: it was answered, or was none."""
        return self._orders.get(request)

    def forget(self, request: int) -> None:
        """It was refused, or its asker has gone before anything began."""
        self._orders.pop(request, None)

    async def run(self, told: events.Spawn | events.FillStandby, via: Via, start: Start) -> None:
        """Starts the replica of a request; tells `Spawned` or `SpawnFailed`.

        Args:
            told: the ledger's instruction.
            via: how it is started.
            start: does it.
        """
        request = told.request
        order = self._orders[request]
        order.via = via
        asked = order.asked
        if not asked.is_open:
            self._fail(request, "its asker has gone")
            return
        fds = asked.take_fds()
        self.starting += 1
        self.settled.clear()
        try:
            pid, claim = await self._try(order, via, start, fds)
        except ForkerError as error:
            _give_back(asked, fds)
            self._fail(request, str(error))
        else:
            close_all(fds)
            self._started(told, order, pid, claim)
        finally:
            self.starting -= 1
            if not self.starting:
                self.settled.set()

    async def _try(
        self, order: Order, via: Via, start: Start, fds: Sequence[int]
    ) -> tuple[int, socket.socket]:
        """One start, or more where the fork server died under it: that must cost time alone."""
        for left in reversed(range(TRIES if via == "fork-server" else 1)):
            ours, theirs = pair()
            number = inode(theirs)
            try:
                try:
                    return await start((*fds, theirs.fileno())), ours
                finally:
                    theirs.close()
            except ForkerError as error:
                ours.close()
                if error.is_unsure:
                    strays = await end_strays(number)
                    log.warning("%s: %s; ended what was left of it: %s", order.fork.replica, error, strays)
                if not (error.is_unsure and left and order.asked.is_open):
                    raise
        raise AssertionError("the last try returns or raises")

    def _started(
        self, told: events.Spawn | events.FillStandby, order: Order, pid: int, claim: socket.socket
    ) -> None:
        request = told.request
        note = told.note if isinstance(told, events.Spawn) else ""
        took_s = time.monotonic() - order.asked_at_s
        answer = Forked(
            pid=pid,
            via=order.via,
            source=told.source,
            note=note,
            load_s=told.load_s,
            fork_s=max(0.0, took_s - told.load_s),
        )
        self._tell(events.Spawned(request, pid))
        if order.asked.answer(answer):
            self._counts.starts[order.via] += 1
            if told.source:
                self._counts.gives[told.source] += 1
        else:
            log.warning("%s: nobody waits for it any longer, process %d is ended", order.fork.replica, pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.claims.add(request, claim)

    def _fail(self, request: int, reason: str) -> None:
        if not self._orders[request].asked.is_open:
            del self._orders[request]
        self._tell(events.SpawnFailed(request, reason))

    def _progressed(self, request: int, progress: Progress) -> None:
        order = self._orders.get(request)
        if order is not None:
            seconds = progress.at_s - order.fork.wanted_at_s
            self._counts.reached(order.pipeline, order.via, progress.phase, seconds)
        self._tell(events.Progressed(request, progress.phase))

    def _released(self, request: int) -> None:
        self._orders.pop(request, None)
        self._tell(events.Released(request))


def _give_back(asked: Asked, fds: tuple[int, ...]) -> None:
    """For another try, if anybody still waits."""
    if asked.is_open:
        asked.fds = fds
    else:
        close_all(fds)
