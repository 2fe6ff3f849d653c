"""One GPU of Nexus: the models planned for it, what was routed to it, whose turn it is. Pure.

Before: `nexus`, which routes. After: its orders. A GPU runs its models in turn and never waits for a cycle to
come round; a model whose turn it is takes at most its planned batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from keystage.batching.api import Request
from keystage.batching.profile import LatencyProfile
from keystage.batching.rivals.line import Line
from keystage.batching.rivals.nexus_plan import Part


class Backend:
    """One GPU.

    Attributes:
        number: of the replica.
        hosted: models that it could serve.
        batches: planned most requests of a batch, by model.
        lines: what was routed here, by model.
        is_busy: it runs a batch.
    """

    __slots__ = ("_turn", "batches", "hosted", "is_busy", "lines", "number")

    def __init__(self, number: int, hosted: frozenset[int]) -> None:
        self.number = number
        self.hosted = hosted
        self.batches: dict[int, int] = {}
        self.lines: dict[int, Line] = {}
        self.is_busy = False
        self._turn: deque[int] = deque()

    def adopt(self, parts: Mapping[int, Part], profiles: Mapping[int, LatencyProfile]) -> list[Line]:
        """Takes over a plan. Returns what waited for models of the last one, to be routed anew."""
        before = list(self.lines.values())
        self.batches = {model: part.batch for model, part in parts.items()}
        self.lines = {model: Line(profiles[model]) for model in parts}
        self._turn = deque(parts)
        return before

    def next_batch(self, now_s: float, *, early_drop: bool) -> tuple[list[Request], list[Request]]:
        """The batch of the model whose turn it is and that has one.

        Returns:
            (batch, dropped): the batch is empty when nothing waits.
        """
        dropped: list[Request] = []
        turn = self._turn
        for _ in range(len(turn)):
            model = turn[0]
            turn.rotate(-1)
            line, most = self.lines[model], self.batches[model]
            if line.queue.head is not None:
                dropped += line.expire(now_s)
                if early_drop:
                    dropped += line.narrow(now_s, most)
                size = min(line.fit(now_s), most)
                if size:
                    return line.take(size), dropped
        for line in self.lines.values():
            if len(line):
                return line.take_demoted(), dropped
        return [], dropped
