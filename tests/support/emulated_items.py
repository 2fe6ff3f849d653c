"""A single-pass pipeline in emulated time: the router's real core, workers that take alpha b + beta seconds.

No process, no clock: time goes from event to event, so that the same arrivals give the same batches, always.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from keystage.bundle.api import StageProfile, StageSpec
from keystage.router.admission import AdmissionBounds
from keystage.router.batch_settings import BatchSettings
from keystage.router.engine import Refusal
from keystage.router.fleet import Fleet
from keystage.router.sessions import Answer, Refuse
from keystage.router.single import SinglePassCore
from keystage.wire import api


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """A batch as a worker began it."""

    began_s: float
    worker: str
    stage: int
    items: tuple[int, ...]


class EmulatedItems:
    """One pipeline.

    Args:
        stages: (alpha_s, beta_s) of each stage.
        settings: of its batches.
        is_profiled: whether the bundle has profiles.
        hop_s: from router to worker, and back.
    """

    def __init__(
        self,
        stages: Sequence[tuple[float, float]],
        settings: BatchSettings,
        *,
        is_profiled: bool = True,
        hop_s: float = 0.0,
    ) -> None:
        self._stages = list(stages)
        self._hop_s = hop_s
        specs = [
            StageSpec(
                k,
                "",
                (k, k + 1),
                0,
                0,
                [],
                f"e{k}",
                8,
                StageProfile("emulated", a, b) if is_profiled else None,
            )
            for k, (a, b) in enumerate(stages)
        ]
        self.fleet = Fleet(len(specs), "p")
        self.core = SinglePassCore(self.fleet, AdmissionBounds(queue_items=10**6), 0, settings, specs)
        self.now_s = 0.0
        self.batches: list[Batch] = []
        self.answered_s: dict[int, float] = {}
        self.refused: dict[int, Refusal] = {}
        self.came_s: dict[int, float] = {}
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._waiting: dict[str, deque[tuple[float, api.Work | api.Fetch]]] = {}
        self._busy: dict[str, bool] = {}
        self._slots = itertools.count()

    # ------------------------------------------------------------ what happens

    def at(self, at_s: float, event: Callable[[], None], priority: int = 1) -> None:
        """Something happens at a time; of one moment what ends comes before what comes."""
        heapq.heappush(self._heap, (at_s, priority, next(self._order), event))

    def add_worker(
        self, name: str, stages: tuple[int, ...] = (0,), *, most: int = 64, slots: int = 0
    ) -> None:
        """A worker is ready now."""
        slots = slots or 2 * most
        hello = api.Hello(1, "p", stages, name, "b", "emulated", slots, 0, most, name, 1, "n", False)
        assert self.fleet.hello(name, hello, self.now_s) is None
        self.fleet.credit(name, api.Credit(name, slots, 0))
        self.fleet.ready(name, self.now_s)
        self._waiting[name], self._busy[name] = deque(), False
        self.core.worker_ready(name, self.now_s)
        self._flush()

    def set_stage(self, stage: int, times_s: tuple[float, float]) -> None:
        """A stage takes so long from now on: (alpha_s, beta_s)."""
        self._stages[stage] = times_s

    def kill_worker(self, name: str) -> None:
        """A worker dies, and the router notices at once."""
        del self._waiting[name], self._busy[name]
        self.fleet.remove(name)
        self.core.worker_lost(name, self.now_s)
        self._flush()

    def submit(self, deadline_s: float | None = None) -> int:
        """An item comes now."""
        number = self.core.submit(b"item", deadline_s, self.now_s)
        self.came_s[number] = self.now_s
        self._flush()
        return number

    def cancel(self, number: int) -> None:
        """A client goes away now."""
        self.core.cancel(number, self.now_s)
        self._flush()

    def submit_at(self, times_s: Sequence[float], deadline_s: float | None = None) -> None:
        """Items come."""
        for time_s in times_s:
            self.at(time_s, partial(self._come, deadline_s))

    def _come(self, deadline_s: float | None) -> None:
        self.submit(deadline_s)

    def run(self, until_s: float = math.inf) -> None:
        """Lets time pass until nothing is left to happen."""
        while True:
            timer_s = self.core.next_timer_s()
            next_s = min(timer_s, self._heap[0][0] if self._heap else math.inf)
            if next_s > until_s or next_s == math.inf:
                break
            self.now_s = max(self.now_s, next_s)
            if self._heap and self._heap[0][0] <= timer_s:
                heapq.heappop(self._heap)[3]()
            else:
                self.core.on_timer(self.now_s)
            self._flush()
        if until_s < math.inf:
            self.now_s = until_s

    # ------------------------------------------------------------ what follows

    def sizes(self, stage: int = 0) -> list[int]:
        """Sizes of the batches of a stage in the order they began."""
        return [len(batch.items) for batch in self.batches if batch.stage == stage]

    def latencies_s(self) -> list[float]:
        """Of the answered items, in order of their numbers."""
        return [self.answered_s[number] - self.came_s[number] for number in sorted(self.answered_s)]

    def _flush(self) -> None:
        sends, outcomes = self.core.take()
        for address, message in sends:
            if isinstance(message, api.Work | api.Fetch):
                received = (self.now_s + self._hop_s, address, message)
                self.at(self.now_s + self._hop_s, lambda r=received: self._receive(*r), 0)  # type: ignore[misc]
        for outcome in outcomes:
            if isinstance(outcome, Answer):
                self.answered_s[outcome.session] = self.now_s
            elif isinstance(outcome, Refuse):
                self.refused[outcome.session] = outcome.refusal

    def _receive(self, received_s: float, address: str, message: api.Work | api.Fetch) -> None:
        if address in self._waiting:
            self._waiting[address].append((received_s, message))
            self._begin(address)

    def _begin(self, address: str) -> None:
        if self._busy.get(address, True) or not self._waiting[address]:
            return
        received_s, message = self._waiting[address].popleft()
        self._busy[address] = True
        self.batches.append(Batch(self.now_s, address, message.stage, tuple(message.sessions)))
        size = len(message.sessions)
        took_s = sum(a * size + b for a, b in self._stages[message.stage : message.last + 1])
        started_s = self.now_s - received_s
        self.at(self.now_s + took_s, lambda: self._end(address, message, started_s, took_s), 0)

    def _end(self, address: str, message: api.Work | api.Fetch, started_s: float, took_s: float) -> None:
        if address not in self._busy:
            return  # it died meanwhile
        self._busy[address] = False
        self.at(self.now_s + self._hop_s, lambda: self._report(address, message, started_s, took_s), 0)
        self._begin(address)

    def _report(self, address: str, message: api.Work | api.Fetch, started_s: float, took_s: float) -> None:
        if address not in self._busy:
            return
        numbers, epochs, last = message.sessions, message.epochs, message.last
        if message.more:
            refs = [api.TensorRef("uint8", (8,), 1, 5, 0, 8, next(self._slots)) for _ in numbers]
            parked = api.Parked(address, last, numbers, epochs, refs, started_s, took_s)
            self.core.parked(address, parked, self.now_s)
        else:
            payloads = [b"done"] * len(numbers)
            done = api.Results(address, last, numbers, epochs, "uint8", [], payloads, started_s, took_s)
            self.core.results(address, done, self.now_s)
