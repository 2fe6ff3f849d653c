"""A small world for the policy's tests: one pipeline whose counters follow given rates.

It holds no policy: replicas start after a while, a tick feeds counters as a fluid queue would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keystage.controller.domain.decision import Action, Decision, LiftOverride, SetReplicas
from keystage.controller.domain.snapshot import (
    Counters,
    FunctionView,
    Override,
    PipelineView,
    RouterSample,
    Slo,
    Snapshot,
    StageView,
    Starting,
    WorkerSample,
)
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings


@dataclasses.dataclass
class FluidStage:
    """A stage with exponential-like moments: scv of arrivals and services 1."""

    service_s: float
    ready: int = 1
    desired: int | None = None
    starting: list[float] = dataclasses.field(default_factory=list)
    queue: float = 0.0
    arrivals: float = 0.0
    gap_s: float = 0.0
    gap_s2: float = 0.0
    services: float = 0.0
    sojourn_s: float = 0.0
    busy_s: float = 0.0
    override: Override | None = None
    min_replicas: int = 1
    max_replicas: int = 20
    cap: int | None = None
    zero_after_s: float | None = None


@dataclasses.dataclass
class FluidWorld:
    """A pipeline of fluid stages, seen and steered every `tick_s`."""

    stages: list[FluidStage]
    slo: Slo = dataclasses.field(default_factory=lambda: Slo(deadline_s=0.25))
    settings: PolicySettings = dataclasses.field(default_factory=PolicySettings)
    start_s: float = 0.4
    tick_s: float = 0.25
    now: float = 1000.0
    missing: str = ""
    scv: float = 1.0
    budget: int | None = None
    execution: str = "single-pass"
    slots: int = 1
    seen: Snapshot = dataclasses.field(default_factory=lambda: Snapshot(at_s=0.0))
    state: PolicyState = dataclasses.field(default_factory=PolicyState)
    history: list[tuple[float, Decision]] = dataclasses.field(default_factory=list)

    def snapshot(self) -> Snapshot:
        views = []
        for k, s in enumerate(self.stages):
            counters = Counters(
                arrivals=s.arrivals,
                gap_sum_s=s.gap_s,
                gap_sq_sum_s2=s.gap_s2,
                services=s.services,
                service_sum_s=s.services * s.service_s,
                service_sq_sum_s2=2 * s.services * s.service_s**2,
                sojourn_sum_s=s.sojourn_s,
                queue=s.queue,
                in_flight=0,
            )
            scale = FunctionView(
                function=f"p-stage-{k}",
                desired=s.desired,
                ready=s.ready,
                starting=tuple(Starting(f"r{i}", t) for i, t in enumerate(s.starting)),
                min_replicas=s.min_replicas,
                max_replicas=s.max_replicas,
                cap=s.cap,
                cap_reason="few cores" if s.cap is not None else "",
                override=s.override,
                zero_after_s=s.zero_after_s,
            )
            workers = tuple(
                WorkerSample(
                    replica=f"w{i}", slots=self.slots, held_slots=0, busy_s=s.busy_s / 8, rows=s.services / 8
                )
                for i in range(min(8, s.ready))
            )
            routers = (RouterSample(incarnation="a", at_s=self.now, counters=counters),)
            views.append(
                StageView(stage=k, scale=scale, start_s=self.start_s, routers=routers, workers=workers)
            )
        view = PipelineView(
            pipeline="p",
            execution=self.execution,  # type: ignore[arg-type]
            slo=self.slo,
            stages=tuple(views),
            missing=self.missing,
        )
        return Snapshot(at_s=self.now, pipelines=(view,), budget_replicas=self.budget)

    def step(self, rate_rps: float) -> Decision:
        """Lets one tick pass, looks, decides and applies."""
        self.advance(rate_rps)
        self.seen = self.snapshot()
        decision = decide(self.settings, self.seen, self.state)
        self.state = decision.state
        self.act(decision.actions)
        self.history.append((self.now, decision))
        return decision

    def advance(self, rate_rps: float) -> None:
        """Lets one tick pass."""
        self.now += self.tick_s
        inflow = rate_rps * self.tick_s
        for s in self.stages:
            s.starting, due = (
                [t for t in s.starting if t > self.now],
                [t for t in s.starting if t <= self.now],
            )
            s.ready += len(due)
            if inflow > 0:
                gap_s = self.tick_s / inflow
                s.gap_s += self.tick_s
                s.gap_s2 += inflow * gap_s**2 * (1 + self.scv)
            s.arrivals += inflow
            s.queue += inflow
            served = min(s.queue, s.ready * self.tick_s / s.service_s)
            s.queue -= served
            s.services += served
            s.busy_s += served * s.service_s
            s.sojourn_s += served * (s.service_s + s.queue * s.service_s / max(1, s.ready))
            inflow = served

    def act(self, actions: Sequence[Action]) -> None:
        """Does what was decided, as far as this world knows it."""
        for action in actions:
            if isinstance(action, SetReplicas | LiftOverride):
                stage = self.stages[int(action.function.rsplit("-", 1)[1])]
                if isinstance(action, SetReplicas):
                    self._set(stage, action.replicas)
                else:
                    stage.override = None

    def run(self, rate_rps: float, seconds: float) -> Decision:
        """Runs a while at one rate; returns the last decision."""
        for _ in range(max(1, round(seconds / self.tick_s))):
            decision = self.step(rate_rps)
        return decision

    def _set(self, stage: FluidStage, replicas: int) -> None:
        stage.desired = replicas
        while stage.ready + len(stage.starting) < replicas:
            stage.starting.append(self.now + self.start_s)
        while stage.ready + len(stage.starting) > replicas:
            if stage.starting:
                stage.starting.pop()
            else:
                stage.ready -= 1
