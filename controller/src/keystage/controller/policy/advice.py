"""Symphony's autoscaling advice as an input of the corrector: single-pass stages under deferred batching.

Before it: the corrector's plan. After it: clamps and damping. Only deferred batching leaves replicas idle in
proportion to the load, so only there an idle fraction tells of replicas that are not needed, and a bad rate
of replicas that are missing (`keystage.batching.advice`). The advice raises the demand at once and holds it
there until replicas are idle; it lowers it to what the queueing model asks for and never further: the model
is fed by rates, which change before anything is late. Under deferral a wait is intended, up to the deadline,
so the trim, which takes a wait above the model's for a lack of replicas, rests (`without_trim`).

Counters that are missing or not numbers hold the demand as it is. Each use stands in the plan's reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from keystage.batching.advice import Advice, Growth, advise
from keystage.controller.domain.snapshot import PipelineView, RouterSample, StageView, WorkerSample
from keystage.controller.domain.state import AdviceMemory
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import MOST_REPLICAS, PolicySettings

DEFERRED = "deferred"


def is_deferred(view: PipelineView) -> bool:
    """Whether the pipeline's batches are deferred."""
    return view.batching == DEFERRED and view.execution == "single-pass"


def without_trim(settings: PolicySettings) -> PolicySettings:
    """The settings without feedback on waits."""
    return replace(settings, feedback=False) if settings.feedback else settings


def advised(settings: PolicySettings, stage: StageView, plan: Plan, at_s: float) -> Plan:
    """The plan with the advice of this tick; `plan.modelled` is what the queueing model asks for."""
    if plan.is_held:
        return plan
    memory = plan.memory.advice or AdviceMemory()
    totals, works = _totals(stage.routers), _works(stage.workers)
    if totals is None:
        return plan
    advice, windows = Advice(), memory.windows
    growth = _growth(memory, at_s, totals, works)
    if growth is not None:
        advice, windows = advise(settings.advice, windows, stage.scale.ready, growth)
    memory = _remembered(settings, memory, advice, stage.scale.ready, growth, at_s)
    idle = _idle(settings, memory, works)
    memory = replace(memory, at_s=at_s, totals=totals, works=works, windows=windows, idle=idle)
    plan = replace(plan, memory=replace(plan.memory, advice=memory), victims=_victims(stage, memory))
    if memory.level is not None and memory.level > plan.wanted:
        wanted = min(MOST_REPLICAS, memory.level)
        return replace(plan, wanted=wanted, corrected=wanted, reason=f"advice: {memory.reason}")
    if memory.ceiling is not None and memory.ceiling < plan.wanted and plan.modelled < plan.wanted:
        wanted = max(memory.ceiling, plan.modelled)
        bound = "; the model asks for no fewer" if plan.modelled > memory.ceiling else ""
        return replace(plan, wanted=wanted, corrected=wanted, reason=f"advice: {memory.reason}{bound}")
    return plan


def _remembered(
    settings: PolicySettings,
    memory: AdviceMemory,
    advice: Advice,
    ready: int,
    growth: Growth | None,
    at_s: float,
) -> AdviceMemory:
    """The number that holds from now on: raised until an idle fraction lowers it, lowered until N changes."""
    if advice.change > 0:
        level = max(memory.level or 0, ready + advice.change)
        return replace(memory, level=level, level_at_s=at_s, ceiling=None, reason=advice.reason)
    if advice.change < 0:
        return replace(memory, level=None, ceiling=ready + advice.change, reason=advice.reason)
    if memory.ceiling is not None and memory.windows.replicas != ready:
        memory = replace(memory, ceiling=None)
    is_told = growth is None or growth.served_s > 0
    if memory.level is not None and not is_told and at_s - memory.level_at_s >= settings.advice.release_s:
        memory = replace(memory, level=None)  # nobody tells of idle replicas: it would hold for ever
    return memory


def _totals(routers: Sequence[RouterSample]) -> dict[str, tuple[float, float]] | None:
    """(due, bad) by incarnation, None where they are not told."""
    totals: dict[str, tuple[float, float]] = {}
    for router in routers:
        counted = router.counters
        due, late, dropped = counted.due, counted.late, counted.dropped
        if due is None or late is None or dropped is None or not math.isfinite(due + late + dropped):
            return None
        totals[router.incarnation] = (due, late + dropped)
    return totals or None


def _works(workers: Sequence[WorkerSample]) -> dict[str, tuple[float, float]]:
    """(served_s, idle_s) by worker, of those that tell."""
    return {
        w.replica: (w.served_s, w.idle_s)
        for w in workers
        if w.served_s is not None and w.idle_s is not None and math.isfinite(w.served_s + w.idle_s)
    }


def _growth(
    memory: AdviceMemory,
    at_s: float,
    totals: dict[str, tuple[float, float]],
    works: dict[str, tuple[float, float]],
) -> Growth | None:
    """What was counted since the last look; None where there was none, or time stepped back."""
    if memory.at_s is None or not at_s >= memory.at_s:
        return None
    due = bad = served_s = idle_s = 0.0
    for source, (now, bad_now) in totals.items():
        before, bad_before = memory.totals.get(source, (now, bad_now))
        if now >= before and bad_now >= bad_before:
            due += now - before
            bad += min(now - before, bad_now - bad_before)
    for name, (served, idle) in works.items():
        served_before, idle_before = memory.works.get(name, (served, idle))
        if served > served_before:
            served_s += served - served_before
            idle_s += min(served - served_before, max(0.0, idle - idle_before))
    return Growth(at_s - memory.at_s, due, bad, served_s, idle_s)


def _idle(
    settings: PolicySettings, memory: AdviceMemory, works: dict[str, tuple[float, float]]
) -> dict[str, float]:
    """The lately idle part of each worker's time: decayed over the time idle fractions are judged over."""
    idle: dict[str, float] = {}
    for name, (served, idle_s) in works.items():
        served_before, idle_before = memory.works.get(name, (0.0, 0.0))
        dt_s, before = served - served_before, memory.idle.get(name, 0.0)
        if dt_s <= 0:
            idle[name] = before
            continue
        part = min(1.0, max(0.0, idle_s - idle_before) / dt_s)
        if name not in memory.idle:
            before = part
        fade = math.exp(-dt_s / settings.advice.release_s)
        idle[name] = before * fade + part * (1 - fade)
    return idle


def _victims(stage: StageView, memory: AdviceMemory) -> tuple[str, ...]:
    """Who goes first where the world has no say of its own: starting ones, then those idle the longest.

    Batches go to the smallest number that is free, so these are the highest numbers, whatever their age; of
    equals the last one told goes.
    """
    if len(memory.idle) < stage.scale.ready:
        return ()  # some do not tell: the world chooses
    starting = [one.replica for one in reversed(stage.scale.starting)]
    youngest = list(memory.idle)[::-1]
    return (*starting, *sorted(youngest, key=lambda name: -round(memory.idle[name], 2)))
