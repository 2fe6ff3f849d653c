"""The CPU compensator: cores before a replica, where that is known to help (QUART section 5.3).

Before it: smoothed plans, within their bounds. After it: the budget; `SetCpu` goes out where `Plan.cores` is
set. A stage whose label or machine allows fewer replicas than the corrector wanted, or whose modelled sojourn
does not fit its share, gets the fewest cores that make up for it; they are given back when they are needed no
more, with a margin against swinging. Where even cpu_max does not do, and a replica more would help, one that
the smoother took in this tick is handed back. It never takes a replica, and never exceeds a bound.

    s(c) = s - w (1/c0 - 1/c)     seconds of an item at c cores a replica, now c0; w core-seconds (CpuView)
    T(c) = W_{G/G/n}(lambda, s(c)) + service(c)

It acts only where the 95 % interval of w excludes 0 and says so where it does not: the paper's gain came
largely from HTTP serialisation, which a stage may not have. It sets no replica number but that one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import msgspec

from keystage.controller.domain.snapshot import CpuView, PipelineView
from keystage.controller.domain.state import StageState
from keystage.controller.maths import erlang
from keystage.controller.maths.estimator import MOST_S, is_number
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings

MARGIN_RATIO = 0.8
"""Cores are given back when fewer would keep the sojourn within this part of the goal."""

LEAST_GAIN_RATIO = 0.02
"""More cores, or the replica handed back, must shorten the sojourn by this part: the last of eight cores
rarely does."""

LEAST_CORES, MOST_CORES = 1e-3, 1e6
"""Cores of a replica believed."""


def compensate(settings: PolicySettings, view: PipelineView, plans: Sequence[Plan]) -> list[Plan]:
    """Sets cores of the stages of one pipeline that can use them."""
    if not settings.compensation or view.execution == "looping":
        return list(plans)
    return [
        plan if stage.cpu is None else _compensated(settings, stage.cpu, plan)
        for stage, plan in zip(view.stages, plans, strict=True)
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """Sojourn of a stage by cores and replicas.

    Attributes:
        rate_rps: arrivals a second.
        item_s: seconds one item takes of a replica now.
        service_s: seconds an item is in service now.
        arrival_scv: squared CV of arrivals.
        service_scv: squared CV of services.
        per_core: 1 / cores at which these were measured.
        work_s: core-seconds of an item that shrink as 1/cores.
    """

    rate_rps: float
    item_s: float
    service_s: float
    arrival_scv: float
    service_scv: float
    per_core: float
    work_s: float

    def sojourn_s(self, cores: float, replicas: int) -> float:
        """Modelled wait + service, infinite where the replicas cannot keep up."""
        saved_s = self.work_s * (self.per_core - 1 / cores)
        item_s = max(self.item_s - saved_s, 1e-3 * self.item_s)
        service_s = max(self.service_s - saved_s, 1e-3 * self.service_s)
        wait_s = erlang.ggc_wait_s(
            self.rate_rps, item_s, max(1, replicas), self.arrival_scv, self.service_scv
        )
        return wait_s + service_s


def _compensated(settings: PolicySettings, cpu: CpuView, plan: Plan) -> Plan:
    if plan.is_held or plan.share_s is None or plan.wanted < 1:
        return plan
    if not (is_number(cpu.cores) and LEAST_CORES <= cpu.cores <= MOST_CORES and is_number(cpu.most)):
        return plan
    allowed_s = plan.share_s
    base = _base(cpu, plan.memory)
    per_core = _averaged(settings, cpu, plan.memory)
    memory = msgspec.structs.replace(
        plan.memory, cores=base, per_core=per_core, cores_at_s=plan.memory.estimator.at_s
    )
    plan = msgspec.structs.replace(plan, memory=memory)
    model = _model(cpu, plan, per_core)
    if model is None:
        return plan
    replicas = max(1, min(plan.wanted, plan.corrected))  # what is held beyond the need is on its way out
    share_s = allowed_s * math.exp(-plan.trim)
    goal_s = share_s
    if replicas < plan.corrected:  # what was taken away shall not be felt
        goal_s = min(goal_s, model.sojourn_s(base, plan.corrected))
    now_s = model.sojourn_s(cpu.cores, replicas)
    steps = _steps(base, cpu.most)
    if now_s > goal_s:
        if not _helps(cpu):
            return msgspec.structs.replace(
                plan, reason=f"{plan.reason}; more cores are not known to help{_interval(cpu)}"
            )
        return _raised(model, cpu, plan, replicas, goal_s, share_s, now_s, steps)
    if cpu.cores > base and _helps(cpu):
        fewer = [c for c in steps if c < cpu.cores]
        enough = next((c for c in fewer if model.sojourn_s(c, replicas) <= MARGIN_RATIO * goal_s), None)
        if enough is not None:
            return msgspec.structs.replace(
                plan, cores=enough, reason=f"{plan.reason}; {enough:g} cores will do"
            )
    return plan


def _raised(
    model: _Model,
    cpu: CpuView,
    plan: Plan,
    replicas: int,
    goal_s: float,
    share_s: float,
    now_s: float,
    steps: Sequence[float],
) -> Plan:
    """The fewest cores that reach the goal, else all there may be; else a replica is handed back."""
    more = [c for c in steps if c > cpu.cores]
    cores = next((c for c in more if model.sojourn_s(c, replicas) <= goal_s), max(more, default=cpu.cores))
    then_s = model.sojourn_s(cores, replicas)
    if cores > cpu.cores and (math.isinf(now_s) or then_s <= (1 - LEAST_GAIN_RATIO) * now_s):
        plan = msgspec.structs.replace(plan, cores=cores, reason=f"{plan.reason}; {cores:g} cores")
    is_taken = plan.reclaimed > 0 and plan.wanted < plan.highest and not plan.is_override
    if is_taken and (kept_s := model.sojourn_s(cores, plan.wanted)) > share_s:
        more_s = model.sojourn_s(cores, plan.wanted + 1)
        if not (math.isinf(kept_s) or more_s <= (1 - LEAST_GAIN_RATIO) * kept_s):
            return plan
        reason = f"{plan.reason}; one handed back: {cpu.most:g} cores would not do"
        left = plan.reclaimed - 1
        plan = msgspec.structs.replace(plan, wanted=plan.wanted + 1, reclaimed=left, reason=reason)
    return plan


def _base(cpu: CpuView, memory: StageState) -> float:
    """Cores as deployed: as told, else as first seen (by then they may have been raised)."""
    if is_number(cpu.base) and LEAST_CORES <= cpu.base <= MOST_CORES:
        return cpu.base
    return memory.cores if memory.cores is not None else cpu.cores


def _averaged(settings: PolicySettings, cpu: CpuView, memory: StageState) -> float:
    """1 / cores behind the measured service times, which lag a change of cores by their window."""
    at_s, last_s = memory.estimator.at_s, memory.cores_at_s
    if memory.per_core is None or at_s is None or last_s is None:
        return 1 / cpu.cores
    fade = math.exp(-max(0.0, at_s - last_s) / settings.estimator.slow_s)
    return memory.per_core * fade + (1 - fade) / cpu.cores


def _model(cpu: CpuView, plan: Plan, per_core: float) -> _Model | None:
    """What the sojourn depends on, None where it is not known."""
    known = plan.known
    rate_rps = known.arrival_slow_rps or known.arrival_rps
    if rate_rps is None or not known.capacity_rps or known.service_s is None:
        return None
    work_s = cpu.per_core_s if is_number(cpu.per_core_s) and abs(cpu.per_core_s) <= MOST_S else 0.0
    return _Model(
        rate_rps=rate_rps,
        item_s=1 / known.capacity_rps,
        service_s=known.service_s,
        arrival_scv=known.arrival_scv,  # its own: where the smoother predicts, this is measured too
        service_scv=known.service_scv,
        per_core=per_core,
        work_s=work_s,
    )


def _steps(base: float, most: float) -> list[float]:
    """Cores a replica may be given: from what it had at first, one by one, to the most."""
    count = max(0, min(1024, math.ceil(most - base)))
    return [base, *(min(most, base + i) for i in range(1, count + 1))]


def _helps(cpu: CpuView) -> bool:
    """Whether the 95 % interval of the slope lies above 0."""
    return (
        is_number(cpu.per_core_s)
        and 0 < cpu.per_core_s <= MOST_S
        and is_number(cpu.low_s)
        and cpu.low_s > 0
        and is_number(cpu.high_s)
    )


def _interval(cpu: CpuView) -> str:
    if not (is_number(cpu.low_s) and is_number(cpu.high_s)):
        return ": no profile"
    return f": {cpu.low_s:.2g} to {cpu.high_s:.2g} s x cores"
