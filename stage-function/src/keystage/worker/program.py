"""Turns of a stream program at a worker: run batches, park their outputs, tell the router where they go.

Called by the engine loop only. The executor gathers, computes and scatters; here inputs are brought, outputs
put into the ring, and the state of requests goes when the router says so. Outputs stay until their consumer
acknowledges them; one that this worker consumes itself is read from its own ring.

A turn whose outputs find no room for `STUCK_S` is given up and starts over: rings that are full of what waits
for each other would stand still for good.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TypeAlias

from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.wire.ring import ALIGN_BYTES, RingError
from keystage.wire.sources import TensorSources
from keystage.worker.executor import Activation, Executor
from keystage.worker.outbox import TensorOutbox
from keystage.worker.settings import EngineSettings, Status
from keystage.worker.turns import Ended, Packed, TurnExecutor

log = logging.getLogger(__name__)

STUCK_S = 2.0
"""Far longer than a consumer takes to fetch, short of the heartbeats' five seconds."""

_Waiting: TypeAlias = tuple[str, api.Run, float]
"""Router, batch, and when it was received."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that was run."""

    router: str
    stage: int
    turns: int
    started_s: float
    compute_s: float


@dataclasses.dataclass(slots=True)
class _Leaving:
    """A turn whose outputs are not all in the ring yet."""

    batch: _Batch
    turn: int
    ended: Ended
    since_s: float
    messages: list[api.StreamMessage] = dataclasses.field(default_factory=list)


class ProgramWork:
    """Batches to run here, in order of arrival. Args are those of `engine.Engine`."""

    def __init__(
        self,
        settings: EngineSettings,
        executor: Executor,
        outbox: TensorOutbox,
        sources: TensorSources,
        events: EventLog,
        status: Status,
    ) -> None:
        self._settings = settings
        self._executor = executor if isinstance(executor, TurnExecutor) else None
        self._outbox = outbox
        self._sources = sources
        self._events = events
        self._status = status
        self._batches: deque[_Waiting] = deque()
        # Batches with inputs on their way from another node.
        self._coming: list[_Waiting] = []
        # Turns of these requests, up to the epoch, are not run any more; for batches that wait only.
        self._dropped: dict[int, int] = {}
        self._leaving: deque[_Leaving] = deque()
        self._parked: dict[int, str] = {}
        # Who is to say when the state of a request in a module goes.
        self._router_of: dict[tuple[int, int], str] = {}
        # Set when an output found no room: only an acknowledgement can make some.
        self._is_full = False

    def __len__(self) -> int:
        return sum(len(batch.turns) for _, batch, _ in (*self._batches, *self._coming)) + len(self._leaving)

    @property
    def kept(self) -> int:
        """Requests of which there is state here."""
        return self._executor.kept if self._executor is not None else 0

    def held_by(self, router: str) -> int:
        """Turns of one router."""
        entries = (*self._batches, *self._coming)
        waiting = sum(len(batch.turns) for sender, batch, _ in entries if sender == router)
        return waiting + sum(leaving.batch.router == router for leaving in self._leaving)

    # ------------------------------------------------------------ receive

    def receive(self, router: str, batch: api.Run) -> None:
        """A batch arrives."""
        entry = (router, batch, time.perf_counter())
        refs = [message.ref for turn in batch.inputs for message in turn if message.ref is not None]
        owners = [message.producer for turn in batch.inputs for message in turn if message.ref is not None]
        if refs and self._sources.begin(refs, owners, partial(self._arrived, entry)):
            self._coming.append(entry)
        else:
            self._batches.append(entry)

    def _arrived(self, entry: _Waiting) -> None:
        """The inputs of a batch are here; its router may have restarted meanwhile."""
        if entry in self._coming:
            self._coming.remove(entry)
            self._batches.append(entry)

    def evict(self, message: api.Evict) -> None:
        """Requests left a loop (their state goes), or ended (turns that wait as well)."""
        for session, epoch, stage in zip(message.sessions, message.epochs, message.stages, strict=True):
            if stage < 0 and (self._batches or self._coming):
                self._dropped[session] = epoch
            self._forget(session, stage)

    def acknowledged(self, slots: Iterable[int]) -> None:
        """These outputs were taken, or nobody wants them."""
        self._is_full = False
        for slot in slots:
            self._parked.pop(slot, None)

    def forget_router(self, router: str) -> None:
        """A router restarted: what it wanted run, what is kept and parked for it, is void."""
        for sender, batch, _ in (*self._batches, *self._coming):
            if sender == router:
                self._release(batch)
        self._coming = [entry for entry in self._coming if entry[0] != router]
        self._batches = deque(entry for entry in self._batches if entry[0] != router)
        self._leaving = deque(entry for entry in self._leaving if entry.batch.router != router)
        for session in {s for (s, _), owner in self._router_of.items() if owner == router}:
            self._forget(session, -1)
        self._free([slot for slot, owner in self._parked.items() if owner == router])

    def _forget(self, session: int, stage: int) -> None:
        if self._executor is not None:
            self._executor.evict(session, stage)
        for kept in self._settings.stages if stage < 0 else (stage,):
            self._router_of.pop((session, kept), None)

    # ------------------------------------------------------------ run

    def has_work(self) -> bool:
        """Whether `run_one` would do something."""
        if self._leaving:
            return not self._is_full or time.perf_counter() - self._leaving[0].since_s >= STUCK_S
        return bool(self._batches)

    def run_one(self) -> None:
        """Parks what found no room before; else runs the oldest batch."""
        if self._leaving:
            self._park()
        elif self._batches:
            router, batch, received_s = self._batches.popleft()
            self._run(router, self._without_dropped(router, batch), received_s)
            if not self._batches and not self._coming:
                self._dropped.clear()

    def _without_dropped(self, router: str, batch: api.Run) -> api.Run:
        """The batch without turns that nobody wants any more; the router hears of them all the same."""
        is_wanted = [self._dropped.get(s, -1) < e for s, e in zip(batch.sessions, batch.epochs, strict=True)]
        if all(is_wanted):
            return batch
        unwanted = _chosen(batch, [not wanted for wanted in is_wanted])
        self._release(unwanted)
        self._tell_fault(router, unwanted, api.Fault("retry", "evicted"))
        return _chosen(batch, is_wanted)

    def _run(self, router: str, batch: api.Run, received_s: float) -> None:
        if not batch.turns:
            return
        if self._executor is None:
            self._tell_fault(router, batch, api.Fault("request", "this worker hosts no stream program"))
            return
        started_s = time.perf_counter()
        try:
            inputs = [[self._packed(message) for message in turn] for turn in batch.inputs]
        except RingError as error:
            self._release(batch)
            self._tell_fault(router, batch, api.Fault("retry", str(error)))
            return
        ended = self._executor.run(batch.stage, batch.sessions, inputs)
        compute_s = time.perf_counter() - started_s
        self._release(batch)
        self._status.use[batch.stage].add(compute_s, len(batch.turns))
        self._events.write(
            "batch", stage=batch.stage, rows=len(batch.turns), sessions=batch.sessions,
            compute_s=round(compute_s, 6),
        )  # fmt: skip
        for session, end in zip(batch.sessions, ended, strict=True):
            if end.is_kept:
                self._router_of[session, batch.stage] = router
        done = _Batch(router, batch.stage, len(batch.turns), started_s - received_s, compute_s)
        now_s = time.perf_counter()
        self._leaving.extend(
            _Leaving(done, turn, self._checked(end), now_s)
            for turn, end in zip(batch.turns, ended, strict=True)
        )
        self._park()

    def _packed(self, message: api.StreamMessage) -> Packed:
        data = None if message.ref is None else self._sources.view(message.ref, message.producer)
        return Packed(message.stream, message.meta, data, message.body, message.content_type)

    def _checked(self, ended: Ended) -> Ended:
        # All of a turn's outputs lie in the ring at a time, each on bounds of its own.
        sizes = [-(-o.data.nbytes // ALIGN_BYTES) * ALIGN_BYTES for o in ended.outputs if o.data is not None]
        if not self._outbox.fits_bytes(sum(sizes)):
            streams = ", ".join(sorted({output.stream for output in ended.outputs}))
            reason = (
                f"{len(sizes)} messages of {sum(sizes)} bytes on streams {streams} exceed the ring of "
                f"{self._settings.replica} (KEYSTAGE_RING_BYTES)"
            )
            return Ended((), api.Fault("request", reason), ended.is_kept)
        return ended

    def _release(self, batch: api.Run) -> None:
        """The inputs are used up."""
        own: list[int] = []
        for message in (message for turn in batch.inputs for message in turn):
            if message.ref is None:
                continue
            self._sources.release(message.ref, message.producer)
            if message.producer == self._outbox.address:
                own.append(message.ref.slot)
            else:
                self._outbox.taken(message.producer, message.ref.slot)
        self._free(own)

    def _free(self, slots: list[int]) -> None:
        self.acknowledged(slots)
        self._outbox.acknowledge(slots)

    # ------------------------------------------------------------ hand on

    def _park(self) -> None:
        """Parks outputs while the ring has room, and tells the router of the turns that are through."""
        while self._leaving:
            batch = self._leaving[0].batch
            through: list[_Leaving] = []
            while self._leaving and self._leaving[0].batch is batch and self._parks(self._leaving[0]):
                through.append(self._leaving.popleft())
            if not through:
                self._is_full = True
                return
            self._outbox.send(
                batch.router,
                api.Ran(
                    self._settings.replica,
                    batch.stage,
                    [leaving.turn for leaving in through],
                    [leaving.messages for leaving in through],
                    [leaving.ended.fault for leaving in through],
                    batch.turns,
                    batch.started_s,
                    batch.compute_s,
                ),
            )
        self._is_full = False

    def _parks(self, leaving: _Leaving) -> bool:
        """Whether all of a turn's outputs have a place now, or it was given up for want of one."""
        for output in leaving.ended.outputs[len(leaving.messages) :]:
            ref = None
            if output.data is not None:
                ref = self._outbox.park(_activation(output.data))
                if ref is None:
                    return self._is_stuck(leaving)
                self._parked[ref.slot] = leaving.batch.router
            leaving.messages.append(
                api.StreamMessage(
                    output.stream, output.meta, ref, "", output.body, output.content_type, output.visits
                )
            )
        return True

    def _is_stuck(self, leaving: _Leaving) -> bool:
        if time.perf_counter() - leaving.since_s < STUCK_S:
            return False
        reason = f"the ring of {self._settings.replica} was full for {STUCK_S:g} s (KEYSTAGE_RING_BYTES)"
        log.warning("a turn starts over: %s", reason)
        self._free([message.ref.slot for message in leaving.messages if message.ref is not None])
        leaving.messages = []
        leaving.ended = Ended((), api.Fault("retry", reason), leaving.ended.is_kept)
        return True

    def _tell_fault(self, router: str, batch: api.Run, fault: api.Fault) -> None:
        count = len(batch.turns)
        ran = api.Ran(
            self._settings.replica, batch.stage, batch.turns, [[] for _ in range(count)], [fault] * count,
            count, 0.0, 0.0,
        )  # fmt: skip
        self._outbox.send(router, ran)


def _chosen(batch: api.Run, wanted: list[bool]) -> api.Run:
    places = [place for place, is_wanted in enumerate(wanted) if is_wanted]
    return api.Run(
        batch.stage,
        [batch.turns[place] for place in places],
        [batch.sessions[place] for place in places],
        [batch.epochs[place] for place in places],
        [batch.inputs[place] for place in places],
    )


def _activation(data: memoryview) -> Activation:
    return Activation("uint8", (data.nbytes,), data)
