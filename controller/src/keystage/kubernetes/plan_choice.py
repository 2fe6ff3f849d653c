"""How many pods of a stage stay, which go, and how many are missing. Pure.

Before it: `plan` has sorted out pods that are ended, lost or leaving. After it: it gives the missing ones
places. A new template replaces pods one beyond the wanted number at a time: an old pod serves until a new
one is ready in its place, so the last that serves never goes for one that does not yet. It must not know
nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keystage.kubernetes.scene import Function, Pod

SURGE = 1
"""Pods beyond the wanted number while a new template replaces an old one."""
STUCK_S = 10.0
"""A new pod without any place for so long may have that of an old one, where several serve."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What shall be of a stage's pods.

    Attributes:
        going: those that go, first to last, each with the reason.
        missing: how many are to be made.
    """

    going: tuple[tuple[Pod, str], ...]
    missing: int


def choose(function: Function, live: Sequence[Pod], at_s: float) -> Choice:
    """Compares what there is with what there shall be.

    Args:
        function: a stage.
        live: its pods that serve or are on their way to it.
        at_s: Unix seconds.
    """
    wanted = function.desired
    new = [pod for pod in live if pod.template == function.template]
    old = [pod for pod in live if pod.template != function.template]
    going = [(pod, f"{wanted} replicas are wanted") for pod in first_to_go(function, new, len(new) - wanted)]
    new = _without(new, going)
    ready = sum(pod.state == "ready" for pod in new)
    waiting = [pod for pod in new if pod.state != "ready"]

    going += [(pod, "it is of an earlier template") for pod in old if pod.state != "ready"]
    serving = [pod for pod in old if pod.state == "ready"]
    spare = max(0, wanted - ready)
    if _is_stuck(waiting, at_s) and ready + len(serving) > 1 and len(serving) >= spare:
        spare -= 1
    replaced = first_to_go(function, serving, len(serving) - spare)
    going += [(pod, "it is of an earlier template") for pod in replaced]
    kept = len(serving) - len(replaced)

    room = wanted - ready
    if kept:
        room = min(room, wanted + SURGE - ready - kept)
    trimmed = first_to_go(function, waiting, len(waiting) - max(0, room))
    going += [(pod, f"{wanted} replicas are wanted") for pod in trimmed]
    return Choice(tuple(going), max(0, room - len(waiting)))


def first_to_go(function: Function, pods: Sequence[Pod], count: int) -> list[Pod]:
    """Picks who goes: those without a node, then starting ones, then those named, then the youngest."""
    named = {name: place for place, name in enumerate(function.victims)}

    def rank(pod: Pod) -> tuple[int, int, float, str]:
        place = named.get(pod.name, len(named))
        if pod.state != "ready":
            return (0 if not pod.node else 1), place, -pod.created_s, pod.name
        return 2, place, -max(pod.created_s, pod.activated_s), pod.name

    return sorted(pods, key=rank)[: max(0, count)]


def _is_stuck(waiting: Sequence[Pod], at_s: float) -> bool:
    return bool(waiting) and all(
        pod.unschedulable_s > 0 and at_s - pod.unschedulable_s >= STUCK_S for pod in waiting
    )


def _without(pods: Sequence[Pod], going: Sequence[tuple[Pod, str]]) -> list[Pod]:
    gone = {pod.name for pod, _ in going}
    return [pod for pod in pods if pod.name not in gone]
