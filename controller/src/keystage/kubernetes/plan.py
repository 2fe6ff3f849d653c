"""What is to be done so that the cluster becomes what was decided: a scene in, operations out. Pure.

Before it: `reconciler` gathers the scene. After it: `act` carries operations out, several at a time; what
they change shows in the next scene. Doing nothing, or all of it again, is always safe.

Rules. A pod that is leaving, ended, or on a node that is lost counts as gone and is replaced at once. Of a
stage there are never more pods than wanted, plus one while a new template replaces an old one. A pod that
serves is first taken out of the routing (`Leave`) and deleted when no gateway has requests there; any other
is deleted at once. A missing replica is a parked pod of the same shape if there is one, even beside its site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from keystage.kubernetes.operations import (
    Activate,
    Apply,
    Create,
    Delete,
    Leave,
    Note,
    Operation,
    RemoveWorkload,
)
from keystage.kubernetes.plan_choice import choose
from keystage.kubernetes.plan_places import Supply, is_open
from keystage.kubernetes.plan_pool import pool_operations
from keystage.kubernetes.scene import Function, Pod, Scene

LINGER_S = 0.5
"""From leaving the routing to deletion, at least: gateways see it within milliseconds."""
HELD_S = 10.0
"""And at most, whatever gateways say: SIGTERM moves a worker's sessions, it does not break them."""
UNPLACED_S = 3.0
"""A pod that its site has had no room for so long is made anew elsewhere."""
START_LIMIT_S = 600.0
GONE_S = 10.0
"""A pod's node may be newer than our list of nodes; after so long it is gone."""


def plan(scene: Scene, names: Callable[[str], str]) -> list[Operation]:
    """Everything that is to be done now.

    Args:
        scene: what there is.
        names: makes a new pod's name from a prefix.
    """
    supply = Supply(scene)
    operations: list[Operation] = []
    mine: dict[str, list[Pod]] = {}
    for pod in scene.pods.values():
        mine.setdefault(pod.function, []).append(pod)
        operations += _part(scene, pod)
    for function in sorted(scene.functions.values(), key=lambda f: _rank(scene, f)):
        pods = [pod for pod in mine.get(function.name, ()) if pod.owner == function.uid]
        if function.role == "stage":
            operations += _stage(scene, function, pods, supply, names)
        else:
            operations += _workload(scene, function, pods)
    taken = {op.pod for op in operations if isinstance(op, Activate | Delete)}
    operations += pool_operations(scene, taken, supply, names)
    operations += [
        RemoveWorkload(workload.name, workload.uid)
        for workload in scene.workloads.values()
        if _has_changed_role(scene, workload.name, workload.owner)
    ]
    return operations


def _rank(scene: Scene, function: Function) -> tuple[int, str]:
    """Key stages are given parked pods and GPUs first."""
    ranking = [str(stage) for stage in scene.key_stages.get(function.pipeline, ())]
    place = ranking.index(function.stages) if function.stages in ranking else len(ranking)
    return (place if function.role == "stage" else -1), function.name


def is_live(scene: Scene, pod: Pod) -> bool:
    """Whether a pod serves or is on its way to it."""
    return pod.state in ("starting", "ready") and not is_lost(scene, pod)


def is_lost(scene: Scene, pod: Pod) -> bool:
    """Whether nothing is to be expected of a pod because of its node."""
    node = scene.nodes.get(pod.node)
    return (node is not None and node.is_lost) or _is_gone(scene, pod)


def _is_gone(scene: Scene, pod: Pod) -> bool:
    """Whether the object of its node is no more."""
    is_known = not pod.node or not scene.nodes or pod.node in scene.nodes
    return not is_known and scene.at_s - pod.scheduled_s >= GONE_S


def _part(scene: Scene, pod: Pod) -> Iterator[Operation]:
    """What becomes of a pod that serves no longer; `pool_operations` says that of parked ones."""
    if pod.name in scene.busy or not pod.uid:
        return
    if _is_gone(scene, pod):
        why = f"node {pod.node} is gone"
        yield Delete(pod.name, pod.uid, why, pod.function, is_gone=True)
        if pod.state != "draining" and pod.function:
            yield Note(pod.function, "ReplicaLost", f"{pod.name}: {why}")
    elif pod.is_deleted or pod.is_parked:
        return
    elif pod.state == "draining":
        since_s = scene.at_s - pod.leaving_s
        if since_s <= -HELD_S:  # dated by a clock that was ahead: its time would come too late
            yield Leave(pod.name, pod.uid, "it is dated anew")
        elif since_s >= HELD_S or (since_s >= LINGER_S and pod.name not in scene.in_use):
            yield Delete(pod.name, pod.uid, "it has left the routing", pod.function)
    elif is_lost(scene, pod):
        why = f"node {pod.node} is not ready"
        yield Leave(pod.name, pod.uid, why)
        yield Note(pod.function, "ReplicaLost", f"{pod.name}: {why}")
    elif pod.state == "failed":
        yield Delete(pod.name, pod.uid, "it ended", pod.function, is_failure=True)
    elif pod.state == "starting" and _is_overdue(scene, pod):
        why = f"it was not ready {START_LIMIT_S:g} s after its start"
        yield Delete(pod.name, pod.uid, why, pod.function, is_failure=True)


def _is_overdue(scene: Scene, pod: Pod) -> bool:
    began_s = max(pod.running_s, pod.activated_s) if pod.running_s else 0.0
    return began_s > 0 and scene.at_s - began_s >= START_LIMIT_S


def _stage(
    scene: Scene, function: Function, pods: list[Pod], supply: Supply, names: Callable[[str], str]
) -> Iterator[Operation]:
    live = [pod for pod in pods if is_live(scene, pod) and not _is_overdue(scene, pod)]
    choice = choose(function, live, scene.at_s)
    for pod, why in choice.going:
        yield from _out(scene, pod, why)
    going = {pod.name for pod, _ in choice.going}
    staying = [pod for pod in live if pod.name not in going]
    for pod in staying:
        if pod.is_activating and pod.name not in scene.activating | scene.busy and pod.uid:
            yield Activate(function.name, pod.name, pod.uid, is_resumed=True)
    unplaced = [pod for pod in staying if _is_unplaced(scene, pod)]
    for pod in unplaced:
        place = supply.elsewhere(function, pod)
        yield Delete(pod.name, pod.uid, f"node {pod.site} has no room for it", function.name)
        yield Create(function.name, names(function.name), place)
        yield Note(
            function.name,
            "PlacementFailed",
            f"a pod found no room on node {pod.site}; placed {_words(place.node, place.is_required)}",
        )
    if scene.at_s < function.hold_until_s:
        return
    yield from _make(function, staying, choice.missing, supply, names)


def _make(
    function: Function, staying: list[Pod], missing: int, supply: Supply, names: Callable[[str], str]
) -> Iterator[Operation]:
    sites = [function.sites[k] if k < len(function.sites) else None for k in range(missing)]
    others = list(staying)
    # Those that are at a site have that one: else one elsewhere took it, and its own node got a pod more.
    parked = {k: supply.take_parked_at(function, site) for k, site in enumerate(sites) if site is not None}
    others += (pod for pod in parked.values() if pod is not None)
    for number, site in enumerate(sites):
        pod = parked.get(number)
        if pod is None and (pod := supply.take_parked(function, site, others)) is not None:
            others.append(pod)
        if pod is not None:
            yield Activate(function.name, pod.name, pod.uid, uses_site=site is not None)
            continue
        place = supply.place(function, site)
        created = Create(function.name, names(function.name), place, uses_site=site is not None)
        others.append(Pod(name=created.pod, node=place.node))
        yield created


def _workload(scene: Scene, function: Function, pods: list[Pod]) -> Iterator[Operation]:
    """A router's or plain function's Deployment; bare pods are of the time when it was a stage."""
    for pod in pods:
        if is_live(scene, pod):
            yield from _out(scene, pod, "its function is no stage any longer")
    wanted = min(function.desired, 1) if function.role == "router" else function.desired
    there = scene.workloads.get(function.name)
    if there is not None and there.owner != function.uid:
        return  # of a function of this name that was removed: it goes with that one
    if there is None or there.template != function.template or there.replicas != wanted:
        yield Apply(function.name)


def _out(scene: Scene, pod: Pod, why: str) -> Iterator[Operation]:
    if pod.name in scene.busy or not pod.uid:
        return
    if pod.state == "ready":
        yield Leave(pod.name, pod.uid, why)
    else:
        yield Delete(pod.name, pod.uid, why, pod.function)


def _is_unplaced(scene: Scene, pod: Pod) -> bool:
    """Whether a pod waits in vain for the node that it must run on."""
    if pod.node or not pod.site or pod.name in scene.busy or not pod.uid:
        return False
    if not is_open(scene, pod.site):
        return True
    return pod.unschedulable_s > 0 and scene.at_s - pod.unschedulable_s >= UNPLACED_S


def _has_changed_role(scene: Scene, name: str, owner: str) -> bool:
    function = scene.functions.get(name)
    return function is not None and function.role == "stage" and function.uid == owner


def _words(node: str, is_required: bool) -> str:
    if not node:
        return "anywhere"
    return f"on node {node}" if is_required else f"there or elsewhere (preferred: {node})"
