"""One stage at work: its queue, its replicas, and the counters a router would keep of it.

Before it: items come from outside or from the stage before. After it: `flow` takes items on. Late
binding: items wait in the stage's queue, and a free replica (the smallest number first) takes as many
as it may at once. A replica works on one batch at a time for l(b) = (alpha + cpu / cores) b + beta
seconds times the draw of the batch's first item. Items are indices of the pipeline's arrivals.

These methods are the hot path, kept in one module so that a batch costs few calls: counters are plain
attributes, sums of waits are kept as sums of times, and the queue's area changes only when something had
to wait.
"""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from keystage.simulator.api import StageSpec
from keystage.simulator.engine import DONE, Engine
from keystage.simulator.replica import Replica

NOWHERE, SEVERAL = -1, -2
"""In `Stage.made_on`: not made yet (or by the request's sender); made on several nodes."""


class Stage:
    """Queue, replicas and counters of one stage.

    Attributes:
        function: stage function.
        index: stage index in its pipeline.
        pipeline: index of the pipeline.
        spec: what was described.
        cores: cores of each replica now.
        replicas: living replicas by number, draining ones too.
        free: numbers of idle ready replicas (a heap; may hold numbers that are gone).
        came_s: arrival time at this stage by item.
        made_on: node that made an item's input, by item; None where nodes make no difference.
        busy_s: compute seconds of replicas that are gone.
        dropped: items that were refused here (never by this eager stage).
        on_done: takes a finished batch on: (time, replica, items).
        on_drained: told when a draining replica has finished.
    """

    __slots__ = (
        "alpha_s", "area_item_s", "arrivals", "batches", "beta_s", "busy_s", "came_s", "cores", "dropped",
        "engine", "factors", "first_arrival_s", "free", "function", "gap_sq_sum_s2", "in_flight", "index",
        "last_area_s", "last_arrival_s", "made_on", "most", "on_done", "on_drained", "pipeline", "queue",
        "replicas", "service_sq_sum_s2", "service_sum_s", "services", "sojourn_sum_s",
        "spec", "transfer_s", "wait_sum_s",
    )  # fmt: skip

    def __init__(
        self,
        engine: Engine,
        function: str,
        pipeline: int,
        index: int,
        spec: StageSpec,
        items: int,
        factors: array.array[float] | None,
    ) -> None:
        self.engine = engine
        self.function = function
        self.pipeline = pipeline
        self.index = index
        self.spec = spec
        self.factors = factors
        self.most = spec.most
        self.beta_s = spec.beta_s
        self.alpha_s = 0.0
        self.cores = 0.0
        self.set_cores(spec.cores)
        self.queue: deque[int] = deque()
        self.replicas: dict[int, Replica] = {}
        self.free: list[int] = []
        self.came_s = array.array("d", bytes(8 * items))
        self.made_on: array.array[int] | None = None
        self.transfer_s = 0.0
        self.on_done: Callable[[float, Replica, list[int]], None] = _nowhere
        self.on_drained: Callable[[float, Replica], None] = _unwatched
        self.arrivals = self.services = self.in_flight = self.batches = self.dropped = 0
        self.first_arrival_s = self.last_arrival_s = 0.0
        self.gap_sq_sum_s2 = self.service_sum_s = self.service_sq_sum_s2 = 0.0
        self.sojourn_sum_s = self.wait_sum_s = self.busy_s = 0.0
        self.area_item_s = self.last_area_s = 0.0

    def set_cores(self, cores: float) -> None:
        """Cores of each replica from now on; batches under way keep their time."""
        self.cores = cores
        self.alpha_s = self.spec.alpha_s + (self.spec.cpu_core_s / cores if self.spec.cpu_core_s else 0.0)

    def set_distance(self, transfer_s: float) -> None:
        """Inputs made on another node take so long to come to the replica that takes them."""
        self.transfer_s = transfer_s
        self.made_on = array.array("i", [NOWHERE]) * len(self.came_s)

    # ------------------------------------------------------------------ items come

    def arrive(self, at_s: float, item: int) -> None:
        """One item comes."""
        if self.arrivals:
            gap_s = at_s - self.last_arrival_s
            self.gap_sq_sum_s2 += gap_s * gap_s
        else:
            self.first_arrival_s = at_s
        self.arrivals += 1
        self.last_arrival_s = at_s
        self.came_s[item] = at_s
        queue = self.queue
        if queue:
            self.area_item_s += len(queue) * (at_s - self.last_area_s)
        elif self.free:
            replica = self._idle()
            if replica is not None:
                self._begin(at_s, replica, [item], at_s)
                return
        self.last_area_s = at_s
        queue.append(item)

    def arrive_batch(self, at_s: float, items: list[int]) -> None:
        """Items come at one moment."""
        if len(items) == 1:
            self.arrive(at_s, items[0])
            return
        if self.arrivals:
            gap_s = at_s - self.last_arrival_s
            self.gap_sq_sum_s2 += gap_s * gap_s
        else:
            self.first_arrival_s = at_s
        self.arrivals += len(items)
        self.last_arrival_s = at_s
        came_s = self.came_s
        for item in items:
            came_s[item] = at_s
        queue = self.queue
        if queue:
            self.area_item_s += len(queue) * (at_s - self.last_area_s)
        self.last_area_s = at_s
        queue.extend(items)
        if self.free:
            self.dispatch(at_s)

    # ------------------------------------------------------------------ replicas come and go

    def serve(self, at_s: float, replica: Replica) -> None:
        """A replica is ready."""
        heappush(self.free, replica.number)
        self.dispatch(at_s)

    def vacate(self, at_s: float, replica: Replica) -> None:
        """A busy replica is draining: it finishes its batch, nothing else has to be done."""

    def lose(self, at_s: float, replica: Replica) -> None:
        """A replica has died: its items wait again, before all others; their waits go on from now."""
        items, replica.items = replica.items, None
        if items is None:
            return
        self.grow_area(at_s)
        self.queue.extendleft(reversed(items))
        self.wait_sum_s -= len(items) * at_s - sum([self.came_s[i] for i in items])
        self.in_flight -= len(items)
        if replica.shared:
            self.release(at_s, replica)
        self.dispatch(at_s)

    # ------------------------------------------------------------------ batches

    def dispatch(self, at_s: float) -> None:
        """Gives waiting items to idle replicas, evenly, as the router does."""
        while self.queue:
            replica = self._idle()
            if replica is None:
                return
            most = self.most
            if most > 1 and self.free and not replica.shared:
                most = min(most, -(-len(self.queue) // (1 + self._idle_others())))
            self._take(at_s, replica, most)

    def _idle_others(self) -> int:
        """Idle replicas beside the one at hand."""
        found = (self.replicas.get(number) for number in set(self.free))
        return sum(1 for r in found if r is not None and r.state == "ready" and r.items is None)

    def _idle(self) -> Replica | None:
        """The idle replica of smallest number whose GPUs, if shared, are free too."""
        free, replicas = self.free, self.replicas
        while free:
            replica = replicas.get(heappop(free))
            if replica is None or replica.state != "ready" or replica.items is not None:
                continue
            if replica.shared:
                held_up = next((gpu for gpu in replica.shared if gpu.is_busy), None)
                if held_up is not None:
                    held_up.waiters.append(replica)
                    continue
                for gpu in replica.shared:
                    gpu.is_busy = True
            return replica
        return None

    def _take(self, at_s: float, replica: Replica, most: int) -> None:
        """An idle replica takes what waits, at most so many."""
        queue = self.queue
        self.area_item_s += len(queue) * (at_s - self.last_area_s)
        self.last_area_s = at_s
        if most == 1:
            item = queue.popleft()
            self._begin(at_s, replica, [item], self.came_s[item])
            return
        if len(queue) <= most:
            items = list(queue)
            queue.clear()
        else:
            items = [queue.popleft() for _ in range(most)]
        came_s = self.came_s
        self._begin(at_s, replica, items, sum([came_s[i] for i in items]))

    def _begin(self, at_s: float, replica: Replica, items: list[int], came_sum_s: float) -> None:
        count = len(items)
        service_s = self.alpha_s * count + self.beta_s
        if self.factors is not None:
            service_s *= self.factors[items[0]]
        replica.items = items
        replica.came_sum_s = came_sum_s
        replica.service_s = service_s
        self.in_flight += count
        self.wait_sum_s += count * at_s - came_sum_s
        done_s = at_s + service_s
        if self.made_on is not None:
            done_s += self._fetch_s(replica.node.index, items)
        engine = self.engine
        heappush(engine.heap, (done_s, DONE, next(engine.order), self.finish, (replica, items)))
        if engine.log is not None:
            engine.log.write(at_s, "begin", replica.name, items)

    def _fetch_s(self, node: int, items: list[int]) -> float:
        """Seconds until the inputs made on other nodes are here; those of one batch come side by side."""
        made_on = self.made_on
        assert made_on is not None
        return self.transfer_s if any(made_on[i] not in (node, NOWHERE) for i in items) else 0.0

    def finish(self, at_s: float, what: tuple[Replica, list[int]]) -> None:
        """A batch is done; nothing if its replica died meanwhile."""
        replica, items = what
        if replica.items is not items:
            return
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
        replica.items = None
        if self.engine.log is not None:
            self.engine.log.write(at_s, "done", replica.name, items)
        if replica.shared:
            self.release(at_s, replica)
        elif replica.state != "ready":
            self.on_drained(at_s, replica)
        elif self.queue:
            self._take(at_s, replica, self.most)
        else:
            heappush(self.free, replica.number)
        self.on_done(at_s, replica, items)

    def release(self, at_s: float, replica: Replica) -> None:
        """A replica gives its shared GPUs up; those who wait for them come first, it after them."""
        waiting: list[object] = []
        for gpu in replica.shared:
            gpu.is_busy = False
            waiting += gpu.waiters
            gpu.waiters.clear()
        if replica.state == "draining":
            self.on_drained(at_s, replica)
        elif replica.state == "ready":
            waiting.append(replica)
        for other in waiting:
            assert isinstance(other, Replica)
            heappush(other.stage.free, other.number)
            other.stage.dispatch(at_s)

    # ------------------------------------------------------------------ read

    def alive(self) -> list[Replica]:
        """Replicas that serve or will, by number."""
        return [r for r in self.replicas.values() if r.state in ("starting", "ready")]

    def queue_area_item_s(self, at_s: float) -> float:
        """Integral of the queue's length over time until now."""
        return self.area_item_s + len(self.queue) * (at_s - self.last_area_s)

    def waited_s(self, at_s: float) -> float:
        """Seconds waited in all until now, by those too that wait still."""
        return self.wait_sum_s + len(self.queue) * at_s - sum(self.came_s[i] for i in self.queue)

    def grow_area(self, at_s: float) -> None:
        """Adds the time until now to the queue's area; called before the queue changes."""
        self.area_item_s += len(self.queue) * (at_s - self.last_area_s)
        self.last_area_s = at_s


def _nowhere(at_s: float, replica: Replica, items: list[int]) -> None:
    raise AssertionError(f"stage of {replica.name} is not connected at {at_s}")


def _unwatched(at_s: float, replica: Replica) -> None:
    raise AssertionError(f"nobody takes {replica.name} back at {at_s}")
