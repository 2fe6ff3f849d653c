"""Which turns a worker that has nothing in hand is given: one batch of one module. Pure.

Between `program`, which keeps requests, and the batch policies of `keystage.batching`, which look at what
waits. A worker is given its next batch when it has ended the last one: messages of a loop come back while it
computes, and join what arrived meanwhile, so the batches of a loop merge and do not chase one another.

Where nobody stated a deadline, or a module's service time is not known yet, batches start at once.

A turn whose request has state at a worker waits for that worker. Requests without a home go to those with
fewest, where a module keeps state; else what waits is divided among the workers that are idle.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from keystage.batching.api import Request
from keystage.batching.fit import ProfileFit
from keystage.batching.partial_slo import PartialSlo
from keystage.batching.policies import BatchPolicy, Eager
from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue
from keystage.bundle.api import Pipeline
from keystage.router.binding import DARK_S
from keystage.router.device_turns import DeviceTurns, Offer
from keystage.router.fleet import Fleet, Worker
from keystage.router.service_times import bundled
from keystage.router.suspects import Suspects
from keystage.router.turn_rounds import Rounds
from keystage.router.turns import Call, Turn, TurnQueue
from keystage.streams.graph import Routes, successors
from keystage.streams.loop_queue import LoopQueue

MOST_PACE_RATIO = 2.0
_MEMORY = 0.998
"""How much of the rounds so far the next one leaves in mind: some hundreds."""

UNKNOWN_S = 1e-6
"""Service time of a module that nobody has measured yet: nothing is late because of it."""


class TurnBatches:
    """The queues of all modules.

    Args:
        fleet: the workers.
        policies: the batch policy of each module.
        priors: what is known of each module's service time before it is measured.
        routes: of the program.
        turns: which module of a worker comes first.
        suspects: requests that run apart where their worker died.
    """

    def __init__(
        self,
        fleet: Fleet,
        policies: Sequence[BatchPolicy],
        priors: Sequence[LatencyProfile | None],
        routes: Routes,
        turns: DeviceTurns,
        suspects: Suspects,
    ) -> None:
        self._fleet = fleet
        self._suspects = suspects
        self._policies = list(policies)
        self._eager = Eager()
        modules = routes.graph.modules
        self._keeping = [module.is_stateful for module in modules]
        self._plans_rounds = [
            isinstance(policy, PartialSlo) and routes.is_loop(module.name)
            for policy, module in zip(policies, modules, strict=True)
        ]
        self._is_loop = [routes.is_loop(module.name) for module in modules]
        self._routes = routes
        self.turns = turns
        self._fits = [ProfileFit(prior) for prior in priors]
        self._measured_s = [-math.inf] * len(modules)
        self.queues = [TurnQueue() for _ in policies]
        self._behind = behind(routes)
        # By module: seconds that rounds took in all and in service, older ones less and less.
        self._passed = [[0.0, 0.0] for _ in policies]
        self.homes: Counter[tuple[int, str]] = Counter()
        self.given_up: list[Turn] = []
        self.next_start_s = math.inf

    def bind(self, turn: Turn, address: str) -> None:
        """A turn runs at a worker, which has what its module keeps of the request from now on."""
        if turn.home is None:
            turn.call.homes[turn.model] = address
            self.homes[turn.model, address] += 1

    def unbind(self, call: Call, stage: int) -> None:
        """Nothing of a request is at a module any more."""
        address = call.homes.pop(stage, None)
        if address is not None:
            self.homes[stage, address] -= 1

    def measured(self, stage: int, batch: int, seconds: float, now_s: float) -> None:
        """A batch was computed."""
        self._fits[stage].add(batch, seconds)
        self._measured_s[stage] = now_s

    def is_in_the_dark(self, stage: int, now_s: float) -> bool:
        """Whether nothing was heard of a module's service time lately: giving up may be wrong then."""
        return now_s - self._measured_s[stage] > DARK_S

    def returned(self, turn: Turn, now_s: float) -> None:
        """A turn of a request that is in a loop has ended: how much longer than its service did it take?"""
        passed = self._passed[turn.model]
        passed[0] = _MEMORY * passed[0] + now_s - turn.arrived_s
        passed[1] = _MEMORY * passed[1] + now_s - turn.dispatched_s

    def pace_ratio(self, stage: int) -> float:
        """What a round of a loop takes over the service of its batch: other modules share its workers."""
        passed_s, served_s = self._passed[stage]
        return min(MOST_PACE_RATIO, max(1.0, passed_s / served_s)) if served_s > 0 else 1.0

    def date(self, turn: Turn, now_s: float) -> None:
        """Sets a turn's deadline and its share of what its request may take.

        By its module's partial SLO (NeuStream 4.1), or, where it is known how often the request will still
        pass, by the time that is left for each visit: who is in the loop must be able to end it at the
        speed of one alone, a newcomer at that of the batches it would share. Else by the request's own end.
        """
        call, stage = turn.call, turn.model
        partial_s = self._routes.graph.modules[stage].partial_slo_s
        profile = self._fits[stage].profile()
        if turn.visits and call.due_s < math.inf and profile is not None:
            left_s = call.due_s - self._after_s(stage) - now_s
            turn.share_s = left_s / turn.visits
            batch = 1 if turn.has_begun else max(1, profile.largest_batch(turn.share_s))
            turn.deadline_s = now_s + left_s - (turn.visits - 1) * profile.latency_s(batch)
        elif partial_s:
            turn.share_s = partial_s
            turn.deadline_s = call.arrived_s + turn.allowed_s + partial_s
        else:
            turn.deadline_s = call.due_s - self._after_s(stage) if call.due_s < math.inf else math.inf
            turn.share_s = turn.deadline_s - now_s

    def _after_s(self, stage: int) -> float:
        """Seconds of service, one by one, on the longest way behind this module's loop; loops count once."""
        return max((self._alone_s(k) + self._after_s(k) for k in self._behind[stage]), default=0.0)

    def _alone_s(self, stage: int) -> float:
        profile = self._fits[stage].profile()
        return 0.0 if profile is None else profile.latency_s(1)

    def idle_workers(self) -> list[tuple[str, Worker]]:
        """Workers with nothing in hand that may be given something, by name."""
        idle = [
            (address, worker)
            for address, worker in self._fleet.workers.items()
            if not worker.held_slots and (worker.free_slots > 0 or worker.is_leaving)
        ]
        return sorted(idle, key=lambda entry: entry[1].hello.replica)

    def take(self, address: str, worker: Worker, now_s: float, *, opens: bool, entry: str) -> list[Turn]:
        """Takes the worker's next batch off its queue, none if nothing is to start now.

        Which module comes first is `DeviceTurns`' choice.

        Args:
            address: the worker.
            worker: the same.
            now_s: the time.
            opens: whether requests may enter the program now.
            entry: stream that they enter on.
        """
        hosted = worker.hello.stages
        eligible = {k: self._eligible(k, address, worker, opens=opens, entry=entry) for k in hosted}
        offers = [self._offer(stage, turns, worker) for stage, turns in eligible.items() if turns]
        for offer in self.turns.order(address, hosted, offers):
            batch = self._next(offer.stage, eligible[offer.stage], worker, now_s)
            if batch:
                for turn in batch:
                    self.queues[offer.stage].remove(turn)
                self.turns.taken(address, hosted, self._offer(offer.stage, batch, worker))
                return batch
        return []

    def _offer(self, stage: int, turns: Sequence[Turn], worker: Worker) -> Offer:
        most = worker.hello.max_batch
        profile = self._fits[stage].profile(most)
        whole_s = UNKNOWN_S if profile is None else profile.latency_s(min(len(turns), most))
        return Offer(stage, min(turn.arrived_s for turn in turns), whole_s)

    def _eligible(self, stage: int, address: str, worker: Worker, *, opens: bool, entry: str) -> list[Turn]:
        """Turns of a module that this worker may run together, in order; at most one of a request."""
        mine: list[Turn] = []
        free: list[Turn] = []
        seen: set[int] = set()
        for turn in self.queues[stage]:
            if turn.call.number in seen or (not opens and turn.work.parts[0][0] == entry):
                continue
            if turn.home == address:
                mine.append(turn)
            elif turn.home is None:
                free.append(turn)
            else:
                continue
            seen.add(turn.call.number)
        share = 0 if worker.is_leaving else self._share(stage, address, worker, len(free))
        turns = sorted(mine + free[:share], key=lambda turn: turn.order)
        if turns and self._is_alone(turns[0]):
            return turns[:1]
        return [turn for turn in turns if not self._is_alone(turn)]

    def _is_alone(self, turn: Turn) -> bool:
        """Whether a turn is to be a batch of its own."""
        return turn.call.is_alone or self._suspects.is_due(turn.call.number, turn.model, turn.rounds)

    def _share(self, stage: int, address: str, worker: Worker, free: int) -> int:
        """How many of the turns without a home this worker may take."""
        ready = [(a, w) for a, w in self._fleet.of_stage(stage) if w.takes_new]
        if not self._keeping[stage]:
            idle = sum(not w.held_slots for _, w in ready)
            return -(-free // max(1, idle))
        bound = sum(self.homes[stage, a] for a, _ in ready)
        even = -(-(bound + free) // max(1, len(ready)))
        return max(0, min(free, min(even, worker.hello.slots) - self.homes[stage, address]))

    def _next(self, stage: int, turns: Sequence[Turn], worker: Worker, now_s: float) -> list[Turn]:
        queue = LoopQueue() if self._is_loop[stage] else RequestQueue()
        for turn in turns:
            if turn.is_late:
                queue.demote(turn)
            elif isinstance(queue, LoopQueue) and turn.has_begun:
                queue.push_back(turn)
            else:
                queue.push(turn)
        most = worker.hello.max_batch if worker.is_leaving else min(worker.free_slots, worker.hello.max_batch)
        profile = self._fits[stage].profile(most)
        if profile is not None and self._plans_rounds[stage] and all(_is_counted(turn) for turn in turns):
            rounds = Rounds(profile, self.pace_ratio(stage), now_s, self._after_s(stage))
            batch, given_up = rounds.next_batch(turns)
            self.given_up += given_up
            return batch
        head = queue.head
        is_planned = profile is not None and (head is None or head.deadline_s < math.inf)
        policy = self._policies[stage] if is_planned else self._eager
        known = profile or LatencyProfile(0.0, UNKNOWN_S, most)
        candidate = policy.candidate(queue, known, now_s, now_s)
        self.given_up += _turns(queue.take_given_up())
        if candidate is None:
            return []
        if candidate.start_s > now_s:
            self.next_start_s = min(self.next_start_s, candidate.start_s)
            return []
        return _turns(queue.pop_front(candidate.size))


def _is_counted(turn: Turn) -> bool:
    return turn.visits > 0 and turn.call.due_s < math.inf


def _turns(requests: Sequence[Request]) -> list[Turn]:
    return [request for request in requests if isinstance(request, Turn)]


def behind(routes: Routes) -> list[list[int]]:
    """By stage the modules that a request may come to next when it has left the module's loop.

    Nothing leads back, so following them comes to an end.
    """
    edges = successors(routes.graph)
    found = []
    for module in routes.graph.modules:
        region = routes.region(module.name)
        outside = {name for inside in region for name in edges[inside]} - set(region)
        found.append(sorted(routes.stage_of[name] for name in outside))
    return found


def priors_of(pipeline: Pipeline) -> list[LatencyProfile | None]:
    """What the bundle says of the modules' service times."""
    return [bundled(stage.profile) for stage in pipeline.stages]
