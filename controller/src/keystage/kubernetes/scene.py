"""What `plan` is told of the cluster: functions, pods, nodes, Deployments, as plain values. Pure.

Before it: the reconciler's objects (what informers saw, and what was sent and not seen yet). After it:
`plan`, which knows no JSON. Everything is derived from objects, so a new leader sees what the old one saw.
It must not decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from keystage.controller.domain.decision import Site
from keystage.kubernetes.api import (
    ACTIVATED_ANNOTATION,
    FUNCTION_LABEL,
    LEAVING_ANNOTATION,
    PIPELINE_LABEL,
    POOL_LABEL,
    SERVING_ANNOTATION,
    TEMPLATE_LABEL,
)
from keystage.kubernetes.manifests import SITE_ANNOTATION, Role, pipeline_of
from keystage.kubernetes.manifests_pod import gpu_of_pod
from keystage.kubernetes.view import (
    annotations_of,
    condition,
    is_deleted,
    is_ended,
    is_leaving,
    is_ready,
    labels_of,
    number,
    seconds,
    state_of,
    unschedulable_since_s,
)
from keystage.local.api import Deployment

Object = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One bare pod.

    Attributes:
        name: of the pod and the replica.
        uid: of the object, empty while its creation is on its way.
        function: whose replica it is, empty: parked.
        pool: shape of a pod that is or was parked, else empty.
        pipeline: whose pool it belongs to.
        template: of the function when it was made or activated.
        owner: uid of the custom resource that owns it.
        node: where it runs, empty before it is scheduled.
        site: node that it must run on, empty: any.
        gpu: index of its GPU, None: none.
        state: as in `view.state_of`; of a parked one whether it can be activated (`ready`).
        is_deleted: its deletion has begun.
        is_serving: it said that it serves (activated ones only).
        leaving_s: Unix seconds since which it leaves, 0: it does not.
        created_s: Unix seconds.
        activated_s: Unix seconds of the decision to activate it.
        scheduled_s: since when it has a node.
        unschedulable_s: since when the scheduler finds no place, 0: it did not say so.
        running_s: since when its container runs, 0: it does not.
    """

    name: str
    uid: str = ""
    function: str = ""
    pool: str = ""
    pipeline: str = ""
    template: str = ""
    owner: str = ""
    node: str = ""
    site: str = ""
    gpu: int | None = None
    state: Literal["starting", "ready", "draining", "failed", "stopped"] = "starting"
    is_deleted: bool = False
    is_serving: bool = False
    leaving_s: float = 0.0
    created_s: float = 0.0
    activated_s: float = 0.0
    scheduled_s: float = 0.0
    unschedulable_s: float = 0.0
    running_s: float = 0.0

    @property
    def is_parked(self) -> bool:
        """Whether it waits to become a worker."""
        return not self.function

    @property
    def is_activating(self) -> bool:
        """Whether it was told, or is to be told, what to become, and did not say yet that it serves."""
        return bool(self.pool and self.function) and not self.is_serving


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node.

    Attributes:
        name: its name.
        is_open: new pods may come: ready, not cordoned, not being removed.
        is_lost: not heard from for a while: nothing on it can be counted on.
        gpu_gib: free GiB by index of GPU.
    """

    name: str
    is_open: bool = True
    is_lost: bool = False
    gpu_gib: Mapping[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One function, as it is deployed now.

    Attributes:
        name: its name.
        uid: of its custom resource.
        deployment: what was deployed.
        role: stage, router or function.
        template: hash of its pods' template.
        shape: hash of its shape (stages), empty: not known yet, because its bundle was not read.
        gpu_gib: GiB of GPU memory of one replica, 0: no GPU.
        desired: replicas there shall be.
        sites: where the next new ones go, in order; a parked pod elsewhere is taken instead.
        victims: which go first.
        decided_at_s: when that was decided (Unix seconds), 0: not by this leader.
        cores: of each replica, None: as deployed.
        hold_until_s: no new pod before (Unix seconds): the last ones failed.
    """

    name: str
    uid: str
    deployment: Deployment
    role: Role
    template: str
    shape: str = ""
    gpu_gib: int = 0
    desired: int = 1
    sites: tuple[Site, ...] = ()
    victims: tuple[str, ...] = ()
    decided_at_s: float = 0.0
    cores: float | None = None
    hold_until_s: float = 0.0

    @property
    def pipeline(self) -> str:
        """Its pipeline, empty for a plain function."""
        return pipeline_of(self.deployment)

    @property
    def stages(self) -> str:
        """Index or range of a stage, as it was deployed."""
        return self.deployment.envVars.get("KEYSTAGE_STAGES", "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A Deployment that is there: whose, from which template, and how many."""

    name: str
    uid: str
    owner: str
    template: str
    replicas: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything `plan` may know.

    Attributes:
        at_s: Unix seconds.
        functions: by name.
        pods: bare pods by name.
        nodes: by name.
        workloads: Deployments by name.
        busy: pods that something is being done to, which is not to be done twice.
        activating: pods that are being told what to become.
        in_use: pods that leave and may still have requests of a gateway.
        key_stages: stage indices by pipeline, the most important first.
        parked_per_pipeline: size of a pipeline's pool.
        park_from_s: by pipeline: Unix seconds before which its pool is not filled.
    """

    at_s: float
    functions: Mapping[str, Function]
    pods: Mapping[str, Pod]
    nodes: Mapping[str, Node]
    workloads: Mapping[str, Workload] = dataclasses.field(default_factory=dict)
    busy: frozenset[str] = frozenset()
    activating: frozenset[str] = frozenset()
    in_use: frozenset[str] = frozenset()
    key_stages: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    parked_per_pipeline: int = 0
    park_from_s: Mapping[str, float] = dataclasses.field(default_factory=dict)


def pod_of(obj: Object) -> Pod:
    """A bare pod."""
    meta, labels, annotations = obj["metadata"], labels_of(obj), annotations_of(obj)
    site = annotations.get(SITE_ANNOTATION, "")
    gpu = gpu_of_pod(obj)
    if is_leaving(obj) or is_ended(obj) or labels.get(FUNCTION_LABEL):
        state = state_of(obj)
    else:
        state = "ready" if is_ready(obj) else "starting"
    left_s = number(annotations.get(LEAVING_ANNOTATION))
    return Pod(
        name=meta["name"],
        uid=meta.get("uid", ""),
        function=labels.get(FUNCTION_LABEL, ""),
        pool=labels.get(POOL_LABEL, ""),
        pipeline=labels.get(PIPELINE_LABEL, ""),
        template=labels.get(TEMPLATE_LABEL, ""),
        owner=owner_of(obj),
        node=obj.get("spec", {}).get("nodeName", ""),
        site="" if site.startswith("~") else site,
        gpu=gpu[0] if gpu else None,
        state=state,
        is_deleted=is_deleted(obj),
        is_serving=SERVING_ANNOTATION in annotations,
        leaving_s=left_s or seconds(meta.get("deletionTimestamp")),
        created_s=seconds(meta.get("creationTimestamp")),
        activated_s=number(annotations.get(ACTIVATED_ANNOTATION)),
        scheduled_s=seconds(condition(obj, "PodScheduled").get("lastTransitionTime")),
        unschedulable_s=unschedulable_since_s(obj),
        running_s=_running_s(obj),
    )


def workload_of(obj: Object) -> Workload:
    """A Deployment."""
    return Workload(
        name=obj["metadata"]["name"],
        uid=obj["metadata"].get("uid", ""),
        owner=owner_of(obj),
        template=labels_of(obj).get(TEMPLATE_LABEL, ""),
        replicas=obj.get("spec", {}).get("replicas", 1),
    )


def owner_of(obj: Object) -> str:
    """Uid of the object that controls this one, empty: none."""
    for reference in obj["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            return str(reference.get("uid", ""))
    return ""


def _running_s(obj: Object) -> float:
    for entry in obj.get("status", {}).get("containerStatuses") or ():
        running = entry.get("state", {}).get("running")
        if running:
            return seconds(running.get("startedAt"))
    return 0.0
