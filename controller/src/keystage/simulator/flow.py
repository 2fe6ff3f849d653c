"""The way of items through a single-pass pipeline: from outside, stage to stage, to the end.

Before it: drawn arrivals. After it: stages queue and serve. An item comes to a stage once all stages
before it in the graph are done with it, one hop later; with no hop time it is handed on without an event
of its own. The input's journey from another node is part of the batch that takes it (late binding: who
takes it is not known earlier), not of its compute time. The next arrival is always the only one in the heap.
"""

from __future__ import annotations

import array
import math
from collections.abc import Callable, Sequence
from heapq import heappush

from keystage.simulator.api import Floats
from keystage.simulator.engine import COMES, Engine
from keystage.simulator.replica import Replica
from keystage.simulator.scheduled import ScheduledStage
from keystage.simulator.stage import NOWHERE, SEVERAL, Stage

Done = Callable[[float, Replica, list[int]], None]


class SinglePass:
    """One single-pass pipeline.

    Args:
        engine: clock and heap.
        stages: its stages, in order.
        predecessors: per stage those whose output it takes; empty for those that take the request itself.
        arrived_s: arrival times, ascending.
        hop_s: seconds from a stage to the next.
        on_served: told when the last item has left.

    Attributes:
        finished_s: finish time by item, NaN until then.
        left: items not finished.
    """

    def __init__(
        self,
        engine: Engine,
        stages: Sequence[Stage],
        predecessors: Sequence[tuple[int, ...]],
        arrived_s: Floats,
        hop_s: float,
        on_served: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._stages = stages
        self._hop_s = hop_s
        self._on_served = on_served
        self._arrivals_s = array.array("d", arrived_s.tobytes())
        self.arrived_s = arrived_s
        self.finished_s = array.array("d", [math.nan]) * len(arrived_s)
        self.left = len(arrived_s)
        self.came = 0
        self._entries = [stage for stage, before in zip(stages, predecessors, strict=True) if not before]
        afters: list[list[int]] = [[] for _ in stages]
        for k, before in enumerate(predecessors):
            for j in before:
                afters[j].append(k)
        sinks = sum(not after for after in afters)
        self._ends = array.array("i", [sinks]) * len(arrived_s) if sinks > 1 else None
        self._missing = {
            k: array.array("i", [len(before)]) * len(arrived_s)
            for k, before in enumerate(predecessors)
            if len(before) > 1
        }
        self._refused: set[int] = set()
        for k, stage in enumerate(stages):
            stage.on_done = self._step(k, afters[k])
            if isinstance(stage, ScheduledStage):
                stage.on_refused = self._refuse

    def open(self) -> None:
        """Puts the first arrival into the heap."""
        if self._arrivals_s:
            engine = self._engine
            heappush(engine.heap, (self._arrivals_s[0], COMES, next(engine.order), self._arrive, 0))

    def _arrive(self, at_s: float, item: int) -> None:
        self.came = item + 1
        if self.came < len(self._arrivals_s):
            engine = self._engine
            next_s = self._arrivals_s[self.came]
            heappush(engine.heap, (next_s, COMES, next(engine.order), self._arrive, self.came))
        if self._engine.log is not None:
            self._engine.log.write(at_s, "arrive", self._entries[0].function, item)
        for stage in self._entries:
            stage.arrive(at_s, item)

    def _step(self, k: int, after: Sequence[int]) -> Done:
        """What stage `k` does with a finished batch."""
        if not after:
            return self._leave
        engine, hop_s = self._engine, self._hop_s
        consumers = [self._stages[j] for j in after]
        waits = [self._missing.get(j) for j in after]
        if len(consumers) == 1 and waits[0] is None:
            return _hand_on(engine, consumers[0], hop_s)

        def split(at_s: float, replica: Replica, items: list[int]) -> None:
            for consumer, missing in zip(consumers, waits, strict=True):
                _mark(consumer, replica.node.index, items)
                whole = items
                if missing is not None:
                    for item in items:
                        missing[item] -= 1
                    whole = [item for item in items if missing[item] == 0]
                if whole and hop_s:
                    order = next(engine.order)
                    heappush(engine.heap, (at_s + hop_s, COMES, order, consumer.arrive_batch, whole))
                elif whole:
                    consumer.arrive_batch(at_s, whole)

        return split

    def _refuse(self, at_s: float, items: list[int]) -> None:
        """Items leave unserved; what other stages still do with them leads nowhere."""
        refused = [item for item in items if item not in self._refused]
        self._refused.update(refused)
        self.left -= len(refused)
        if refused and not self.left:
            self._on_served()

    def _leave(self, at_s: float, replica: Replica, items: list[int]) -> None:
        """Items leave a last stage; with several they are finished when the last of them is done."""
        ends = self._ends
        if ends is None:
            done = items
        else:
            done = []
            for item in items:
                ends[item] -= 1
                if ends[item] == 0:
                    done.append(item)
        finished_s = self.finished_s
        for item in done:
            finished_s[item] = at_s
        self.left -= len(done)
        if done and not self.left:
            self._on_served()


def _hand_on(engine: Engine, consumer: Stage, hop_s: float) -> Done:
    """Hands batches on to the one stage that follows."""

    def at_once(at_s: float, replica: Replica, items: list[int]) -> None:
        if consumer.made_on is not None:
            _mark(consumer, replica.node.index, items)
        consumer.arrive_batch(at_s, items)

    def later(at_s: float, replica: Replica, items: list[int]) -> None:
        if consumer.made_on is not None:
            _mark(consumer, replica.node.index, items)
        heappush(engine.heap, (at_s + hop_s, COMES, next(engine.order), consumer.arrive_batch, items))

    return later if hop_s else at_once


def _mark(consumer: Stage, node: int, items: list[int]) -> None:
    """Notes on which node the inputs lie; inputs from several nodes are near to none."""
    made_on = consumer.made_on
    if made_on is not None:
        for item in items:
            made_on[item] = node if made_on[item] in (NOWHERE, node) else SEVERAL
