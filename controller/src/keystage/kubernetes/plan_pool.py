"""Keeps each pipeline's parked pods: so many, of the shapes its stages have, on nodes that take pods. Pure.

Before it: `plan` has given out those that become replicas. After it: operations. A parked pod makes room
for a replica that finds none, and the pool is not filled meanwhile. Stages of equal shape share; where the
shapes are more than the pods, those of key stages have theirs first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from keystage.kubernetes.operations import Delete, Operation, Park
from keystage.kubernetes.plan_places import Supply, is_open
from keystage.kubernetes.scene import Function, Pod, Scene

UNPLACED_S = 3.0
"""A parked pod without a place for so long goes; the pool is filled again later."""


def pool_operations(
    scene: Scene, taken: Collection[str], supply: Supply, names: Callable[[str], str]
) -> Iterator[Operation]:
    """What is to be done to parked pods.

    Args:
        scene: what there is.
        taken: names of pods that this plan activates or deletes.
        supply: GPU memory that is left.
        names: makes a new pod's name from a prefix.
    """
    wanted = _wanted(scene)
    unknown = {f.pipeline for f in scene.functions.values() if f.role == "stage" and not f.shape}
    without_room = [
        p for p in scene.pods.values() if not p.is_parked and p.name not in taken and _is_unplaced(p)
    ]
    crowded = len(without_room)
    kept: dict[tuple[str, str], list[Pod]] = {key: [] for key in wanted}
    for pod in sorted(
        scene.pods.values(), key=lambda p: (p.state != "ready", not p.node, p.created_s, p.name)
    ):
        if not pod.is_parked or pod.name in taken or pod.state == "draining":
            continue
        key = (pod.pipeline, pod.pool)
        if key not in wanted and pod.pipeline in unknown:
            continue
        why, is_failure = _why_not(scene, pod, key in wanted)
        if not why and len(kept[key]) >= len(wanted[key][1]):
            why = "the pool holds as many as it shall"
        if not why and crowded > 0 and pod.node:
            why = "a replica finds no room"
            crowded -= 1
        if not why:
            kept[key].append(pod)
        elif pod.uid and pod.name not in scene.busy:
            yield Delete(pod.name, pod.uid, why, is_failure=is_failure)
    if without_room:
        return
    for (pipeline, shape), (function, slots) in wanted.items():
        if scene.at_s < scene.park_from_s.get(pipeline, 0.0):
            continue
        for _ in range(len(slots) - len(kept[pipeline, shape])):
            place = supply.place(function, None)
            yield Park(function.name, names(f"{pipeline}-parked"), pipeline, shape, place)


def _wanted(scene: Scene) -> dict[tuple[str, str], tuple[Function, range]]:
    """By pipeline and shape: a stage of it, and how many."""
    wanted: dict[tuple[str, str], tuple[Function, range]] = {}
    for pipeline in scene.functions.values():
        if pipeline.role != "router" or pipeline.name != pipeline.pipeline:
            continue
        shapes = _shapes(scene, pipeline.name)
        for place, function in enumerate(shapes):
            count = (scene.parked_per_pipeline - place + len(shapes) - 1) // len(shapes)
            wanted[pipeline.name, function.shape] = (function, range(max(0, count)))
    return wanted


def _shapes(scene: Scene, pipeline: str) -> list[Function]:
    """One stage of each shape, those of key stages first."""
    ranks = {str(stage): rank for rank, stage in enumerate(scene.key_stages.get(pipeline, ()))}
    stages = [f for f in scene.functions.values() if f.role == "stage" and f.shape and f.pipeline == pipeline]
    stages.sort(key=lambda f: (ranks.get(f.stages, len(ranks)), f.name))
    first: dict[str, Function] = {}
    for stage in stages:
        first.setdefault(stage.shape, stage)
    return list(first.values())


def _why_not(scene: Scene, pod: Pod, is_wanted: bool) -> tuple[str, bool]:
    """Why a parked pod goes, and whether the pool rests after that."""
    router = scene.functions.get(pod.pipeline)
    if router is None or router.uid != pod.owner or not is_wanted:
        return "no stage has its shape any longer", False
    if pod.state == "failed":
        return "it ended", True
    if pod.node and not is_open(scene, pod.node):
        return f"node {pod.node} takes no pods", False
    if pod.unschedulable_s and scene.at_s - pod.unschedulable_s >= UNPLACED_S:
        return "there is no room for it", True
    return "", False


def _is_unplaced(pod: Pod) -> bool:
    """Whether there is room for it nowhere; one bound to its site is first made anew elsewhere."""
    return pod.unschedulable_s > 0 and not (pod.node or pod.site) and pod.state == "starting"
