"""A stage whose batches are decided on by a scheduler of `keystage.batching`, as the live router runs it.

Before and after it: as for `stage`, whose counters and replicas it shares; used where a stage's `batching`
is not eager. Requests carry the stage's cumulative deadline. A scheduler of its own serves each stage:
workers of a pipeline host one stage each here, so that one for all stages would decide the same. It orders by
deadline where the eager stage serves in order of arrival, and its timers are events like any other.
"""

from __future__ import annotations

import array
import math
from collections.abc import Callable, Sequence
from heapq import heappush

from keystage.batching.api import Delays, Dispatch, Drop
from keystage.batching.choice import parse_batching
from keystage.batching.deadlines import stage_deadline_s
from keystage.batching.profile import LatencyProfile
from keystage.batching.scheduler import CentralScheduler
from keystage.batching.stage_policy import PATIENCE_S, StagePolicy, StageRequest
from keystage.simulator.api import StageSpec
from keystage.simulator.engine import OUTSIDE, Engine
from keystage.simulator.replica import Replica
from keystage.simulator.stage import Stage

TIMER = OUTSIDE + 1
"""Priority of a scheduler's timers: what comes and ends at the same moment is known to it."""
LEAST_ALPHA_S = 1e-9
"""A scheduler plans with batches that take time; one of a stage that takes none takes this much an item."""


class ScheduledStage(Stage):
    """Queue, replicas and counters of one stage under a scheduler.

    Args:
        engine: clock and heap.
        function: stage function.
        pipeline: index of the pipeline.
        index: stage index in it.
        spec: what was described.
        arrived_s: when each item came to the pipeline.
        due_s: seconds that an item's whole way may take, infinite for any time.
        shares: parts of them that may be gone when an item comes here and when it leaves.
        factors: draws of service times.

    Attributes:
        on_refused: told which items were refused because they could not meet their deadline.
        batch_sizes: sizes of the batches in the order they began.
        due: items with a deadline that left the stage or were refused here.
        late: those of them that left it after their stage's deadline.
    """

    __slots__ = (
        "_arrived_s", "_due_s", "_is_refusing", "_policy", "_requests", "_scheduler", "_shares", "_timer_s",
        "batch_sizes", "due", "late", "on_refused",
    )  # fmt: skip

    def __init__(
        self,
        engine: Engine,
        function: str,
        pipeline: int,
        index: int,
        spec: StageSpec,
        arrived_s: array.array[float],
        due_s: float,
        shares: tuple[float, float],
        factors: array.array[float] | None,
    ) -> None:
        self._policy = StagePolicy(parse_batching(spec.batching), lambda: self._scheduler.idle(0))
        self._policy.is_known = True
        self._scheduler = CentralScheduler([(LatencyProfile(1.0, 0.0), self._policy)], Delays())
        self._arrived_s = arrived_s
        self._due_s = due_s
        self._shares = shares
        self._is_refusing = spec.late == "refuse"
        self._requests: dict[int, StageRequest] = {}
        self._timer_s = math.inf
        self.on_refused: Callable[[float, list[int]], None] = _unheard
        self.batch_sizes = array.array("i")
        self.due = self.late = 0
        super().__init__(engine, function, pipeline, index, spec, len(arrived_s), factors)

    def set_cores(self, cores: float) -> None:
        """See `Stage.set_cores`; the scheduler plans with the new service time."""
        super().set_cores(cores)
        profile = LatencyProfile(max(self.alpha_s, LEAST_ALPHA_S), self.beta_s, self.most)
        self._scheduler.set_profile(0, profile, self.engine.now_s)

    # ------------------------------------------------------------------ items come

    def arrive(self, at_s: float, item: int) -> None:
        """One item comes."""
        self.arrive_batch(at_s, [item])

    def arrive_batch(self, at_s: float, items: list[int]) -> None:
        """Items come at one moment."""
        if self.arrivals:
            gap_s = at_s - self.last_arrival_s
            self.gap_sq_sum_s2 += gap_s * gap_s
        else:
            self.first_arrival_s = at_s
        self.arrivals += len(items)
        self.last_arrival_s = at_s
        self.grow_area(at_s)
        for item in items:
            self.came_s[item] = at_s
        self._enter(at_s, items)

    def _enter(self, at_s: float, items: list[int]) -> None:
        self.queue.extend(items)
        is_dated = self._due_s < math.inf
        share_s = self._due_s * (self._shares[1] - self._shares[0]) if is_dated else 0.0
        for place, item in enumerate(items, 1):
            arrived_s = self._arrived_s[item]
            # Without a deadline: in the order they came to the pipeline.
            limit_s = arrived_s + self._due_s if is_dated else arrived_s + PATIENCE_S
            deadline_s = stage_deadline_s(arrived_s, limit_s, self._shares[1]) if is_dated else limit_s
            request = StageRequest(item, 0, self.came_s[item], deadline_s, share_s, is_dated=is_dated)
            self._requests[item] = request
            self._policy.is_gathering = place < len(items)
            self._scheduler.arrive(request, at_s)
        self.dispatch(at_s)

    # ------------------------------------------------------------------ replicas come and go

    def serve(self, at_s: float, replica: Replica) -> None:
        """A replica is ready."""
        self._scheduler.add_replica(replica.number, (0,), at_s)
        self.dispatch(at_s)

    def vacate(self, at_s: float, replica: Replica) -> None:
        """A busy replica is draining: it is given nothing more."""
        self._scheduler.remove_replica(replica.number, at_s)
        self.dispatch(at_s)

    def lose(self, at_s: float, replica: Replica) -> None:
        """A replica has died: its items wait again; their waits go on from now."""
        self._scheduler.remove_replica(replica.number, at_s)
        items, replica.items = replica.items, None
        if items is not None:
            self.grow_area(at_s)
            self.wait_sum_s -= len(items) * at_s - sum([self.came_s[i] for i in items])
            self.in_flight -= len(items)
            self._enter(at_s, items)
        self.dispatch(at_s)

    # ------------------------------------------------------------------ batches

    def dispatch(self, at_s: float) -> None:
        """Carries out what the scheduler says, and sets its timer."""
        while orders := self._scheduler.take():
            for order in orders:
                match order:
                    case Dispatch(_, number, requests, _):
                        self._start(at_s, number, [request.number for request in requests])
                    case Drop(_, requests):
                        self._give_up(at_s, [request.number for request in requests])
                    case _:
                        raise AssertionError(f"{self.function}: unexpected {order}")
        timer_s = self._scheduler.next_timer_s()
        if timer_s < self._timer_s:
            self._timer_s = timer_s
            engine = self.engine
            entry = (max(timer_s, at_s), TIMER, next(engine.order), self._on_timer, timer_s)
            heappush(engine.heap, entry)

    def _on_timer(self, at_s: float, timer_s: float) -> None:
        if timer_s == self._timer_s:
            self._timer_s = math.inf
            self._scheduler.on_timer(at_s)
            self.dispatch(at_s)

    def _start(self, at_s: float, number: int, items: list[int]) -> None:
        replica = self.replicas.get(number)
        if replica is None or replica.state != "ready":
            # Decided on before it left, in the same moment.
            self._unqueue(at_s, items)
            self._enter(at_s, items)
            return
        self._unqueue(at_s, items)
        self.batch_sizes.append(len(items))
        self._begin(at_s, replica, items, sum([self.came_s[i] for i in items]))

    def _give_up(self, at_s: float, items: list[int]) -> None:
        if not self._is_refusing:
            for item in items:
                self._scheduler.demote(self._requests[item], at_s)
            return
        self._unqueue(at_s, items)
        self.dropped += len(items)
        self.due += len(items)
        self.wait_sum_s += len(items) * at_s - sum([self.came_s[i] for i in items])
        self.on_refused(at_s, items)

    def _unqueue(self, at_s: float, items: list[int]) -> None:
        self.grow_area(at_s)
        for item in items:
            self.queue.remove(item)
            del self._requests[item]

    def finish(self, at_s: float, what: tuple[Replica, list[int]]) -> None:
        """A batch is done; nothing if its replica died meanwhile."""
        replica, items = what
        if replica.items is not items:
            return
        self._count(at_s, replica, items)
        replica.items = None
        if self.engine.log is not None:
            self.engine.log.write(at_s, "done", replica.name, items)
        if replica.state == "ready":
            self._scheduler.finished(replica.number, at_s)
        else:
            self.on_drained(at_s, replica)
        self.on_done(at_s, replica, items)
        self.dispatch(at_s)

    def _count(self, at_s: float, replica: Replica, items: list[int]) -> None:
        count = len(items)
        service_s = replica.service_s
        self.in_flight -= count
        self.services += count
        self.batches += 1
        self.service_sum_s += count * service_s
        self.service_sq_sum_s2 += count * service_s * service_s
        self.sojourn_sum_s += count * at_s - replica.came_sum_s
        replica.busy_s += service_s
        replica.rows += count
        if self._due_s < math.inf:
            limit_s = at_s - self._due_s * self._shares[1] - _ROUNDING_S
            arrived_s = self._arrived_s
            self.due += count
            self.late += sum([arrived_s[i] < limit_s for i in items])


def stage_shares(stages: Sequence[StageSpec], before: Sequence[tuple[int, ...]]) -> list[tuple[float, float]]:
    """Parts of a pipeline's deadline that may be gone when an item comes to a stage and when it leaves.

    The deadline is divided along the longest way in proportion to the service time of one item.

    Args:
        stages: the stages.
        before: per stage those whose output it takes.
    """
    ends_s: dict[int, float] = {}
    while len(ends_s) < len(stages):
        for k, stage in enumerate(stages):
            if k not in ends_s and all(j in ends_s for j in before[k]):
                own_s = max(stage.alpha_s + stage.cpu_core_s / stage.cores + stage.beta_s, LEAST_ALPHA_S)
                ends_s[k] = own_s + max((ends_s[j] for j in before[k]), default=0.0)
    longest_s = max(ends_s.values())
    begins_s = [max((ends_s[j] for j in js), default=0.0) for js in before]
    return [(begin_s / longest_s, ends_s[k] / longest_s) for k, begin_s in enumerate(begins_s)]


_ROUNDING_S = 1e-9
"""What rounding may add to a time without making an item late."""


def _unheard(at_s: float, items: list[int]) -> None:
    raise AssertionError(f"{len(items)} items were refused at {at_s} and nobody takes note")
