"""Bounds and intents: labels, machine, people, budget.

Before it: wanted numbers. After it: damping and diff. A person's override wins over the policy until
it expires; bounds win over both, but an override of zero is kept: it is how people stop a function.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from msgspec.structs import replace

from keystage.controller.domain.snapshot import Snapshot, StageView
from keystage.controller.policy.plan import Plan


def clamp(plan: Plan, at_s: float) -> Plan:
    """Applies override, wake, labels and the machine's cap to one function."""
    scale, wanted, reason = plan.scale, plan.wanted, plan.reason
    override = scale.override
    is_waking = scale.wake or plan.is_waking
    is_asked = override is not None and at_s < override.expires_at_s
    if override is not None and is_asked and override.replicas <= 0:
        if not is_waking:
            return replace(plan, wanted=0, is_override=True, reason="override: 0")
        is_asked = False
    if override is not None and is_asked:
        wanted, reason = override.replicas, f"override: {override.replicas}"
    if is_waking and wanted < 1:
        wanted, reason = 1, "a request waits"
    highest = plan.highest
    if wanted > highest:
        by_cap = scale.cap is not None and highest < scale.max_replicas
        reason += f"; at most {highest}: {scale.cap_reason}" if by_cap else f"; at most {highest} by label"
    elif wanted < plan.lowest:
        reason += f"; at least {plan.lowest}"
    wanted = max(plan.lowest, min(highest, wanted))
    if wanted == plan.wanted and is_asked == plan.is_override and reason is plan.reason:
        return plan
    return replace(plan, wanted=wanted, is_override=is_asked, reason=reason)


def deal(plans: Sequence[Plan], snapshot: Snapshot) -> list[Plan]:
    """Deals what there is to the stages, when they want more: R_total, and the GPUs of the cluster.

    Minimums first (kept even if they alone exceed it: they are somebody's promise), then what people asked
    for. The rest goes one replica at a time to the stage that has the smallest part of what it wants, the
    more critical one in the key-stage list first: a chain is as quick as the stage that is shortest of
    its need, so all on the first of the list would starve the others.
    Stages keep what they have and still want; only if that is too much, or
    leaves somebody's request short, is dealt anew from the minimums.
    """
    if snapshot.budget_replicas is None and has_room(snapshot, [p.wanted for p in plans]):
        return list(plans)
    weights, room = _bound(plans, snapshot)
    if sum(w * p.wanted for w, p in zip(weights, plans, strict=True)) <= room * (1 + 1e-9):
        return list(plans)
    least = [min(p.wanted, max(1, p.lowest)) for p in plans]
    kept = [max(low, min(p.wanted, p.scale.current)) for low, p in zip(least, plans, strict=True)]
    given = _filled(plans, weights, kept, room)
    if given is None or any(p.is_override and n < p.wanted for p, n in zip(plans, given, strict=True)):
        given = _filled(plans, weights, least, room) or least
    return [
        replace(p, wanted=n, is_cut=True, reason=f"{p.reason}; {n} of {p.wanted} by budget {room:g}")
        if n < p.wanted and weight
        else p
        for p, n, weight in zip(plans, given, weights, strict=True)
    ]


def has_room(snapshot: Snapshot, numbers: Sequence[int], more: int = 0) -> bool:
    """Whether so many replicas of each stage fit even if each takes whole GPUs, and `more` GPUs beside them.

    It is a quick look: False says that it has to be counted exactly.

    Args:
        snapshot: nodes and stages.
        numbers: replicas of the stages, in the snapshot's order; what follows is not read.
        more: GPUs that must be left.
    """
    stages = (stage for view in snapshot.pipelines for stage in view.stages)
    asked = sum([s.gpus * n for s, n in zip(stages, numbers, strict=False) if s.gpus > 0])
    return asked + more <= sum([len(node.gpus) for node in snapshot.nodes])


def gpu_weight(stage: StageView, size_bytes: int) -> float:
    """GPUs a replica takes out of those of `size_bytes`; whole ones where nobody tells its memory."""
    part = min(1.0, stage.gpu_bytes / size_bytes) if stage.gpu_bytes > 0 else 1.0
    return max(0, stage.gpus) * part


def gpu_room(snapshot: Snapshot) -> tuple[int, int]:
    """Memory of the cluster's smallest GPU, at least 1 byte, and how many GPUs there are."""
    sizes = [node.gpus[0].total_bytes for node in snapshot.nodes if node.gpus]
    return max(1, min(sizes, default=1)), sum(len(node.gpus) for node in snapshot.nodes)


def _bound(plans: Sequence[Plan], snapshot: Snapshot) -> tuple[list[float], float]:
    """What a replica of each plan takes, and how much there is in all: replicas, else GPUs."""
    if snapshot.budget_replicas is not None:
        return [1.0 if p.is_stage else 0.0 for p in plans], float(snapshot.budget_replicas)
    size, count = gpu_room(snapshot)
    if not count:
        return [0.0] * len(plans), math.inf
    weights = [0.0] * len(plans)
    stages = (stage for view in snapshot.pipelines for stage in view.stages)
    for i, stage in enumerate(stages):  # stages come first among the plans, in the snapshot's order
        weights[i] = gpu_weight(stage, size)
    return weights, float(count)


def _filled(
    plans: Sequence[Plan], weights: Sequence[float], start: Sequence[int], room: float
) -> list[int] | None:
    """Deals from a start until nothing fits; None where the start itself does not."""
    given = list(start)
    left = room - sum(w * n for w, n in zip(weights, given, strict=True))
    if left < -1e-9 * room:
        return None
    heap = [
        (not p.is_override, given[i] / p.wanted, p.rank, -p.score, i)
        for i, p in enumerate(plans)
        if weights[i] and given[i] < p.wanted
    ]
    heapq.heapify(heap)
    while heap:
        who, _, rank, score, i = heapq.heappop(heap)
        if weights[i] > left * (1 + 1e-9):
            continue
        given[i] += 1
        left -= weights[i]
        if given[i] < plans[i].wanted:
            heapq.heappush(heap, (who, given[i] / plans[i].wanted, rank, score, i))
    return given
