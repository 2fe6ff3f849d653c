"""Deployments, Services and disruption budgets of functions. Pure.

Before it: `manifests`, `manifests_pod`. After it: `act` applies them server-side, so what others add to
these objects stays. A router is one pod that is stopped before its successor starts; a plain function rolls
over without a gap; a stage's pods are bare, and have a budget while there are several of them.
"""

from __future__ import annotations

from typing import Any

from keystage.kubernetes.api import FUNCTION_LABEL, HTTP_PORT, ROLE_LABEL, TEMPLATE_LABEL, WIRE_PORT
from keystage.kubernetes.manifests import (
    Object,
    Owner,
    Settings,
    function_labels,
    metadata,
    role,
    selector_of,
)
from keystage.kubernetes.manifests_template import template_of
from keystage.local.api import Deployment

PROGRESS_S = 600
"""A Deployment's pods that are not ready by then count as stuck."""


def deployment(
    function: Deployment, settings: Settings, owner: Owner, *, template: str, replicas: int
) -> Object:
    """Deployment of a router or a plain function.

    Args:
        function: what was deployed.
        settings: of the chart.
        owner: its custom resource.
        template: see `manifests.template_hash`.
        replicas: how many; a router has at most one.
    """
    is_router = role(function) == "router"
    strategy: Object = (
        {"type": "Recreate"}
        if is_router
        else {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(function.service, settings, owner, _labels(function, template)),
        "spec": {
            "replicas": min(replicas, 1) if is_router else replicas,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": PROGRESS_S,
            "strategy": strategy,
            "selector": {"matchLabels": selector_of(function.service)},
            "template": template_of(function, settings, template),
        },
    }


def service(function: Deployment, settings: Settings, owner: Owner, *, template: str) -> Object:
    """Service of a router or a plain function: one name, whichever pod there is."""
    ports: list[dict[str, Any]] = [{"name": "http", "port": HTTP_PORT, "targetPort": HTTP_PORT}]
    if role(function) == "router":
        ports.append({"name": "wire", "port": WIRE_PORT, "targetPort": WIRE_PORT})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(function.service, settings, owner, _labels(function, template)),
        "spec": {"type": "ClusterIP", "selector": selector_of(function.service), "ports": ports},
    }


def disruption_budget(function: str, settings: Settings, owner: Owner, *, replicas: int) -> Object:
    """Budget of a stage with several replicas: evictions take one at a time.

    Args:
        function: the stage function.
        settings: of the chart.
        owner: its custom resource.
        replicas: wanted, > 1.
    """
    labels = {FUNCTION_LABEL: function, ROLE_LABEL: "stage"}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(function, settings, owner, labels),
        "spec": {"minAvailable": replicas - 1, "selector": {"matchLabels": selector_of(function)}},
    }


def _labels(function: Deployment, template: str) -> dict[str, str]:
    """Labels of the object itself: of its pods' labels only those that are ours."""
    whole = function_labels(function, template)
    return {key: whole[key] for key in (FUNCTION_LABEL, ROLE_LABEL, TEMPLATE_LABEL)}
