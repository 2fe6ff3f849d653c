"""Looks over a steering's shoulder: what it saw at each tick, for plots over time.

Before it: `run.simulate` shows a snapshot to a steering. After it: `report` and `plots`. It passes the
steering's actions on unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from keystage.controller.domain.decision import Action
from keystage.controller.domain.snapshot import Measured, Snapshot
from keystage.controller.domain.steering import Steering


@dataclasses.dataclass(frozen=True, slots=True)
class StagePoint:
    """One stage at one tick.

    Attributes:
        at_s: simulated time.
        function: stage function.
        queue: items waiting.
        in_flight: items in service.
        desired: replicas wanted.
        ready: replicas ready.
        starting: replicas on their way.
    """

    at_s: float
    function: str
    queue: float
    in_flight: float
    desired: int
    ready: int
    starting: int


class Watched:
    """A steering whose snapshots are kept, thinned out to a bounded number of points.

    Args:
        steering: who decides; None: nobody.
        most: ticks kept: whenever there are more, every second one is dropped.
        told: called with every snapshot.
    """

    def __init__(
        self, steering: Steering | None, most: int = 4000, told: Callable[[Snapshot], None] | None = None
    ) -> None:
        self._steering = steering
        self._most = most
        self._told = told
        self._begun_s: float | None = None
        self._every = 1
        self._ticks = 0
        self._kept: list[tuple[StagePoint, ...]] = []

    @property
    def points(self) -> list[StagePoint]:
        """All that was kept, by time and then by stage."""
        return [point for tick in self._kept for point in tick]

    def steer(self, snapshot: Snapshot) -> Sequence[Action]:
        """See `Steering.steer`."""
        if self._begun_s is None:
            self._begun_s = snapshot.at_s
        if self._ticks % self._every == 0:
            self._kept.append(tuple(_points(snapshot, snapshot.at_s - self._begun_s)))
            if len(self._kept) > self._most:
                self._kept = self._kept[::2]
                self._every *= 2
        self._ticks += 1
        if self._told is not None:
            self._told(snapshot)
        return () if self._steering is None else self._steering.steer(snapshot)


def _points(snapshot: Snapshot, at_s: float) -> list[StagePoint]:
    return [
        StagePoint(
            at_s=at_s,
            function=stage.scale.function,
            queue=sum(_number(router.counters.queue) for router in stage.routers),
            in_flight=sum(_number(router.counters.in_flight) for router in stage.routers),
            desired=stage.scale.current,
            ready=stage.scale.ready,
            starting=len(stage.scale.starting),
        )
        for view in snapshot.pipelines
        for stage in view.stages
    ]


def _number(value: Measured) -> float:
    return value if value is not None else 0.0
