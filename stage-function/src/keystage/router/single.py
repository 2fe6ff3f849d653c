"""The core of a single-pass pipeline: items wait at their stages, batches go to workers. Pure.

The shell is `node`. An item waits at its stage (metadata only) until the scheduler of `binding` puts it
into a batch for a worker with credit; its activation stays with the producer meanwhile. A worker that hosts
the stages that follow takes it through all of them. Upstream is not granted while a stage's waiting bytes
are over their bound. If a producer or consumer dies, the item starts over from the request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from keystage.bundle.api import StageSpec
from keystage.router.admission import AdmissionBounds, Gate
from keystage.router.batch_settings import BatchSettings
from keystage.router.binding import Binding, Bound
from keystage.router.counters import StageMeter
from keystage.router.engine import NOBODY, Caller, Failure, Refusal, TooLate
from keystage.router.fleet import Fleet
from keystage.router.lobby import Lobby
from keystage.router.owed_acks import OwedAcks
from keystage.router.service_times import ServiceTimes
from keystage.router.sessions import Answer, Item, Outcome, Refuse, SessionState, advance
from keystage.router.single_sends import message_of
from keystage.router.suspects import UNTOLD, Ending, Suspects
from keystage.router.trails import Trail
from keystage.wire import api

WAITING_BYTES = 16 * 1024 * 1024
"""Activations that may wait for one stage: a quarter of a producer's ring, so it never fills."""


class SinglePassCore:
    """Items of one single-pass pipeline.

    Args:
        fleet: the workers.
        bounds: admission bounds.
        first_number: base of item numbers, unique to this incarnation.
        settings: when batches start, and what becomes of late requests.
        stages: the bundle's stages, for their profiles; empty: nothing is known before the first batches.
    """

    def __init__(
        self,
        fleet: Fleet,
        bounds: AdmissionBounds,
        first_number: int,
        settings: BatchSettings | None = None,
        stages: Sequence[StageSpec] = (),
    ) -> None:
        self.fleet = fleet
        self.gate = Gate(bounds)
        self.entrance = Lobby(self.gate, "items", settings or BatchSettings(), apart=False)
        self.meters = [StageMeter(stage) for stage in range(fleet.stages)]
        self.requests = 0
        self.completed = 0
        self.replayed_tokens = 0
        self.moves = 0
        self.trails: dict[int, Trail] = {}
        self._next = first_number
        self._settings = settings = settings or BatchSettings()
        self._items: dict[int, Item] = {}
        profiles = [stage.profile for stage in stages] or [None] * fleet.stages
        self.suspects = Suspects(bounds.max_losses)
        self._binding = Binding(fleet, settings, ServiceTimes(profiles), self._is_full, self.suspects)
        # Bytes of the activations that wait for each stage.
        self._waiting_bytes = [0] * fleet.stages
        self._sends: list[tuple[str, api.Message]] = []
        self._outcomes: list[Outcome] = []
        self._owed = OwedAcks()
        self._now_s = 0.0
        self._has_changed = False

    def take(self) -> tuple[list[tuple[str, api.Message]], list[Outcome]]:
        """What is to be sent, in order, and what clients are to be told; forgets both.

        Batches are decided on here: what came since the last call came at one moment.
        """
        self._settle(self._now_s)
        taken = self._sends, self._outcomes
        self._sends, self._outcomes = [], []
        return taken

    # ------------------------------------------------------------ clients

    def submit(
        self,
        payload: bytes,
        deadline_s: float | None,
        now_s: float,
        dtype: str = "uint8",
        shape: tuple[int, ...] | None = None,
        caller: Caller = NOBODY,
    ) -> int:
        """Admits an item; returns its number.

        Args:
            payload: its bytes.
            deadline_s: seconds it may take, None for the default.
            now_s: the time.
            dtype: element type of the payload.
            shape: its shape, None: bytes in a row.
            caller: who asks.

        Raises:
            QueueFull: a bound is reached.
            DeadlineUnreachable: it would not be answered in time.
        """
        self._changed(now_s)
        limit_s = deadline_s if deadline_s is not None else self.gate.bounds.default_deadline_s
        axes = (len(payload),) if shape is None else shape
        item = Item(self._next, payload, now_s, now_s + limit_s, dtype, axes, queued_s=now_s)
        item.due_s = self._settings.due_s(now_s, deadline_s)
        while gone := self.entrance.submit(item, len(payload), caller):
            self._refuse(self._items[gone[0]], gone[1], now_s)
        self._next += 1
        self.requests += 1
        self._items[item.number] = item
        self.meters[0].arrived(now_s)
        self.meters[0].queue += 1
        return item.number

    def cancel(self, number: int, now_s: float) -> None:
        """The client went away."""
        self._changed(now_s)
        item = self._items.get(number)
        if item is not None:
            self._end(item, SessionState.CANCELLED, now_s)

    # ------------------------------------------------------------ workers

    def worker_ready(self, address: str, now_s: float) -> None:
        """A replica is ready: it is given what waits."""
        self._workers_changed(now_s)

    def credit_changed(self, now_s: float) -> None:
        """A grant changed."""
        self._workers_changed(now_s)

    def worker_draining(self, address: str, now_s: float) -> None:
        """Nothing moves: items at the replica are finished there."""
        self._workers_changed(now_s)

    def worker_lost(self, address: str, now_s: float, ending: Ending = UNTOLD) -> None:
        """A worker died (and is out of the fleet): what it served or held starts over."""
        self._workers_changed(now_s)
        for living in self.fleet.workers:
            self._sends.append((living, api.Unroute([], [address])))
        for producer, slot in self._owed.died(address):
            self._free(producer, slot)
        had = self._binding.lost(address, now_s)
        ran = [item for item in self._items.values() if item.worker == address]
        stages = {stage for item in ran for stage in range(item.stage, item.last + 1)}
        points = {item.number: float(item.last) for item in ran}
        convicted = self.suspects.blame(points, stages, ending, others=had - len(ran))
        for number, reason in convicted.items():
            self._refuse(self._items[number], Failure(reason), now_s)
        for item in list(self._items.values()):
            if item.worker == address or (item.producer == address and item.state is SessionState.QUEUED):
                self._start_over(item, now_s)

    def failed(self, message: api.Failed, now_s: float) -> None:
        """A batch failed at a worker."""
        self._reported(message.sessions, message.epochs, 0.0, 0.0, now_s)
        for number, epoch in zip(message.sessions, message.epochs, strict=True):
            item = self._items.get(number)
            if item is None or item.epoch != epoch or item.worker is None:
                continue
            if message.retryable:
                self._start_over(item, now_s, message.reason)
            else:
                self._refuse(item, Failure(message.reason), now_s)

    def parked(self, address: str, message: api.Parked, now_s: float) -> None:
        """Outputs of a stage wait at their producer: their items queue for the next stage."""
        stage, started_s, compute_s = message.stage, message.started_s, message.compute_s
        self._reported(message.sessions, message.epochs, started_s, compute_s, now_s)
        gone: list[int] = []
        self.fleet.give_back([address], slots=self._still_held(message.sessions, message.epochs, address))
        for number, epoch, ref in zip(message.sessions, message.epochs, message.refs, strict=True):
            item = self._served(number, epoch, stage, started_s, compute_s, now_s)
            if item is None:
                gone.append(ref.slot)
                continue
            item.state = advance(item.state, SessionState.QUEUED)
            item.stage, item.worker = stage + 1, None
            item.ref, item.producer, item.queued_s = ref, address, now_s
            self.meters[stage + 1].arrived(now_s)
            self._waiting_bytes[stage + 1] += ref.nbytes
            self._wait(item)
        if gone:
            self._sends.append((address, api.Ack(gone)))

    def results(self, address: str, message: api.Results, now_s: float) -> None:
        """The last stage is done."""
        stage, started_s, compute_s = message.stage, message.started_s, message.compute_s
        self._reported(message.sessions, message.epochs, started_s, compute_s, now_s)
        self.fleet.give_back([address], slots=self._still_held(message.sessions, message.epochs, address))
        for number, epoch, payload in zip(message.sessions, message.epochs, message.payloads, strict=True):
            item = self._served(number, epoch, stage, started_s, compute_s, now_s)
            if item is None:
                continue
            self.completed += 1
            self.gate.completed(now_s)
            self.entrance.goes(number, now_s)
            self._outcomes.append(Answer(number, payload))
            item.state = advance(item.state, SessionState.FINISHED)
            del self._items[number]

    def tick(self, now_s: float) -> None:
        """Refuses those whose deadlines have passed; lets the scheduler's timers fire."""
        self._changed(now_s)
        self._owed.pass_time(now_s)
        if self._settings.late == "refuse":
            self._refuse_hopeless(now_s)
        for item in [i for i in self._items.values() if i.deadline_s <= now_s]:
            self._refuse(item, TooLate(item.too_late(now_s)), now_s)

    def next_timer_s(self) -> float:
        """When `on_timer` is to be called at the latest, infinite for never."""
        return self._binding.next_timer_s()

    def on_timer(self, now_s: float) -> None:
        """The scheduler's time has come."""
        self._changed(now_s)

    # ------------------------------------------------------------ inside

    def _changed(self, now_s: float) -> None:
        self._now_s = now_s
        self._has_changed = True

    def _workers_changed(self, now_s: float) -> None:
        self._changed(now_s)
        self.entrance.adapt(self.fleet)
        self._binding.workers_changed()

    def _wait(self, item: Item) -> None:
        """An item joins its stage's queue."""
        self.meters[item.stage].queue += 1
        self._binding.wait(item)

    def _settle(self, now_s: float) -> None:
        """Sends what the scheduler decides on; what it gives up is refused, or waits behind the others."""
        while self._has_changed:
            self._has_changed = False
            for number, refusal in self.entrance.turns(now_s):
                if refusal is None:
                    self._binding.wait(self._items[number])
                else:
                    self._refuse(self._items[number], refusal, now_s)
            bound, given_up = self._binding.settle(now_s)
            for batch in bound:
                self._send(batch, now_s)
            tried: set[int] = set()
            for item in given_up:
                self._has_changed = True
                self.entrance.steps_behind(item.number)
                if self._settings.late == "demote" or not self._binding.is_hopeless(item, now_s):
                    self._binding.demote(item, now_s)
                elif item.stage not in tried and self._binding.is_in_the_dark(item.stage, now_s):
                    self._binding.demote(item, now_s)
                    tried.add(item.stage)
                else:
                    self._refuse(item, TooLate(item.no_time(now_s, self.fleet.stages)), now_s)

    def _refuse_hopeless(self, now_s: float) -> None:
        """Those that were given up, waited for a chance, and have none any more."""
        binding = self._binding
        queued = (item for item in self._items.values() if item.state is SessionState.QUEUED)
        for item in [item for item in queued if item.number not in self.entrance.queue]:
            is_lost = binding.is_demoted(item) and binding.is_hopeless(item, now_s)
            if is_lost and not binding.is_in_the_dark(item.stage, now_s):
                self._refuse(item, TooLate(item.no_time(now_s, self.fleet.stages)), now_s)

    def _is_full(self, stage: int) -> bool:
        """Whether the bytes waiting for a stage are over their bound (never beyond the last)."""
        return stage < self.fleet.stages and self._waiting_bytes[stage] > WAITING_BYTES

    def _send(self, bound: Bound, now_s: float) -> None:
        stage, last, address, batch = bound.stage, bound.last, bound.address, bound.items
        meter = self.meters[stage]
        meter.queue -= len(batch)
        meter.in_flight += len(batch)
        meter.batched(len(batch))
        for item in batch:
            item.state = advance(item.state, SessionState.RUNNING)
            item.worker, item.last, item.dispatched_s = address, last, now_s
            self.entrance.goes_on(item.number)
            if item.ref is not None and item.producer is not None:
                self._owed.fetched((item.number, item.epoch), address, [(item.producer, item.ref.slot)])
                self._waiting_bytes[stage] -= item.ref.nbytes
        self._sends.append((address, message_of(bound, more=last + 1 < self.fleet.stages)))

    def _reported(
        self, numbers: Iterable[int], epochs: Iterable[int], started_s: float, compute_s: float, now_s: float
    ) -> None:
        """A worker is done with these, acknowledges its inputs soon, and is free if that was its batch."""
        self._changed(now_s)
        keys = list(zip(numbers, epochs, strict=True))
        for key in keys:
            self._owed.reported(key, now_s)
        self._binding.reported(keys, started_s, compute_s, now_s)

    def _free(self, producer: str | None, slot: int) -> None:
        """Nobody will take this output any more."""
        if producer is not None and producer in self.fleet.workers:
            self._sends.append((producer, api.Ack([slot])))

    def _served(
        self, number: int, epoch: int, stage: int, started_s: float, compute_s: float, now_s: float
    ) -> Item | None:
        """Counts one item that was served up to a stage; None when it is gone or stale.

        Stages that a worker ran one after another share the time it took: it computes them as one.
        """
        item = self._items.get(number)
        if item is None or item.epoch != epoch or item.last != stage or item.worker is None:
            return None
        self.meters[item.stage].in_flight -= 1
        wait_s = item.dispatched_s - item.queued_s + started_s
        share_s = compute_s / (stage - item.stage + 1)
        sojourn_s = now_s - item.queued_s - compute_s + share_s
        handoff_s = now_s - item.dispatched_s - compute_s
        self.suspects.passed(number, stage + 0.5)
        if number in self.trails:
            worker, times_s = self.fleet.workers.get(item.worker), (item.queued_s, item.dispatched_s)
            ready_s = worker.ready_s if worker else 0.0
            span = item.stage, item.last
            self.trails[number].visited(span, (*times_s, now_s, compute_s), item.worker, ready_s)
        for passed in range(item.stage, stage + 1):
            meter = self.meters[passed]
            if passed > item.stage:
                meter.arrived(now_s)
                wait_s, sojourn_s, handoff_s = 0.0, share_s, 0.0
            meter.waited(wait_s)
            meter.served(share_s, sojourn_s, handoff_s)
        if item.due_s < math.inf:
            for passed in range(item.stage, stage + 1):
                self.meters[passed].left(is_late=now_s > self._binding.stage_due_s(item, passed))
        return item

    def _still_held(self, numbers: list[int], epochs: list[int], address: str) -> int:
        """Items of a batch whose credit was not given back already by a cancellation."""
        items = (self._items.get(number) for number in numbers)
        pairs = zip(items, epochs, strict=True)
        return sum(item is not None and (item.epoch, item.worker) == (e, address) for item, e in pairs)

    def _start_over(self, item: Item, now_s: float, why: str = "") -> None:
        self.entrance.ended(item.number)
        item.losses += bool(why)
        if item.losses > (most := self.gate.bounds.max_losses):
            self._refuse(item, Failure(f"{why}; {item.losses} failures, the bound is {most}"), now_s)
            return
        self._leave(item, now_s)
        item.state = advance(advance(SessionState.QUEUED, SessionState.RUNNING), SessionState.QUEUED)
        item.epoch += 1
        self.replayed_tokens += item.stage
        item.stage, item.worker, item.ref, item.producer, item.queued_s = 0, None, None, None, now_s
        self._wait(item)

    def _leave(self, item: Item, now_s: float) -> None:
        """Takes an item out of its queue or off its worker, and frees what it holds."""
        if item.state is SessionState.QUEUED:
            if item.number not in self.entrance.queue:
                self._binding.withdraw(item, now_s)
            self.meters[item.stage].queue -= 1
            if item.ref is not None:
                self._waiting_bytes[item.stage] -= item.ref.nbytes
                self._free(item.producer, item.ref.slot)
            return
        self.meters[item.stage].in_flight -= 1
        if item.worker is not None:
            self.fleet.give_back([item.worker])

    def _refuse(self, item: Item, refusal: Refusal, now_s: float) -> None:
        is_late = isinstance(refusal, TooLate)
        if is_late and item.due_s < math.inf:
            self.meters[item.stage].given_up()
        self._outcomes.append(Refuse(item.number, refusal))
        self._end(item, SessionState.REFUSED if is_late else SessionState.FAILED, now_s)

    def _end(self, item: Item, state: SessionState, now_s: float) -> None:
        self._leave(item, now_s)
        self.entrance.goes(item.number)
        item.state = advance(item.state, state)
        self.suspects.forget(item.number)
        del self._items[item.number]
