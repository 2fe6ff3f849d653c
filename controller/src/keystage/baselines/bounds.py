"""From wanted numbers to actions: labels, cluster size and people's requests, the same for every rival.

Before it: a rival's own numbers. After it: the world. The papers scale in clouds that always have one
more machine; a cluster of fixed size needs a rule for wishes that do not fit together. Ours is neutral:
every function keeps its minimum, and what is left is shared in proportion to the wishes beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from keystage.baselines.seen import Seen
from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.snapshot import FunctionView, Snapshot

MOST_REPLICAS = 1000
"""No function gets more, as with Keystage's policy."""


def bounded(scale: FunctionView, wanted: float) -> int:
    """A whole number of replicas within the function's bounds, at least 1.

    Rounds up, forgiving rounding errors.
    """
    lowest = min(MOST_REPLICAS, max(1, scale.min_replicas))
    highest = min(MOST_REPLICAS, scale.max_replicas)
    if scale.cap is not None:
        highest = min(highest, scale.cap)
    if not wanted < MOST_REPLICAS:
        wanted = MOST_REPLICAS
    return max(lowest, min(highest, math.ceil(wanted * (1 - 1e-9))))


def fit(wants: Sequence[int], least: Sequence[int], sizes: Sequence[float], room: float) -> list[int]:
    """Cuts wishes down to what there is room for.

    Args:
        wants: replicas wanted by function.
        least: replicas every function keeps.
        sizes: GPUs of one replica of each; those that need none are not cut.
        room: GPUs there are.

    Returns:
        Replicas by function: the wishes if they fit; otherwise the minimum of each plus a share of the
        rest in proportion to the GPUs wanted beyond it, rounded down, leftovers to the largest remainders.
    """
    if math.fsum(w * s for w, s in zip(wants, sizes, strict=True)) <= room:
        return list(wants)
    floors = [min(w, low) for w, low in zip(wants, least, strict=True)]
    left = max(0.0, room - math.fsum(f * s for f, s in zip(floors, sizes, strict=True)))
    beyond = [(w - f) * s for w, f, s in zip(wants, floors, sizes, strict=True)]
    total = sum(beyond)
    if total == 0:
        return floors
    exact = [
        left * b / total / s if s else w - f for b, s, w, f in zip(beyond, sizes, wants, floors, strict=True)
    ]
    given = [f + int(e) for f, e in zip(floors, exact, strict=True)]
    left -= math.fsum(int(e) * s for e, s in zip(exact, sizes, strict=True))
    for i in sorted(range(len(wants)), key=lambda i: (int(exact[i]) - exact[i], i)):
        if sizes[i] <= left and given[i] < wants[i]:
            given[i] += 1
            left -= sizes[i]
    return given


def actions(snapshot: Snapshot, wishes: Sequence[tuple[Seen, int]]) -> list[SetReplicas]:
    """The actions that bring every function to its wish, as far as the cluster and R_total allow.

    A person's unexpired request goes before a wish.
    """
    wants = [_ruled(seen.scale, wanted, snapshot.at_s) for seen, wanted in wishes]
    least = [min(w, max(1, seen.scale.min_replicas)) for w, (seen, _) in zip(wants, wishes, strict=True)]
    if snapshot.nodes:
        wants = [min(w, _places(snapshot, seen)) for w, (seen, _) in zip(wants, wishes, strict=True)]
        gpus = sum(len(node.gpus) for node in snapshot.nodes)
        if gpus:
            wants = fit(wants, least, [_gpus(snapshot, seen) for seen, _ in wishes], gpus)
    if snapshot.budget_replicas is not None:
        wants = fit(wants, least, [1] * len(wants), snapshot.budget_replicas)
    return [
        SetReplicas(function=seen.function, replicas=wanted)
        for wanted, (seen, _) in zip(wants, wishes, strict=True)
        if wanted != seen.scale.desired
    ]


def _ruled(scale: FunctionView, wanted: int, at_s: float) -> int:
    override = scale.override
    if override is not None and at_s < override.expires_at_s:
        return min(MOST_REPLICAS, max(0, override.replicas))
    return bounded(scale, wanted)


def _gpus(snapshot: Snapshot, seen: Seen) -> float:
    """GPUs a replica takes up; less than whole ones where replicas may share a GPU."""
    smallest = min((gpu.total_bytes for node in snapshot.nodes for gpu in node.gpus), default=0)
    if not seen.gpu_bytes or not smallest:
        return seen.gpus
    return seen.gpus * min(1.0, seen.gpu_bytes / smallest)


def _places(snapshot: Snapshot, seen: Seen) -> int:
    """Replicas of one function that an empty cluster holds, each within one node; without GPUs, no bound."""
    share = _gpus(snapshot, seen)
    if not share or not any(node.gpus for node in snapshot.nodes):
        return MOST_REPLICAS
    return max(1, sum(int(len(node.gpus) / share + 1e-9) for node in snapshot.nodes))
