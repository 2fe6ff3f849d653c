"""The KeysManager's shell: requests and outcomes become ledger events, instructions become work.

    server, claims, holders, loads, memory --events--> ledger --instructions--> loads, holders, spawns

All decisions are the ledger's. Every asynchronous instruction runs as a task that tells exactly one
outcome, whatever fails; a task that fails in a way nobody foresaw is a bug and ends the daemon, which
is started again without harm to any replica. `daemon_requests` reads what comes in. (Over 300 lines: every
instruction of the ledger is carried out here, and nowhere else.)
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, assert_never

from keystage.bundle.errors import BundleError
from keystage.keysmanager import api, daemon_needs, events
from keystage.keysmanager.api import Fill, Hold, Ok, Refused, Segment, Spawned
from keystage.keysmanager.asked import Asked
from keystage.keysmanager.daemon_ahead import release
from keystage.keysmanager.daemon_forker import ForkerError
from keystage.keysmanager.daemon_forkserver import ForkServer
from keystage.keysmanager.daemon_holders import Holders
from keystage.keysmanager.daemon_loads import Fetches, Loads
from keystage.keysmanager.daemon_names import Names, Resolver
from keystage.keysmanager.daemon_spawns import Spawns
from keystage.keysmanager.daemon_standbys import Standbys
from keystage.keysmanager.history import History
from keystage.keysmanager.hold_pipeline import trimmed
from keystage.keysmanager.ledger import Ledger, LedgerSettings
from keystage.keysmanager.metrics import Counts
from keystage.keysmanager.revocations import Revocations
from keystage.keysmanager.segment import reopened_readonly

log = logging.getLogger("keystage.keysmanager")

CONFLICT = 409


class Daemon:
    """Everything of one node.

    Args:
        settings: of the ledger.
        catalog: reads bundles.
        loader: loads parameters.
        history: what was kept here.
        revocations: what may not be handed out.
        env: environment of the fork server.

    Attributes:
        again: takes a request once more, as if it had just come in.
        failed: set with the reason when a bug or a lost task makes going on pointless.
    """

    def __init__(
        self,
        settings: LedgerSettings,
        catalog: Resolver,
        loader: Fetches,
        history: History,
        revocations: Revocations,
        env: dict[str, str],
    ) -> None:
        self.ledger = Ledger(settings)
        self.counts = Counts()
        self.history = history
        self.revocations = revocations
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.again: Callable[[Asked], None] | None = None
        self.dtypes: dict[str, str] = {}
        self.names = Names(catalog, self._replaced)
        self.forkserver = ForkServer(env)
        self.holders = Holders(self.forkserver, self.tell, self.go)
        self.loads = Loads(loader, self.tell)
        self.spawns = Spawns(self.tell, self.counts)
        self.standbys = Standbys(self.forkserver, self.tell)
        self.asked: dict[int, Asked] = {}
        self._offset_s = time.time() - time.monotonic()
        self._events: deque[events.Event] = deque()
        self._is_handling = False
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ events and tasks

    def tell(self, event: events.Event) -> None:
        """Gives an event to the ledger and begins what it answers; events told meanwhile follow."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                event = self._events.popleft()
                self._count(event)
                for instruction in self.ledger.handle(event, time.monotonic()):
                    log.debug("%s -> %s", type(event).__name__, instruction)
                    self._perform(instruction)
        finally:
            self._is_handling = False

    def go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a task; one that raises is a bug and ends the daemon."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def revoke(self, identity: str) -> None:
        """Parameters are not handed out any longer, nor loaded again after a restart."""
        self.revocations.add(identity)
        self.history.invalidate(identity)
        self.tell(events.Invalidated(identity))

    def _replaced(self, identity: str) -> None:
        self.tell(events.Invalidated(identity, is_revoked=False))

    @property
    def unix_offset_s(self) -> float:
        """Added to the ledger's times gives Unix seconds."""
        return self._offset_s

    def refuse(self, asked: Asked, reason: str, status: int) -> None:
        """Says no to a request that the ledger does not know (any longer)."""
        self.counts.refusals[status] += 1
        self.spawns.forget(asked.number)
        self.asked.pop(asked.number, None)
        asked.answer(Refused(reason, status))

    async def close(self) -> None:
        """Ends holders, fork server and idle standbys; replicas go on.

        Starts under way are seen to their end first: their askers are gone by now, so they are ended.
        """
        self._is_closing = True
        await self.spawns.settled.wait()
        await asyncio.gather(self.holders.close(), self.standbys.close(), self.forkserver.close())
        self.loads.close()
        await self.spawns.claims.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.names.close()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None or self.failed.done():
            return
        log.critical("a task failed", exc_info=task.exception())
        self.failed.set_result(f"{type(task.exception()).__name__}: {task.exception()}")

    def _count(self, event: events.Event) -> None:
        match event:
            case events.Loaded(_, source, nbytes, load_s):
                self.counts.loaded(source, nbytes, load_s)
            case events.LoadFailed(identity, reason):
                self.counts.load_failures += 1
                log.warning("%s: %s", identity[:12], reason)
            case events.HolderGone(identity, reason) if reason != "ended":
                self.counts.deaths += 1
                log.warning("holder of %s is gone: %s", identity[:12], reason)
            case events.StandbyGone(number, reason) if reason != "ended":
                log.warning("standby %d is gone: %s", number, reason)
            case events.SpawnFailed(_, reason):
                log.warning("start failed: %s", reason)
            case _:
                pass

    # ------------------------------------------------------------ instructions

    def _perform(self, instruction: events.Instruction) -> None:
        if self._is_closing:
            return
        match instruction:
            case (
                events.Load()
                | events.CancelLoad()
                | events.DropRaw()
                | events.StartHolder()
                | events.EndHolder()
            ):
                self._perform_holding(instruction)
            case events.Spawn() | events.FillStandby():
                self._start(instruction)
            case events.StartStandby(standby, shape):
                self.go(self.standbys.start(standby, shape))
            case events.EndStandby(standby):
                self.standbys.end(standby)
            case events.GiveSegment():
                self._give(instruction)
            case events.Refuse(request, reason, status):
                self._refuse(request, reason, status)
            case events.Done(request):
                if (asked := self._take(request)) is not None:
                    asked.answer(Ok())
            case events.Remember(name, identity, is_valid):
                self.history.remember(name, identity, time.time(), is_valid=is_valid)
            case _:
                assert_never(instruction)

    def _perform_holding(
        self,
        instruction: events.Load | events.CancelLoad | events.DropRaw | events.StartHolder | events.EndHolder,
    ) -> None:
        match instruction:
            case events.Load(parameters):
                self.go(self.loads.load(parameters))
            case events.CancelLoad(identity):
                self.loads.cancel(identity)
            case events.DropRaw(identity):
                self.loads.drop(identity)
                self.go(release(self.standbys, identity))
            case events.StartHolder(parameters, prepare):
                self._hold(parameters, prepare)
            case events.EndHolder(identity):
                self.counts.evictions += 1
                self.go(self._end_holder(identity))

    def _hold(self, parameters: api.Parameters, prepare: Any) -> None:
        identity = parameters.identity
        raw = self.loads.raw(identity)
        try:
            pipeline = trimmed(self.names.pipeline(identity, parameters.name))
        except BundleError as error:
            self.tell(events.HolderGone(identity, str(error)))
            return
        assert raw is not None, "the ledger starts holders on loaded segments only"
        dtype = self.dtypes.get(identity, parameters.dtype)
        hold = Hold(parameters=_slim(parameters), pipeline=pipeline, prepare=prepare, dtype=dtype)
        self.go(self._start_holder(hold, os.dup(raw.fd)))

    async def _start_holder(self, hold: Hold, raw_fd: int) -> None:
        try:
            await self.holders.start(hold, raw_fd)
        finally:
            os.close(raw_fd)

    async def _end_holder(self, identity: str) -> None:
        self.loads.drop(identity)
        await release(self.standbys, identity)
        await self.holders.end(identity)

    def _start(self, told: events.Spawn | events.FillStandby) -> None:
        match told:
            case events.Spawn(request, identity, via):
                order = self.spawns.order(request)
                assert order is not None, "the ledger spawns for requests it was told of"
                message = order.spawn()

                async def fork(fds: Sequence[int]) -> int:
                    if identity is None:
                        if reason := daemon_needs.unreadable(order.fork.env, order.identities, told.note):
                            raise ForkerError(reason)
                        return (await self.forkserver.ask(message, fds, Spawned)).pid
                    return (await self.holders.ask(identity, message, fds, Spawned)).pid

                self.go(self.spawns.run(told, via, fork))
            case events.FillStandby(_, standby, identity):

                async def fill(fds: Sequence[int]) -> int:
                    return await self._fill(told, standby, identity, fds)

                self.go(self.spawns.run(told, "standby", fill))

    async def _fill(self, told: events.FillStandby, standby: int, identity: str, fds: Sequence[int]) -> int:
        raw = self.loads.raw(identity)
        order = self.spawns.order(told.request)
        if raw is None or order is None:
            raise ForkerError(f"segment of {identity[:12]} was closed before standby {standby} had it")
        fill = Fill(
            replica=order.fork.replica,
            module=order.fork.module,
            env=order.env,
            parameters=_slim(raw.parameters),
        )
        segment = os.dup(raw.fd)
        try:
            return await self.standbys.fill(standby, fill, (segment, *fds))
        finally:
            os.close(segment)

    def _give(self, told: events.GiveSegment) -> None:
        asked, raw = self._take(told.request), self.loads.raw(told.identity)
        packed = self.holders.packed(told.identity) if told.is_packed else None
        if asked is None:
            self.tell(events.Released(told.request))
            return
        if packed is not None:
            fd, form = packed
            parameters = self.ledger.state.entries[told.identity].parameters
            segment = Segment(parameters=_slim(parameters), source=told.source, packed=form)
        else:
            assert raw is not None, "the ledger gives loaded segments only"
            fd = raw.fd
            segment = Segment(parameters=raw.parameters, huge_bytes=raw.huge_bytes, source=told.source)
        # A pod is a stranger: its descriptor cannot write, whatever the seals.
        fd = reopened_readonly(fd) if asked.origin else os.dup(fd)
        if asked.answer(segment, (fd,), is_claim=True):
            self.counts.gives[told.source] += 1
        else:
            self.tell(events.Released(told.request))

    def _refuse(self, request: int, reason: str, status: int) -> None:
        order, asked = self.spawns.order(request), self._take(request)
        if asked is None:
            return
        is_replaced = status == CONFLICT and order is not None and not self._is_revoked(order.identities)
        if is_replaced and self.again is not None and asked.is_open:
            self.spawns.forget(request)
            self.again(asked)  # its bundle was replaced while it waited: it wants the new parameters
        else:
            self.refuse(asked, reason, status)

    def _is_revoked(self, identities: Sequence[str]) -> bool:
        return any(identity in self.ledger.state.revoked for identity in identities)

    def _take(self, request: int) -> Asked | None:
        asked = self.asked.pop(request, None)
        if asked is None and (order := self.spawns.order(request)) is not None:
            return order.asked
        return asked


def _slim(parameters: api.Parameters) -> api.Parameters:
    """Without chunk hashes: those were checked, and would fill the message."""
    return api.Parameters(
        name=parameters.name,
        pipeline=parameters.pipeline,
        identity=parameters.identity,
        dtype=parameters.dtype,
        file=parameters.file,
        nbytes=parameters.nbytes,
        chunks=(),
    )
