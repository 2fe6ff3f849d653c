"""The core of a stream program: requests on their way through the graph, late-bound at every module. Pure.

A message waits at its producer, and here is only told; the worker that is given the module's next batch
fetches it. Loops come back to the queue of the module that consumes their stream, so requests at different
rounds batch together. `streams.flow` says what follows from outputs, `turn_batches` which batches there are.

A request whose worker dies, with a turn, state or tensors of it, starts over under the next epoch. New
ones enter only while what waits at producers is below a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec.structs import replace

from keystage.batching.stage_policy import policy_of
from keystage.bundle.api import Pipeline
from keystage.router.admission import AdmissionBounds, Gate
from keystage.router.batch_settings import BatchSettings
from keystage.router.counters import StageMeter
from keystage.router.device_turns import DeviceTurns
from keystage.router.engine import NOBODY, Caller, Failure, ProgramRefusal, Refusal, TooLate
from keystage.router.evictions import Evictions
from keystage.router.fleet import Fleet
from keystage.router.lobby import Lobby
from keystage.router.owed_acks import OwedAcks
from keystage.router.resting import Resting
from keystage.router.sessions import Answer, Outcome, Refuse
from keystage.router.suspects import UNTOLD, Ending, Suspects
from keystage.router.trails import Trail
from keystage.router.turn_batches import TurnBatches, priors_of
from keystage.router.turns import Call, Parcel, Turn
from keystage.streams.flow import RequestFlow, Step
from keystage.streams.graph import Routes
from keystage.wire import api

WAITING_BYTES = 16 * 1024 * 1024
"""Bytes at rest beyond which no request enters: a quarter of a producer's ring."""


class ProgramCore:
    """Requests of one stream program.

    Args:
        fleet: the workers.
        bounds: admission bounds.
        first_number: base of request numbers, unique to this incarnation.
        pipeline: the program's graph, and what is known of its modules' service times.
        settings: when and which batches start, and what becomes of turns that cannot be in time.
            `batch_settings_of` has checked its shares.
    """

    def __init__(
        self,
        fleet: Fleet,
        bounds: AdmissionBounds,
        first_number: int,
        pipeline: Pipeline,
        settings: BatchSettings,
    ) -> None:
        self.fleet = fleet
        self.gate = Gate(bounds)
        self.entrance = Lobby(self.gate, "requests", settings, apart=True)
        self.meters = [StageMeter(stage) for stage in range(fleet.stages)]
        self.requests = 0
        self.completed = 0
        self.replayed_tokens = 0
        self.moves = 0
        self.trails: dict[int, Trail] = {}
        self._next = first_number
        assert pipeline.graph is not None
        self._graph = graph = pipeline.graph
        self._routes = Routes(graph)
        self._entry = self._routes.stage_of[self._routes.consumer(graph.entry.name)]
        self._settings = settings
        policies = [policy_of(settings.batching) for _ in graph.modules]
        turns = DeviceTurns(settings.shares([module.name for module in graph.modules]))
        self.suspects = Suspects(bounds.max_losses)
        self._batches = TurnBatches(fleet, policies, priors_of(pipeline), self._routes, turns, self.suspects)
        self._calls: dict[int, Call] = {}
        self._turns: dict[int, Turn] = {}
        self._resting = Resting(fleet)
        self._owed = OwedAcks()
        self._evictions = Evictions()
        self._sends: list[tuple[str, api.Message]] = []
        self._outcomes: list[Outcome] = []

    def take(self) -> tuple[list[tuple[str, api.Message]], list[Outcome]]:
        """What is to be sent, in order, and what clients are to be told; forgets both."""
        taken = self._resting.acks + self._sends, self._outcomes
        self._resting.acks, self._sends, self._outcomes = [], [], []
        return taken

    def next_timer_s(self) -> float:
        """When `on_timer` is to be called at the latest, `math.inf`: no batch waits for a time."""
        return self._batches.next_start_s

    @property
    def held(self) -> tuple[int, int, int]:
        """Requests under way, messages at rest, turns whose inputs are owed an Ack: all 0 at rest."""
        return len(self._calls), len(self._resting), len(self._owed)

    # ------------------------------------------------------------ clients

    def submit(
        self, body: bytes, content_type: str, deadline_s: float | None, now_s: float, caller: Caller = NOBODY
    ) -> int:
        """Admits a request; returns its number.

        Raises:
            QueueFull: a bound is reached.
            DeadlineUnreachable: it would not be answered in time.
        """
        limit_s = deadline_s if deadline_s is not None else self.gate.bounds.default_deadline_s
        entry = api.StreamMessage(self._graph.entry.name, body=body, content_type=content_type)
        number = self._next
        due_s = self._settings.due_s(now_s, deadline_s)
        if deadline_s is None and not self._settings.plans_for(due_s, now_s):
            due_s = math.inf
        call = Call(number, entry, now_s, now_s + limit_s, due_s, RequestFlow(self._routes))
        while gone := self.entrance.submit(call, len(body), caller):
            self._refuse(self._calls[gone[0]], gone[1])
        self._next += 1
        self.requests += 1
        self._calls[number] = call
        self.meters[self._entry].arrived(now_s)
        self._dispatch(now_s)
        return number

    def cancel(self, number: int, now_s: float) -> None:
        """The client went away."""
        call = self._calls.get(number)
        if call is not None:
            self._end(call, call.flow.end(""))
            self._dispatch(now_s)

    # ------------------------------------------------------------ workers

    def worker_ready(self, address: str, now_s: float) -> None:
        """A replica is ready: it is given what waits."""
        self.entrance.adapt(self.fleet)
        self._dispatch(now_s)

    def credit_changed(self, now_s: float) -> None:
        """A grant grew, or a batch may start now."""
        self.entrance.adapt(self.fleet)
        self._dispatch(now_s)

    on_timer = credit_changed

    def worker_draining(self, address: str, now_s: float) -> None:
        """Requests with state at the replica finish their loop there; nothing new goes to it."""
        self._dispatch(now_s)

    def worker_lost(self, address: str, now_s: float, ending: Ending = UNTOLD) -> None:
        """A worker died (and is out of the fleet): what it ran, kept or had made starts over."""
        self._batches.turns.forget(address)
        for living in self.fleet.workers:
            self._sends.append((living, api.Unroute([], [address])))
        for producer, slot in self._owed.died(address):
            self._resting.free(producer, slot)
        ran = [turn for turn in self._turns.values() if turn.worker == address]
        points = {turn.call.number: turn.rounds for turn in ran}
        convicted = self.suspects.blame(points, [turn.model for turn in ran], ending)
        for number, reason in convicted.items():
            self._refuse(self._calls[number], Failure(reason))
        for call in [call for call in self._calls.values() if call.uses(address)]:
            self._renew(call, now_s)
        self._dispatch(now_s)

    def failed(self, message: api.Failed, now_s: float) -> None:
        """A worker gave requests up."""
        for number, epoch in zip(message.sessions, message.epochs, strict=True):
            call = self._calls.get(number)
            if call is not None and call.epoch == epoch:
                self._start_over(call, now_s, message.reason)
        self._dispatch(now_s)

    def ran(self, address: str, message: api.Ran, now_s: float) -> None:
        """Turns ended at a worker."""
        sent_s = [self._turns[number].dispatched_s for number in message.turns if number in self._turns]
        if sent_s and len(message.turns) == message.batch and not any(message.faults):
            # From hand to hand: a worker is given its next batch when it has ended this one.
            self._batches.measured(message.stage, message.batch, now_s - max(sent_s), now_s)
        for number, outputs, fault in zip(message.turns, message.outputs, message.faults, strict=True):
            self._owed.reported(number, now_s)
            turn = self._turns.get(number)
            if turn is None or turn.worker != address:
                self._resting.discard(outputs, address)
                continue
            self._leave(turn)
            if turn.has_begun and not turn.is_late:
                self._batches.returned(turn, now_s)
            meter, compute_s = self.meters[turn.model], message.compute_s
            meter.waited(turn.dispatched_s - turn.arrived_s + message.started_s)
            meter.served(compute_s, now_s - turn.arrived_s, now_s - turn.dispatched_s - compute_s)
            if self.trails:
                turn.note(self.trails, self.fleet, now_s, compute_s)
            if not self._graph.modules[turn.model].is_stateful:
                self._batches.unbind(turn.call, turn.model)
            self.suspects.returned(turn.call.number, turn.model, turn.rounds)
            if fault is None:
                self._hand_on(turn, address, outputs, now_s)
            else:
                self._resting.discard(outputs, address)
                self._fault(turn, fault, message.batch, now_s)
        self._dispatch(now_s)
        worker = self.fleet.workers.get(address)
        if worker is not None and not worker.held_slots:
            worker.rests(now_s)

    def tick(self, now_s: float) -> None:
        """Refuses what is too late; starts what waited for its time."""
        self._owed.pass_time(now_s)
        self.entrance.adapt(self.fleet)
        for call in [call for call in self._calls.values() if call.deadline_s <= now_s]:
            self._refuse(call, TooLate(call.too_late(now_s)))
        self._dispatch(now_s)

    # ------------------------------------------------------------ the way of a request

    def _enter(self, call: Call, now_s: float) -> None:
        self._carry_out(call, call.flow.enter(Parcel(call.entry)), now_s)

    def _hand_on(self, turn: Turn, address: str, outputs: Iterable[api.StreamMessage], now_s: float) -> None:
        """A turn went well: its outputs go where their streams lead."""
        call = turn.call
        allowed_s = turn.allowed_s + self._graph.modules[turn.model].partial_slo_s
        parcels: list[tuple[str, Parcel]] = []
        for output in outputs:
            producer = address if output.ref is not None else ""
            parcel = Parcel(replace(output, producer=producer), allowed_s)
            parcels.append((output.stream, parcel))
            self._resting.add(parcel)
        self._carry_out(call, call.flow.done(turn.work, parcels), now_s)

    def _carry_out(self, call: Call, step: Step[Parcel], now_s: float) -> None:
        if step.is_over:
            if step.answer is None:
                self._outcomes.append(Refuse(call.number, Failure(step.refusal)))
            else:
                self.completed += 1
                self.gate.completed(now_s)
                message = step.answer.message
                self._outcomes.append(Answer(call.number, message.body, message.content_type))
                step.dropped.append(step.answer)
            self._end(call, step, None if step.answer is None else now_s)
            return
        for module in step.evict:
            self._evict(call, self._routes.stage_of[module])
        for parcel in step.dropped:
            self._resting.drop(parcel)
        for work in step.ready:
            stage = self._routes.stage_of[work.module]
            is_new = call.epoch == 0 and work.parts[0][0] == self._graph.entry.name
            turn = Turn(self._next, call, stage, work, call.due_s, call.arrived_s if is_new else now_s)
            self._next += 1
            if self._settings.batching.policy != "eager" or call.due_s < math.inf:
                self._batches.date(turn, now_s)
            call.turns[turn.number] = self._turns[turn.number] = turn
            if not is_new:
                self.meters[stage].arrived(now_s)
            self._batches.queues[stage].add(turn)

    def _fault(self, turn: Turn, fault: api.Fault, batch: int, now_s: float) -> None:
        call = turn.call
        if fault.kind == "retry":
            self._start_over(call, now_s, fault.reason)
        elif fault.kind == "company" and batch > 1 and not call.is_alone:
            # Whose fault it is shows when each runs alone; a state may have changed, so from the start.
            call.is_alone = True
            self._renew(call, now_s)
        else:
            self._refuse(call, ProgramRefusal(fault.reason, fault.http_status))

    def _start_over(self, call: Call, now_s: float, why: str) -> None:
        call.losses += 1
        most = self.gate.bounds.max_losses
        if call.losses > most:
            self._refuse(call, Failure(f"{why}; {call.losses} failures, the bound is {most}"))
        else:
            self._renew(call, now_s)

    def _renew(self, call: Call, now_s: float) -> None:
        self.entrance.ended(call.number)
        self.replayed_tokens += sum(call.flow.executed.values())
        self._clear(call, call.flow.end("").dropped)
        call.epoch += 1
        call.flow = RequestFlow(self._routes)
        self._enter(call, now_s)

    def _refuse(self, call: Call, refusal: Refusal) -> None:
        self._outcomes.append(Refuse(call.number, refusal))
        self._end(call, call.flow.end(str(refusal)))

    def _end(self, call: Call, step: Step[Parcel], answered_s: float | None = None) -> None:
        self._clear(call, step.dropped)
        self.entrance.goes(call.number, answered_s)
        self.suspects.forget(call.number)
        del self._calls[call.number]

    def _clear(self, call: Call, dropped: Iterable[Parcel]) -> None:
        """Takes a request out of queues and off workers, frees its tensors and its state."""
        for parcel in dropped:
            self._resting.drop(parcel)
        for address in {*call.homes.values(), *(t.worker for t in call.turns.values() if t.worker)}:
            self._evictions.add(address, call.number, call.epoch, -1)
        for turn in list(call.turns.values()):
            self._leave(turn)
        for stage in list(call.homes):
            self._batches.unbind(call, stage)

    def _leave(self, turn: Turn) -> None:
        """A turn waits and runs no longer."""
        del self._turns[turn.number], turn.call.turns[turn.number]
        if turn.worker is None:
            self._batches.queues[turn.model].remove(turn)
        else:
            self.meters[turn.model].in_flight -= 1
            self.fleet.give_back([turn.worker])
            turn.worker = None

    # ------------------------------------------------------------ workers and what they keep

    def _dispatch(self, now_s: float) -> None:
        self._sends += self._evictions.take(self.fleet)
        self._batches.next_start_s = math.inf
        entry = self._graph.entry.name
        has_news = True
        while has_news:
            for number, refusal in self.entrance.turns(now_s):
                if refusal is None:
                    self._enter(self._calls[number], now_s)
                else:
                    self._refuse(self._calls[number], refusal)
            for address, worker in self._batches.idle_workers():
                opens = self._resting.nbytes <= WAITING_BYTES
                batch = self._batches.take(address, worker, now_s, opens=opens, entry=entry)
                if batch:
                    self._send(address, batch, now_s)
            has_news = self._give_up(now_s)
        for meter, queue in zip(self.meters, self._batches.queues, strict=True):
            meter.queue = len(queue)
        self.meters[self._entry].queue += len(self.entrance)

    def _send(self, address: str, batch: list[Turn], now_s: float) -> None:
        stage = batch[0].model
        self.fleet.hold([address], slots=len(batch))
        self.fleet.workers[address].works(now_s)
        self.meters[stage].batched(len(batch))
        self.meters[stage].in_flight += len(batch)
        inputs: list[list[api.StreamMessage]] = []
        for turn in batch:
            turn.worker, turn.dispatched_s = address, now_s
            self._batches.bind(turn, address)
            self.entrance.goes_on(turn.call.number)
            slots = []
            for parcel in turn.parcels:
                self._resting.take(parcel)
                if parcel.message.ref is not None:
                    slots.append((parcel.message.producer, parcel.message.ref.slot))
            self._owed.fetched(turn.number, address, slots)
            inputs.append([parcel.message for parcel in turn.parcels])
        numbers, calls = [turn.number for turn in batch], [turn.call for turn in batch]
        sessions, epochs = [call.number for call in calls], [call.epoch for call in calls]
        self._sends.append((address, api.Run(stage, numbers, sessions, epochs, inputs)))

    def _give_up(self, now_s: float) -> bool:
        """Turns that the policy gave up wait behind the others, or their requests are refused.

        Returns:
            Whether there were any: a worker that found nothing may take them now.
        """
        given_up, self._batches.given_up = self._batches.given_up, []
        tried: set[int] = set()
        for turn in given_up:
            stage = turn.model
            if turn.number not in self._turns or turn.worker is not None:
                continue  # refused for another of its request's turns, or taken by another worker
            is_dark = self._batches.is_in_the_dark(stage, now_s) and not self.meters[stage].in_flight
            if self._settings.late == "refuse" and (stage in tried or not is_dark):
                self._refuse(turn.call, TooLate(turn.too_late(now_s)))
            else:
                tried.add(stage)
                self._batches.queues[stage].demote(turn)
                self.entrance.steps_behind(turn.call.number)
        return bool(given_up)

    def _evict(self, call: Call, stage: int) -> None:
        """The request has left the module's loop: its state there goes."""
        address = call.homes.get(stage)
        if address is not None:
            self._evictions.add(address, call.number, call.epoch, stage)
            self._batches.unbind(call, stage)
