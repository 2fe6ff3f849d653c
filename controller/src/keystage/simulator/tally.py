"""What one stage's replicas cost over time, and how many there were.

Before it: `fleet` tells every change. After it: views and measures read. Plain sums, no events.
"""

from __future__ import annotations

from typing import Literal

Source = Literal["gpu", "memory", "disk", "remote"]
SOURCES: tuple[Source, ...] = ("gpu", "memory", "disk", "remote")


class Tally:
    """Replica numbers of one stage over time.

    Attributes:
        desired: replicas wanted, None before anybody decided.
        held: replicas that hold a place: starting, ready and draining.
        ready: replicas that serve.
        replica_s: seconds of held replicas.
        ready_replica_s: seconds of ready replicas.
        core_s: core-seconds of held replicas.
        starts: starts by source.
        starts_s: how long each took.
        series: (time, desired, ready) at each change.
    """

    __slots__ = (
        "_cores", "_since_s", "core_s", "desired", "held", "ready", "ready_replica_s", "replica_s", "series",
        "starts", "starts_s",
    )  # fmt: skip

    def __init__(self, cores: float) -> None:
        self.desired: int | None = None
        self.held = 0
        self.ready = 0
        self.replica_s = self.ready_replica_s = self.core_s = 0.0
        self.starts: dict[str, int] = dict.fromkeys(SOURCES, 0)
        self.starts_s: list[float] = []
        self.series: list[tuple[float, float, float]] = []
        self._cores = cores
        self._since_s = 0.0

    def change(
        self,
        at_s: float,
        *,
        held: int = 0,
        ready: int = 0,
        cores: float | None = None,
        desired: int | None = None,
    ) -> None:
        """Counts the time until now, then changes numbers (held and ready by a difference)."""
        past_s = at_s - self._since_s
        self.replica_s += self.held * past_s
        self.ready_replica_s += self.ready * past_s
        self.core_s += self.held * self._cores * past_s
        self._since_s = at_s
        self.held += held
        self.ready += ready
        if cores is not None:
            self._cores = cores
        if desired is not None:
            self.desired = desired
        point = (at_s, float(self.ready if self.desired is None else self.desired), float(self.ready))
        if not self.series or self.series[-1][1:] != point[1:]:
            if self.series and self.series[-1][0] == at_s:
                self.series.pop()
            self.series.append(point)
