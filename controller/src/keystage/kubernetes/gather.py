"""From objects and wishes to the scene of one plan.

Before it: the informers' objects with what is expected in their place (`expected`), and what the policy
decided (`wishes`). After it: `plan`, and the statuses that `reconciler` writes. What was derived of an object
is kept as long as the informer has that same object. Belongs to one thread. It must not act.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from keystage.kubernetes.api import FUNCTION_LABEL, KIND, FunctionStatus, deployment_of, gpu_resource
from keystage.kubernetes.backoff import Backoff
from keystage.kubernetes.client import Object
from keystage.kubernetes.manifests import Settings, gpu_gib_of, role, shape_hash, template_hash
from keystage.kubernetes.room import GPU_TOLERATION, VENDOR_GPU, rooms_of
from keystage.kubernetes.scene import Function, Node, Pod, Scene, Workload, pod_of, workload_of
from keystage.kubernetes.view import (
    condition,
    is_deleted,
    labels_of,
    lost_nodes,
    spec_of_object,
    status_of_object,
)
from keystage.kubernetes.wishes import Wish, Wished
from keystage.local.api import Deployment
from keystage.local.labels import parse

LOST_S = 2.0
"""The cluster itself waits for some ten seconds before it says that a node is not ready."""
ParameterBytes = Callable[[Deployment], int | None]
"""Size of a stage's parameters, 0 where its bundle does not tell, None: its bundle could not be read yet."""


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """One function beside its plan.

    Attributes:
        object: the custom resource.
        status: as it stands there.
        desired: replicas decided, None: nobody decided yet.
        cores: of each replica, None: as deployed.
        is_redeployed: its status is of an earlier template.
        trouble: why it cannot be planned, empty.
    """

    object: Object
    status: FunctionStatus
    desired: int | None
    cores: float | None
    is_redeployed: bool = False
    trouble: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Parsed:
    """What a custom resource alone tells."""

    object: Object
    deployment: Deployment
    template: str
    initial: int
    trouble: str


@dataclasses.dataclass(frozen=True, slots=True)
class Gathered:
    """Everything of one turn.

    Attributes:
        scene: for `plan`.
        functions: by name.
        pods: objects by name: all pods with a role, those of Deployments too.
        lost: nodes that are not heard from.
    """

    scene: Scene
    functions: Mapping[str, Known]
    pods: Mapping[str, Object]
    lost: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """What is there, by name."""

    functions: Mapping[str, Object]
    pods: Mapping[str, Object]
    nodes: Mapping[str, Object]
    deployments: Mapping[str, Object]
    others: Mapping[str, Object]


class Gatherer:
    """Makes scenes.

    Args:
        settings: of the chart.
        parameter_bytes: sizes of parameters, for stages on GPUs.
        backoff: failures by `hold_key`.
    """

    def __init__(self, settings: Settings, parameter_bytes: ParameterBytes, backoff: Backoff) -> None:
        self._settings = settings
        self._parameter_bytes = parameter_bytes
        self._backoff = backoff
        self._parsed: dict[str, _Parsed] = {}
        self._pods: dict[str, tuple[Object, Pod]] = {}

    def gather(self, objects: Objects, wished: Wished, at_s: float) -> Gathered:
        """The scene but for what is being done (`busy` and the like).

        Args:
            objects: what is there.
            wished: what was decided.
            at_s: Unix seconds.
        """
        functions: dict[str, Function] = {}
        known: dict[str, Known] = {}
        for name, obj in objects.functions.items():
            if is_deleted(obj):
                continue
            parsed = self._parse(name, obj)
            fact = self._know(parsed, wished.functions.get(name, Wish()))
            known[name] = fact
            if not fact.trouble:
                functions[name] = self._function(parsed, fact, wished.functions.get(name, Wish()))
        self._parsed = {name: parsed for name, parsed in self._parsed.items() if name in known}
        lost = lost_of(objects.nodes.values(), at_s)
        scene = Scene(
            at_s=at_s,
            functions=functions,
            pods=self._bare(objects.pods),
            nodes=self._nodes(objects, lost, has_gpus=any(f.gpu_gib for f in functions.values())),
            workloads=_workloads(objects.deployments),
            key_stages=wished.key_stages,
            parked_per_pipeline=self._settings.parked_per_pipeline,
        )
        return Gathered(scene, known, objects.pods, lost)

    def _parse(self, name: str, obj: Object) -> _Parsed:
        before = self._parsed.get(name)
        if before is not None and before.object is obj:
            return before
        trouble, deployment, initial, template = "", Deployment(service=name), 1, ""
        try:
            deployment = deployment_of(name, obj["metadata"].get("namespace", ""), spec_of_object(obj))
            initial = parse(deployment.labels, role(deployment)).min
            template = template_hash(deployment, self._settings)
        except (msgspec.ValidationError, ValueError) as error:
            trouble = f"it can never run: {error}"
        parsed = _Parsed(obj, deployment, template, initial, trouble)
        self._parsed[name] = parsed
        return parsed

    def _know(self, parsed: _Parsed, wish: Wish) -> Known:
        status = status_of_object(parsed.object)
        cores = wish.cores if wish.cores is not None else status.cores
        is_redeployed = bool(status.template) and status.template != parsed.template
        if is_redeployed:
            cores = None  # its cores are those of the deployment again
        desired = wish.replicas if wish.replicas is not None else status.desired
        return Known(parsed.object, status, desired, cores, is_redeployed, parsed.trouble)

    def _function(self, parsed: _Parsed, known: Known, wish: Wish) -> Function:
        deployment = parsed.deployment
        size = self._parameter_bytes(deployment) if role(deployment) == "stage" else 0
        gib = gpu_gib_of(deployment, size or 0)
        is_unknown = size is None and gib > 0
        hold_s = self._backoff.hold_until_s(hold_key(deployment.service, parsed.template))
        is_stage = role(deployment) == "stage" and not is_unknown
        return Function(
            name=deployment.service,
            uid=parsed.object["metadata"]["uid"],
            deployment=deployment,
            role=role(deployment),
            template=parsed.template,
            shape=shape_hash(deployment, self._settings, gib) if is_stage else "",
            gpu_gib=gib,
            desired=parsed.initial if known.desired is None else known.desired,
            sites=wish.sites,
            victims=wish.victims,
            decided_at_s=wish.decided_at_s,
            cores=known.cores,
            hold_until_s=float("inf") if is_unknown else hold_s,
        )

    def _bare(self, objects: Mapping[str, Object]) -> dict[str, Pod]:
        kept: dict[str, tuple[Object, Pod]] = {}
        for name, obj in objects.items():
            if not is_bare(obj):
                continue
            before = self._pods.get(name)
            kept[name] = before if before is not None and before[0] is obj else (obj, pod_of(obj))
        self._pods = kept
        return {name: pod for name, (_, pod) in kept.items()}

    def _nodes(self, objects: Objects, lost: frozenset[str], *, has_gpus: bool) -> dict[str, Node]:
        pods = [*objects.pods.values(), *objects.others.values()] if has_gpus else []
        nodes = {}
        for name, room in rooms_of(objects.nodes.values(), pods).items():
            # Where the vendor's plugin gives out GPUs too, the policy alone may say that ours does.
            is_ours = has_gpus and not room.total.get(VENDOR_GPU)
            free = {n: room.free(gpu_resource(n)) for n in room.gpus} if is_ours else {}
            # Without a GPU a pod keeps off nodes that are kept for those; sent there it goes elsewhere.
            is_open = not room.kept_out([GPU_TOLERATION])
            nodes[name] = Node(name=name, is_open=is_open, is_lost=name in lost, gpu_gib=free)
        return nodes


def hold_key(function: str, template: str) -> str:
    """Under which failures of a function's present template are counted."""
    return f"{function} {template}"


def is_bare(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is one of those that the controller makes itself."""
    references = pod["metadata"].get("ownerReferences") or ()
    return any(reference.get("controller") and reference.get("kind") == KIND for reference in references)


def lost_of(nodes: Iterable[Object], at_s: float) -> frozenset[str]:
    """Nodes that are not heard from; none where that is so of all: then the view is odd."""
    nodes = list(nodes)
    if not any(condition(node, "Ready").get("status") == "True" for node in nodes):
        return frozenset()
    return lost_nodes(nodes, at_s, LOST_S)


def _workloads(objects: Mapping[str, Object]) -> dict[str, Workload]:
    """Deployments of functions that are not on their way out."""
    return {
        name: workload_of(obj)
        for name, obj in objects.items()
        if labels_of(obj).get(FUNCTION_LABEL) == name and not is_deleted(obj)
    }
