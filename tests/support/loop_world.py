"""A fluid world behind the real loop, in virtual time: what it shows can be spoilt, what it gets is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from support.controller_world import FluidWorld

from keystage.controller.decisions import DecisionLog
from keystage.controller.domain.decision import Action, Decision
from keystage.controller.domain.platform import PlatformError
from keystage.controller.domain.snapshot import PipelineView, Snapshot, StageView
from keystage.controller.loop import Loop

Spoil = Callable[[Snapshot], Snapshot]


@dataclasses.dataclass
class LoopWorld:
    """A `Platform` over a fluid world; every observation lets a tick pass.

    Attributes:
        fluid: the world.
        log: where its controller's decisions go.
        rate_rps: requests a second that come now.
        spoil: makes of what there is what is seen.
        shift_s: seconds that the snapshot's clock is wrong by.
        is_away: whether it can be seen at all.
        replicas: wanted replicas of every stage after each tick.
    """

    fluid: FluidWorld
    log: Path
    rate_rps: float = 0.0
    spoil: Spoil = lambda snapshot: snapshot
    shift_s: float = 0.0
    is_away: bool = False
    replicas: list[list[int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.start_controller()

    def start_controller(self) -> None:
        """Another controller takes over; it knows nothing but what it sees."""
        self.loop = Loop(self, self.fluid.settings, DecisionLog(self.log, 1 << 30), tick_s=0.25)

    def observe(self) -> Snapshot:
        """See `Platform.observe`."""
        if self.is_away:
            raise PlatformError("the world is away")
        seen = self.fluid.snapshot()
        return self.spoil(msgspec.structs.replace(seen, at_s=seen.at_s + self.shift_s))

    def apply(self, actions: Sequence[Action]) -> None:
        """See `Platform.apply`."""
        self.fluid.act(actions)

    def tick(self) -> Decision | None:
        """Lets one tick pass."""
        self.fluid.advance(self.rate_rps)
        decision = self.loop.tick()
        self.replicas.append([stage.desired or 0 for stage in self.fluid.stages])
        return decision

    def run(self, seconds: float, rate_rps: float | None = None) -> list[list[int]]:
        """Runs a while; returns wanted replicas of every stage after each of its ticks."""
        self.rate_rps = self.rate_rps if rate_rps is None else rate_rps
        begin = len(self.replicas)
        for _ in range(round(seconds / self.fluid.tick_s)):
            self.tick()
        return self.replicas[begin:]


def with_stages(snapshot: Snapshot, change: Callable[[StageView], StageView]) -> Snapshot:
    """A snapshot in which every stage is changed."""

    def changed(view: PipelineView) -> PipelineView:
        return msgspec.structs.replace(view, stages=tuple(change(stage) for stage in view.stages))

    return msgspec.structs.replace(snapshot, pipelines=tuple(changed(v) for v in snapshot.pipelines))
