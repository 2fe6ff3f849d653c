"""CPU cores of stages on a cluster: what each has, and may have where its replicas are. Pure.

Before it: pods, rooms and fits of CPU profiles. After it: `StageView.cpu`. A replica may have more cores only
on the node where it runs, and all replicas of a stage have the same; so the fullest of its nodes bounds it. A
stage whose last resize turned out to be infeasible has no more than it has: then the policy takes a replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from keystage.controller.domain.snapshot import CpuView
from keystage.controller.platforms.local_cpu import Cores
from keystage.kubernetes.room import Room


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    """Where a stage's replicas are, and what a core more of one costs its node.

    Attributes:
        on: replicas by node.
        request: cores that the node promises for each one that a replica is given: less where its request is.
        is_capped: a resize turned out to be infeasible lately.
    """

    on: Mapping[str, int]
    request: float = 1.0
    is_capped: bool = False


def cluster_cpu_views(
    rooms: Mapping[str, Room], stages: Mapping[str, Cores], spots: Mapping[str, Spot]
) -> dict[str, CpuView]:
    """What each stage's replicas have, and may have.

    Free cores of nodes go round one by one, the stage with most waiting first, to stages that are known to
    gain by them, as on one machine (`local_cpu.cpu_views`).

    Args:
        rooms: the nodes.
        stages: cores by function.
        spots: where its replicas are, by function.
    """
    free = {name: room.free("cpu") for name, room in rooms.items()}
    given = dict.fromkeys(stages, 0)
    order = sorted(
        (
            name
            for name, stage in stages.items()
            if stage.work is not None and stage.work[1] > 0 and spots[name].on and not spots[name].is_capped
        ),
        key=lambda name: (-stages[name].queue, name),
    )
    while order:
        able = []
        for name in order:
            spot = spots[name]
            need = {node: count * spot.request for node, count in spot.on.items()}
            cores = stages[name].now + given[name] + 1
            if all(
                node in rooms and cores <= rooms[node].total.get("cpu", 0.0) and free[node] >= amount - 1e-9
                for node, amount in need.items()
            ):
                for node, amount in need.items():
                    free[node] -= amount
                given[name] += 1
                able.append(name)
        order = able
    views = {}
    for name, stage in stages.items():
        per_core_s, low_s, high_s = stage.work or (None, None, None)
        views[name] = CpuView(stage.now, stage.now + given[name], per_core_s, low_s, high_s, stage.base)
    return views
