"""State of an emulated cluster: replicas that take exactly l(b) seconds, and what became of each request.

Before: `batching_cluster.serve`, whose loop tells it what a scheduler has ordered. After: `Served`, the
count. It knows nothing of policies and checks what it is told: no request is lost, settled twice, or run
where its model is not.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from keystage.batching.api import Dispatch, Drop, Order, Preempt, Request
from keystage.bench.batching_arrivals import Arrivals
from keystage.bench.batching_models import Model

Network: TypeAlias = Callable[[int], float]
"""Seconds from the scheduler's word to the start of the work, drawn for a batch of this size."""

SLACK_S = 1e-9
"""What rounding may add to a time without making a request late."""

_GOOD, _LATE, _DROPPED = 1, 2, 3


class ClusterError(Exception):
    """A scheduler ordered what cannot be: names the request or replica."""


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What became of the requests that came in [warm_s, seconds).

    Attributes:
        seconds: length of that window.
        offered: int64[models]; `good`, `late` and `dropped` add up to it.
        good: int64[models], ended by the deadline.
        late: int64[models], ended after it.
        dropped: int64[models], given up by the scheduler.
        batches: per model, batches begun in the window by size; those that were cancelled are not counted.
        busy_s: float64[replicas], time within the window on batches, cancelled ones included.
        queueing_s: per model, float64[good + late]: from arrival to the start of its batch.
        preempted: batches that were cancelled.
        stopped: the run was given up early (`give_up_ratio`); the other figures are then partial.
    """

    seconds: float
    offered: NDArray[np.int64]
    good: NDArray[np.int64]
    late: NDArray[np.int64]
    dropped: NDArray[np.int64]
    batches: list[Counter[int]]
    busy_s: NDArray[np.float64]
    queueing_s: list[NDArray[np.float64]]
    preempted: int
    stopped: bool

    @property
    def goodput_rps(self) -> float:
        """Good requests a second, all models together."""
        return float(self.good.sum()) / self.seconds

    @property
    def bad_ratio(self) -> float:
        """Late and dropped over offered, all models together; 0 when nothing was offered."""
        offered = int(self.offered.sum())
        return 1 - int(self.good.sum()) / offered if offered else 0.0

    @property
    def worst_bad_ratio(self) -> float:
        """The same of the model where it is highest."""
        asked = self.offered > 0
        return float((1 - self.good[asked] / self.offered[asked]).max()) if asked.any() else 0.0

    @property
    def idle_ratio(self) -> float:
        """Share of the window in which a replica runs nothing, over all replicas."""
        return 1 - float(self.busy_s.sum()) / (self.seconds * len(self.busy_s))

    def median_batch(self, model: int) -> int:
        """Half of the model's requests run in batches at least this large, half in at most this large."""
        sizes = self.batches[model]
        half, seen = sum(size * count for size, count in sizes.items()) / 2, 0
        for size in sorted(sizes):
            seen += size * sizes[size]
            if seen >= half:
                return size
        return 0


class _Replica:
    """One emulated device: what it runs and what was sent to it ahead."""

    __slots__ = ("busy_s", "free_s", "models", "running")

    def __init__(self, models: Collection[int]) -> None:
        self.models = frozenset(models)
        self.free_s = 0.0
        self.busy_s = 0.0
        self.running: list[_Run] = []


class _Run:
    """A batch on a replica."""

    __slots__ = ("model", "replica", "requests", "start_s")

    def __init__(self, order: Dispatch, start_s: float) -> None:
        self.model = order.model
        self.replica = order.replica
        self.requests = order.requests
        self.start_s = start_s


class Cluster:
    """State of one run.

    Attributes:
        ends: heap of (end, tie, run).
        gave_up: more requests went bad than `bad_left` allowed.
    """

    def __init__(self, models: Sequence[Model], hosts: Sequence[Collection[int]], count: int) -> None:
        self.models = models
        self.replicas = [_Replica(models) for models in hosts]
        self.ends: list[tuple[float, int, _Run]] = []
        self.ties = 0
        self.outcome = bytearray(count)
        self.start_s = [math.nan] * count
        self.batches: list[Counter[int]] = [Counter() for _ in models]
        self.judged_with = [0] * len(models)
        self.bad_left = [count]
        self.warm_s = 0.0
        self.until_s = math.inf
        self.preempted = 0
        self.gave_up = False
        self.network: Network | None = None

    def carry_out(self, orders: list[Order], now_s: float) -> None:
        """Does what the scheduler says.

        Raises:
            ClusterError: it cannot be done.
        """
        for order in orders:
            if type(order) is Dispatch:
                self._start(order, now_s)
            elif type(order) is Drop:
                for request in order.requests:
                    self._settle(request, _DROPPED)
            else:
                assert isinstance(order, Preempt)
                self._cancel(order.replica, now_s)

    def _start(self, order: Dispatch, now_s: float) -> None:
        replica, requests = self.replicas[order.replica], order.requests
        if order.model not in replica.models or not requests:
            raise ClusterError(f"replica {order.replica} cannot run {len(requests)} of model {order.model}")
        size = len(requests)
        at_s = order.start_s if self.network is None else now_s + self.network(size)
        start_s = max(now_s, at_s, replica.free_s)
        end_s = start_s + self.models[order.model].profile.latency_s(size)
        replica.free_s = end_s
        run = _Run(order, start_s)
        replica.running.append(run)
        self.ties += 1
        heapq.heappush(self.ends, (end_s, self.ties, run))

    def end(self, now_s: float) -> int | None:
        """Takes the first ending off the heap; the replica, or None when that batch was cancelled."""
        run = heapq.heappop(self.ends)[2]
        if not run.requests:
            return None
        replica = self.replicas[run.replica]
        replica.running.remove(run)
        self._work(replica, run.start_s, now_s)
        start_s, model, by_s = run.start_s, run.model, now_s - SLACK_S
        if self.warm_s <= start_s < self.until_s:
            self.batches[model][len(run.requests)] += 1
        starts, outcome = self.start_s, self.outcome
        for request in run.requests:
            number = request.number
            if outcome[number] or request.model != model:
                raise ClusterError(f"{request} was settled before, or ran among requests of model {model}")
            starts[number] = start_s
            if request.deadline_s >= by_s:
                outcome[number] = _GOOD
            else:
                self._settle(request, _LATE)
        return run.replica

    def _settle(self, request: Request, outcome: int) -> None:
        """A request ends badly."""
        if self.outcome[request.number]:
            raise ClusterError(f"{request} was settled before")
        self.outcome[request.number] = outcome
        if request.arrived_s >= self.warm_s:
            group = self.judged_with[request.model]
            self.bad_left[group] -= 1
            if self.bad_left[group] < 0:
                self.gave_up = True

    def _cancel(self, number: int, now_s: float) -> None:
        replica = self.replicas[number]
        if not replica.running:
            raise ClusterError(f"replica {number} runs nothing that could be preempted")
        for run in replica.running:
            self._work(replica, run.start_s, now_s)
            run.requests = []
            self.preempted += 1
        replica.running = []
        replica.free_s = now_s

    def _work(self, replica: _Replica, start_s: float, end_s: float) -> None:
        replica.busy_s += max(0.0, min(end_s, self.until_s) - max(start_s, self.warm_s))

    def served(self, arrivals: Arrivals) -> Served:
        """The count of this run."""
        models = len(self.models)
        counted = arrivals.times_s >= self.warm_s
        outcome = np.frombuffer(self.outcome, dtype=np.uint8)
        waited_s = np.asarray(self.start_s) - arrivals.times_s

        def count(kind: int) -> NDArray[np.int64]:
            return np.bincount(arrivals.model[counted & (outcome == kind)], minlength=models)

        ran = counted & ((outcome == _GOOD) | (outcome == _LATE))
        return Served(
            seconds=self.until_s - self.warm_s,
            offered=np.bincount(arrivals.model[counted], minlength=models),
            good=count(_GOOD),
            late=count(_LATE),
            dropped=count(_DROPPED),
            batches=self.batches,
            busy_s=np.array([replica.busy_s for replica in self.replicas]),
            queueing_s=[waited_s[ran & (arrivals.model == model)] for model in range(models)],
            preempted=self.preempted,
            stopped=self.gave_up,
        )
