"""Autoscaling advice in the corrector: raised by a bad rate, lowered down to the model, silent elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from support.placement_world import node, snapshot, stage

from keystage.controller.decisions import Record
from keystage.controller.domain.decision import Decision, SetReplicas
from keystage.controller.domain.snapshot import (
    BatchProfile,
    Counters,
    FunctionView,
    PipelineView,
    Placed,
    RouterSample,
    Slo,
    Snapshot,
    StageView,
    WorkerSample,
)
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy.decide import decide
from keystage.controller.policy.placement import place
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings

TICK_S = 0.25


@dataclasses.dataclass
class OneStage:
    """A single-pass stage in fluid time: `rate` comes, `bad` of it is late, workers idle by `idle`.

    Replicas follow the decisions at once; worker k of n is idle in the order of its number, as smallest-first
    dispatch makes it.
    """

    rate: float = 400.0
    bad: float = 0.0
    idle: float = 0.3
    replicas: int = 4
    batching: str = "deferred"
    tells: bool = True
    at_s: float = 1000.0
    sojourn_s: float = 0.02

    def __post_init__(self) -> None:
        self.state = PolicyState()
        self.settings = PolicySettings()
        self.totals = dict.fromkeys(
            ("arrivals", "gap", "gap2", "services", "s", "s2", "t", "due", "late"), 0.0
        )
        self.works: dict[int, list[float]] = {}
        self.last: Decision | None = None

    def step(self) -> Decision:
        """One tick."""
        self.at_s += TICK_S
        count = self.rate * TICK_S
        gap, service_s = 1 / self.rate, 0.0125
        grown = (count, count * gap, 2 * count * gap**2, count, count * service_s, count * service_s**2)
        for name, by in zip(("arrivals", "gap", "gap2", "services", "s", "s2"), grown, strict=True):
            self.totals[name] += by
        self.totals["t"] += count * self.sojourn_s
        self.totals["due"] += count
        self.totals["late"] += count * self.bad
        busy = (1 - self.idle) * self.replicas
        for k in range(self.replicas):
            served, idle, used = self.works.setdefault(k, [0.0, 0.0, 0.0])
            part = min(1.0, max(0.0, busy - k))
            self.works[k] = [served + TICK_S, idle + TICK_S * (1 - part), used + TICK_S * part]
        decision = decide(self.settings, self.snapshot(), self.state)
        self.state, self.last = decision.state, decision
        for action in decision.actions:
            if isinstance(action, SetReplicas):
                self.replicas = action.replicas
                self.works = {k: v for k, v in self.works.items() if k < self.replicas}
        return decision

    def snapshot(self) -> Snapshot:
        """The world as it is."""
        t = self.totals
        told: dict[str, Any] = {"due": t["due"], "late": t["late"], "dropped": 0} if self.tells else {}
        counters = Counters(
            arrivals=t["arrivals"],
            gap_sum_s=t["gap"],
            gap_sq_sum_s2=t["gap2"],
            services=t["services"],
            service_sum_s=t["s"],
            service_sq_sum_s2=t["s2"],
            sojourn_sum_s=t["t"],
            queue=0,
            in_flight=2,
            **told,
        )
        workers = tuple(
            WorkerSample(
                replica=f"w{k}",
                slots=8,
                held_slots=1,
                busy_s=used,
                rows=used * 160,
                **({"served_s": served, "idle_s": idle} if self.tells else {}),
            )
            for k, (served, idle, used) in self.works.items()
        )
        stage = StageView(
            stage=0,
            scale=FunctionView(function="p-stage-0", desired=self.replicas, ready=self.replicas),
            start_s=0.5,
            routers=(RouterSample(incarnation="r", at_s=self.at_s, counters=counters),),
            workers=workers,
            batch=BatchProfile(alpha_s=0.005, beta_s=0.0075, most=32),
        )
        view = PipelineView(
            pipeline="p", execution="single-pass", slo=Slo(deadline_s=0.1), stages=(stage,),
            batching=self.batching,
        )  # fmt: skip
        return Snapshot(at_s=self.at_s, pipelines=(view,))

    def run(self, seconds: float) -> Decision:
        """Ticks for so long."""
        for _ in range(round(seconds / TICK_S)):
            self.step()
        assert self.last is not None
        return self.last


def test_a_bad_rate_raises_the_demand_and_the_reason_says_so() -> None:
    world = OneStage(idle=0.0)
    before = world.run(20).reports[0]
    world.bad = 0.2
    after = world.run(6).reports[0]
    assert before.replicas < after.replicas
    assert after.replicas >= before.replicas + before.replicas // 4  # N r / (1 - r)
    assert after.reason.startswith("advice: 20.0% of")


def test_what_was_raised_stays_until_replicas_are_idle() -> None:
    world = OneStage(idle=0.0)
    world.run(20)
    world.bad = 0.2
    world.run(6)
    world.bad = 0.0
    high = world.run(10).reports[0].replicas
    held = world.run(60).reports[0]
    assert held.replicas == high
    world.idle = 0.5
    low = world.run(120).reports[0]
    assert low.replicas < high


def test_the_advice_lowers_only_down_to_the_model() -> None:
    """Four fifths are idle, says the world; the model, by rates, still asks for its number."""
    world = OneStage(idle=0.8, replicas=12)
    lowest = world.run(240).reports[0]
    plain = OneStage(idle=0.8, replicas=12, tells=False, batching="eager")
    plain.settings = PolicySettings(feedback=False)
    assert lowest.replicas == plain.run(240).reports[0].replicas


def test_a_wait_that_is_intended_trims_nothing() -> None:
    """Sojourns near the deadline: the trim of an eager pipeline takes them for a lack of replicas."""
    eager = OneStage(batching="eager", sojourn_s=0.09).run(60).reports[0]
    deferred = OneStage(sojourn_s=0.09).run(60).reports[0]
    assert eager.trim > 0.5
    assert deferred.trim == 0


@pytest.mark.parametrize("batching", ["eager", "timeout:5", ""])
def test_other_policies_get_no_advice(batching: str) -> None:
    world = OneStage(batching=batching, bad=0.5)
    told = world.run(30).reports[0]
    assert "advice" not in told.reason
    assert world.state.stages["p-stage-0"].advice is None


def test_counters_that_are_missing_hold() -> None:
    silent = OneStage(tells=False)
    eager = OneStage(tells=False, batching="eager")
    eager.settings = PolicySettings(feedback=False)
    assert silent.run(40).reports[0].replicas == eager.run(40).reports[0].replicas


@pytest.mark.parametrize("garbled", [float("nan"), float("inf"), -5.0])
def test_garbled_counters_hold(garbled: float) -> None:
    world = OneStage(idle=0.0)
    world.run(20)
    now = world.replicas
    world.totals["late"] = garbled
    for _ in range(40):
        world.step()
        world.totals["late"] = garbled
    assert world.replicas == now


def test_a_level_fades_where_nobody_tells_of_idle_replicas() -> None:
    world = OneStage(idle=0.0, bad=0.3)
    world.run(30)
    memory = world.state.stages["p-stage-0"].advice
    assert memory is not None
    assert memory.level is not None
    world.bad = 0.0
    world.works = {k: [0.0, 0.0, 0.0] for k in world.works}
    for _ in range(200):
        world.step()
        world.works = {k: [0.0, 0.0, used] for k, (_, _, used) in world.works.items()}
    memory = world.state.stages["p-stage-0"].advice
    assert memory is not None
    assert memory.level is None


def test_the_idlest_replicas_go_first() -> None:
    """The highest numbers: batches go to the smallest that is free."""
    world = OneStage(idle=0.7, replicas=9)
    for _ in range(round(200 / TICK_S)):
        before = world.replicas
        decision = world.step()
        gone = [a for a in decision.actions if isinstance(a, SetReplicas) and a.replicas < before]
        if gone:
            count = before - gone[0].replicas
            assert set(gone[0].victims[:count]) == {f"w{k}" for k in range(before - count, before)}
            return
    raise AssertionError("nothing was given back")


def test_memory_and_settings_survive_the_log() -> None:
    world = OneStage(bad=0.1)
    world.run(10)
    seen = world.snapshot()
    decision = decide(world.settings, seen, world.state)
    record = Record(settings=world.settings, before=world.state, snapshot=seen, decision=decision)
    again = msgspec.json.decode(msgspec.json.encode(record), type=Record)
    assert again == record


def test_on_nodes_the_idlest_of_equals_goes() -> None:
    """Three replicas on one node: placement does not care which, so the idle one goes, else the youngest."""
    placed = tuple(Placed(name, "n0", (gpu,)) for gpu, name in enumerate(("a", "b", "c")))
    view = stage(0, placed)
    seen = snapshot([node("n0", gpus=(1, 1, 1, 0))], [view])

    def gone(idlest: tuple[str, ...]) -> tuple[str, ...]:
        plan = Plan(view.scale, 2, "", is_stage=True, pipeline="p", corrected=2, victims=idlest)
        return place(PolicySettings(), seen, [plan], PolicyState(), {"p": (0,)})[0][0].victims

    assert gone(()) == ("c",)
    assert gone(("b", "c", "a")) == ("b",)
