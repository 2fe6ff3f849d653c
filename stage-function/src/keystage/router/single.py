"""The core of a single-pass pipeline: late-bound queues per stage. Pure; the shell is `node`.

An item waits in its stage's queue (metadata only) until a replica has credit; its activation stays
with the producer meanwhile. Upstream is not granted while a stage's waiting bytes are over their
bound. If a producer or consumer dies, the item starts over from the request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from keystage.router.admission import AdmissionBounds, Gate
from keystage.router.batching import BatchPolicy, BatchState
from keystage.router.counters import StageMeter
from keystage.router.engine import Failure, Refusal, TooLate
from keystage.router.fleet import DEAD_AFTER_S, Fleet
from keystage.router.sessions import Answer, Item, Outcome, Refuse, SessionState, advance
from keystage.wire import api

WAITING_BYTES = 16 * 1024 * 1024
"""Activations that may wait for one stage: a quarter of a producer's ring, so it never fills."""

ACK_GRACE_S = DEAD_AFTER_S + 1.0
"""A worker gathers acknowledgements for some 20 ms; one that died before it sent them owes them, and on
another node its death is noticed by its silence only."""


class SinglePassCore:
    """Items of one single-pass pipeline.

    Args:
        fleet: the workers.
        bounds: admission bounds.
        first_number: base of item numbers, unique to this incarnation.
        policy: when batches start.
        activation_bytes: bytes per row that each stage hands on.
    """

    def __init__(
        self,
        fleet: Fleet,
        bounds: AdmissionBounds,
        first_number: int,
        policy: BatchPolicy,
        activation_bytes: Iterable[int],
    ) -> None:
        self.fleet = fleet
        self.gate = Gate(bounds)
        self.meters = [StageMeter(stage) for stage in range(fleet.stages)]
        self.requests = 0
        self.completed = 0
        self.replayed_tokens = 0
        self.moves = 0
        self._next = first_number
        self._policy = policy
        self._activation_bytes = list(activation_bytes)
        self._items: dict[int, Item] = {}
        self._queues: list[deque[Item]] = [deque() for _ in range(fleet.stages)]
        self._sends: list[tuple[str, api.Message]] = []
        self._outcomes: list[Outcome] = []
        # (number, epoch) -> (consumer, producer, slot) while a consumer owes the producer an Ack.
        self._fetched: dict[tuple[int, int], tuple[str, str, int]] = {}
        # The same with its time once the consumer reported: its Ack follows within `ACK_GRACE_S`.
        self._consumed: deque[tuple[float, tuple[str, str, int]]] = deque()

    def take(self) -> tuple[list[tuple[str, api.Message]], list[Outcome]]:
        """What is to be sent, in order, and what clients are to be told; forgets both."""
        taken = self._sends, self._outcomes
        self._sends, self._outcomes = [], []
        return taken

    # ------------------------------------------------------------ clients

    def submit(self, payload: bytes, deadline_s: float | None, now_s: float) -> int:
        """Admits an item; returns its number.

        Raises:
            QueueFull: a bound is reached.
        """
        self.gate.enter(len(payload))
        limit_s = deadline_s if deadline_s is not None else self.gate.bounds.default_deadline_s
        item = Item(self._next, payload, now_s, now_s + limit_s, queued_s=now_s)
        self._next += 1
        self.requests += 1
        self._items[item.number] = item
        self.meters[0].arrived(now_s)
        self._queues[0].append(item)
        self._dispatch(0, now_s)
        return item.number

    def cancel(self, number: int, now_s: float) -> None:
        """The client went away."""
        item = self._items.get(number)
        if item is not None:
            self._end(item, SessionState.CANCELLED)
            self._dispatch_all(now_s)

    # ------------------------------------------------------------ workers

    def worker_ready(self, address: str, now_s: float) -> None:
        """A replica is ready: it is given what waits."""
        for stage in self.fleet.workers[address].hello.stages:
            self._dispatch(stage, now_s)

    def credit_changed(self, now_s: float) -> None:
        """A grant grew."""
        self._dispatch_all(now_s)

    def worker_draining(self, address: str, now_s: float) -> None:
        """Nothing moves: items at the replica are finished there."""
        self._dispatch_all(now_s)

    def worker_lost(self, address: str, now_s: float) -> None:
        """A worker died (and is out of the fleet): what it served or held starts over."""
        for living in self.fleet.workers:
            self._sends.append((living, api.Unroute([], [address])))
        self._forget_fetched(address)
        for item in list(self._items.values()):
            if item.worker == address or (item.producer == address and item.state is SessionState.QUEUED):
                self._start_over(item, now_s, f"worker at {address} died")
        self._dispatch_all(now_s)

    def failed(self, message: api.Failed, now_s: float) -> None:
        """A batch failed at a worker."""
        self._acknowledged(message.sessions, message.epochs, now_s)
        for number, epoch in zip(message.sessions, message.epochs, strict=True):
            item = self._items.get(number)
            if item is None or item.epoch != epoch or item.worker is None:
                continue
            if message.retryable:
                self._start_over(item, now_s, message.reason)
            else:
                self._refuse(item, Failure(message.reason))
        self._dispatch_all(now_s)

    def parked(self, address: str, message: api.Parked, now_s: float) -> None:
        """Outputs of a stage wait at their producer: their items queue for the next stage."""
        stage = message.stage
        self._acknowledged(message.sessions, message.epochs, now_s)
        gone: list[int] = []
        self.fleet.give_back([address], slots=self._still_held(message.sessions, message.epochs, address))
        for number, epoch, ref in zip(message.sessions, message.epochs, message.refs, strict=True):
            item = self._served(number, epoch, stage, message.started_s, message.compute_s, now_s)
            if item is None:
                gone.append(ref.slot)
                continue
            item.state = advance(item.state, SessionState.QUEUED)
            item.stage, item.worker = stage + 1, None
            item.ref, item.producer, item.queued_s = ref, address, now_s
            self.meters[stage + 1].arrived(now_s)
            self._queues[stage + 1].append(item)
        if gone:
            self._sends.append((address, api.Ack(gone)))
        self._dispatch_all(now_s)

    def results(self, address: str, message: api.Results, now_s: float) -> None:
        """The last stage is done."""
        stage = message.stage
        self._acknowledged(message.sessions, message.epochs, now_s)
        self.fleet.give_back([address], slots=self._still_held(message.sessions, message.epochs, address))
        for number, epoch, payload in zip(message.sessions, message.epochs, message.payloads, strict=True):
            item = self._served(number, epoch, stage, message.started_s, message.compute_s, now_s)
            if item is None:
                continue
            self.completed += 1
            self.gate.completed(now_s)
            self.gate.leave(len(item.payload))
            self._outcomes.append(Answer(number, payload))
            item.state = advance(item.state, SessionState.FINISHED)
            del self._items[number]
        self._dispatch_all(now_s)

    def tick(self, now_s: float) -> None:
        """Refuses what is too late; asks the policy again."""
        while self._consumed and self._consumed[0][0] < now_s - ACK_GRACE_S:
            self._consumed.popleft()
        for item in [i for i in self._items.values() if i.deadline_s <= now_s]:
            self._refuse(
                item,
                TooLate(
                    f"deadline of {item.deadline_s - item.arrived_s:.3g} s passed at stage {item.stage} "
                    f"after {now_s - item.arrived_s:.3g} s"
                ),
            )
        self._dispatch_all(now_s)

    # ------------------------------------------------------------ inside

    def _dispatch_all(self, now_s: float) -> None:
        for stage in range(self.fleet.stages - 1, -1, -1):
            self._dispatch(stage, now_s)

    def _dispatch(self, stage: int, now_s: float) -> None:
        queue = self._queues[stage]
        while queue and not self._is_full(stage + 1):
            address = self.fleet.choose(stage)
            if address is None:
                break
            worker = self.fleet.workers[address]
            first = queue[0]
            decision = self._policy.decide(
                BatchState(
                    len(queue),
                    now_s - first.queued_s,
                    first.deadline_s - now_s,
                    worker.free_slots,
                    worker.hello.max_batch,
                    self.fleet.idle_workers(stage) if len(queue) > 1 else 1,
                )
            )
            if not decision.size:
                break
            self._send(stage, address, [queue.popleft() for _ in range(decision.size)], now_s)
        self.meters[stage].queue = len(queue)

    def _is_full(self, stage: int) -> bool:
        """Whether the bytes waiting for a stage are over their bound (never beyond the last)."""
        if stage >= self.fleet.stages:
            return False
        return len(self._queues[stage]) * self._activation_bytes[stage - 1] > WAITING_BYTES

    def _send(self, stage: int, address: str, batch: list[Item], now_s: float) -> None:
        self.fleet.hold([address], slots=len(batch))
        meter = self.meters[stage]
        meter.in_flight += len(batch)
        for item in batch:
            item.state = advance(item.state, SessionState.RUNNING)
            item.worker, item.dispatched_s = address, now_s
        numbers, epochs = [item.number for item in batch], [item.epoch for item in batch]
        more = stage + 1 < self.fleet.stages
        if stage == 0:
            shapes: list[tuple[int, ...]] = [(len(item.payload),) for item in batch]
            payloads = [item.payload for item in batch]
            self._sends.append((address, api.Work(0, numbers, epochs, "uint8", shapes, payloads, more)))
            return
        refs = [item.ref for item in batch if item.ref is not None]
        producers = [item.producer for item in batch if item.producer is not None]
        for item in batch:
            assert item.producer is not None
            assert item.ref is not None
            self._fetched[item.number, item.epoch] = (address, item.producer, item.ref.slot)
        self._sends.append((address, api.Fetch(stage, numbers, epochs, refs, producers, more)))

    def _acknowledged(self, numbers: list[int], epochs: list[int], now_s: float) -> None:
        """The consumer ran the batch, and acknowledges its inputs soon (it gathers them)."""
        for key in zip(numbers, epochs, strict=True):
            hop = self._fetched.pop(key, None)
            if hop is not None:
                self._consumed.append((now_s, hop))

    def _forget_fetched(self, dead: str) -> None:
        """A dead consumer acknowledges nothing: its producers free the inputs it had."""
        owed = {hop for _, hop in self._consumed}
        for key, hop in list(self._fetched.items()):
            if dead in hop[:2]:
                owed.add(hop)
                del self._fetched[key]
        for consumer, producer, slot in sorted(owed):
            if consumer == dead:
                self._free(producer, slot)

    def _free(self, producer: str | None, slot: int) -> None:
        """Nobody will take this output any more."""
        if producer is not None and producer in self.fleet.workers:
            self._sends.append((producer, api.Ack([slot])))

    def _served(
        self, number: int, epoch: int, stage: int, started_s: float, compute_s: float, now_s: float
    ) -> Item | None:
        """Counts one served item; None when it is gone or stale."""
        item = self._items.get(number)
        if item is None or item.epoch != epoch or item.stage != stage or item.worker is None:
            return None
        meter = self.meters[stage]
        meter.in_flight -= 1
        meter.waited(item.dispatched_s - item.queued_s + started_s)
        meter.served(compute_s, now_s - item.queued_s)
        return item

    def _still_held(self, numbers: list[int], epochs: list[int], address: str) -> int:
        """Items of a batch whose credit was not given back already by a cancellation."""
        held = 0
        for number, epoch in zip(numbers, epochs, strict=True):
            item = self._items.get(number)
            held += item is not None and item.epoch == epoch and item.worker == address
        return held

    def _start_over(self, item: Item, now_s: float, why: str) -> None:
        item.losses += 1
        if item.losses > self.gate.bounds.max_losses:
            self._refuse(
                item,
                Failure(f"{why}; {item.losses} workers lost, the bound is {self.gate.bounds.max_losses}"),
            )
            return
        self._leave(item)
        item.state = advance(advance(SessionState.QUEUED, SessionState.RUNNING), SessionState.QUEUED)
        item.epoch += 1
        self.replayed_tokens += item.stage
        item.stage, item.worker, item.ref, item.producer, item.queued_s = 0, None, None, None, now_s
        self._queues[0].appendleft(item)

    def _leave(self, item: Item) -> None:
        """Takes an item out of its queue or off its worker, and frees what it holds."""
        if item.state is SessionState.QUEUED:
            self._queues[item.stage].remove(item)
            self.meters[item.stage].queue = len(self._queues[item.stage])
            if item.ref is not None:
                self._free(item.producer, item.ref.slot)
            return
        self.meters[item.stage].in_flight -= 1
        if item.worker is not None:
            self.fleet.give_back([item.worker])

    def _refuse(self, item: Item, refusal: Refusal) -> None:
        state = SessionState.REFUSED if isinstance(refusal, TooLate) else SessionState.FAILED
        self._outcomes.append(Refuse(item.number, refusal))
        self._end(item, state)

    def _end(self, item: Item, state: SessionState) -> None:
        self._leave(item)
        self.gate.leave(len(item.payload))
        item.state = advance(item.state, state)
        del self._items[item.number]
