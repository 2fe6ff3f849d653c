"""Carries out operations: one call to the API server each. Also says what an object will be after it.

Before it: `plan`. After it: the cluster; `reconciler` shows the prediction to the next plan until the
informer has the object itself. What was deleted already is done. It must not decide or retry.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import Any

from keystage.kubernetes import manifests_workload as workload
from keystage.kubernetes.api import CONTROLLER_MANAGER, LEAVING_ANNOTATION
from keystage.kubernetes.client import (
    DEPLOYMENTS,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SERVICES,
    Cluster,
    Kind,
    Object,
)
from keystage.kubernetes.errors import NotFound
from keystage.kubernetes.expected import merged
from keystage.kubernetes.manifests import Owner, Settings
from keystage.kubernetes.manifests_pod import parked_pod, stage_pod
from keystage.kubernetes.operations import Create, Delete, Leave, Park
from keystage.kubernetes.scene import Function


def pod_for(operation: Create | Park, function: Function, owner: Owner, settings: Settings) -> Object:
    """The pod that an operation makes.

    Args:
        operation: which.
        function: the stage.
        owner: the custom resource that it goes with.
        settings: of the chart.
    """
    if isinstance(operation, Park):
        return parked_pod(
            function.deployment,
            settings,
            owner,
            name=operation.pod,
            shape=operation.shape,
            place=operation.place,
            gpu_gib=function.gpu_gib,
        )
    return stage_pod(
        function.deployment,
        settings,
        owner,
        name=operation.pod,
        template=function.template,
        place=operation.place,
        gpu_gib=function.gpu_gib,
        cores=function.cores,
    )


def leaving_patch(operation: Leave, at_s: float) -> Object:
    """What takes a pod out of the routing."""
    return {"metadata": {"uid": operation.uid, "annotations": {LEAVING_ANNOTATION: f"{at_s:.3f}"}}}


def created(body: Mapping[str, Any], at_s: float) -> Object:
    """A new pod as it will be at first."""
    return merged(body, {"metadata": {"creationTimestamp": _stamp(at_s)}, "status": {"phase": "Pending"}})


def deleted(obj: Mapping[str, Any], at_s: float) -> Object:
    """An object whose deletion has begun."""
    return merged(obj, {"metadata": {"deletionTimestamp": _stamp(at_s)}})


def _stamp(at_s: float) -> str:
    return dt.datetime.fromtimestamp(at_s, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclasses.dataclass(frozen=True, slots=True)
class Actor:
    """Makes the calls; may be used by several threads.

    Attributes:
        cluster: the functions' namespace.
        settings: of the chart.
    """

    cluster: Cluster
    settings: Settings

    def now_s(self) -> float:
        """Unix seconds by the API server's clock."""
        return self.cluster.clock.now_s()

    def create(self, body: Object) -> Object:
        """Makes a pod."""
        return self.cluster.create(PODS, body, manager=CONTROLLER_MANAGER)

    def patch(self, kind: Kind, name: str, patch: Object, subresource: str = "") -> Object | None:
        """Changes an object; None where it is gone."""
        try:
            return self.cluster.patch(kind, name, patch, manager=CONTROLLER_MANAGER, subresource=subresource)
        except NotFound:
            return None

    def delete(self, operation: Delete) -> None:
        """Deletes a pod, with its own grace while its node can confirm that it has ended."""
        grace_s = 0 if operation.is_gone else None
        self.remove(PODS, operation.pod, operation.uid, grace_s)

    def remove(self, kind: Kind, name: str, uid: str = "", grace_s: int | None = None) -> None:
        """Deletes an object that may be gone already."""
        try:
            self.cluster.delete(kind, name, uid=uid, grace_s=grace_s)
        except NotFound:
            return

    def deploy(self, function: Function) -> Object:
        """Makes Deployment and Service of a router or a plain function what they shall be."""
        self._serve(function)
        body = workload.deployment(
            function.deployment,
            self.settings,
            Owner(function.name, function.uid),
            template=function.template,
            replicas=function.desired,
        )
        return self.cluster.apply(DEPLOYMENTS, function.name, body, manager=CONTROLLER_MANAGER)

    def keep(self, function: Function, *, was_stage: bool = False) -> None:
        """Makes a stage's disruption budget, or another function's Service, what it shall be."""
        if function.role != "stage":
            if was_stage:
                self.remove(POD_DISRUPTION_BUDGETS, function.name)
            self._serve(function)
        elif function.desired <= 1:  # with a budget one replica could never be evicted
            self.remove(POD_DISRUPTION_BUDGETS, function.name)
        else:
            owner = Owner(function.name, function.uid)
            body = workload.disruption_budget(function.name, self.settings, owner, replicas=function.desired)
            self.cluster.apply(POD_DISRUPTION_BUDGETS, function.name, body, manager=CONTROLLER_MANAGER)

    def remove_workload(self, name: str, uid: str) -> None:
        """Removes what a function had before it became a stage."""
        self.remove(DEPLOYMENTS, name, uid)
        self.remove(SERVICES, name)

    def _serve(self, function: Function) -> None:
        owner = Owner(function.name, function.uid)
        body = workload.service(function.deployment, self.settings, owner, template=function.template)
        # Not by force: a Service of this name that somebody else made (Keystage's own, say) stays his.
        self.cluster.apply(SERVICES, function.name, body, manager=CONTROLLER_MANAGER, force=False)
