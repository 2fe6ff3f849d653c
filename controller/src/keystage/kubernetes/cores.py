"""CPU cores in a pod's resources: quantities, what a pod has, and how more are asked for. Pure.

Before it: a function's limits and requests, a pod as JSON. After it: `manifests` (new pods), `resize`
(running ones) and the controller's view of nodes. A pod keeps its quality-of-service class: the API server
refuses a resize that changes it. So where request and limit were equal they stay equal, where the request
was lower it stays lower in proportion, and what was not stated is not added: a pod without any CPU resource
is told its threads and nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from keystage.kubernetes.api import CONTAINER
from keystage.local.api import Deployment

Object = Mapping[str, Any]
Resources = Mapping[str, Mapping[str, str]]
"""`{"requests": {...}, "limits": {...}}`."""

LEAST_CORES = 0.001
"""Kubernetes counts CPU in thousandths."""
MOST = 1e24
"""No machine has more of anything; what is computed of it stays finite."""
_FACTORS = {
    "": 1.0,
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
    "Ei": 2.0**60,
}
_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([numkMGTPE]|[KMGTPE]i)?")


def quantity(text: object) -> float:
    """A Kubernetes quantity (`100m`, `64Mi`, `2`, `1e3`) as a number; 0 for what is none."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text) if math.isfinite(text) else 0.0
    found = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return 0.0
    try:
        value = float(found.group(1)) * _FACTORS[found.group(2) or ""]
    except ValueError:
        return 0.0
    return max(-MOST, min(MOST, value)) if math.isfinite(value) else 0.0


def cpu_text(cores: float) -> str:
    """Cores as Kubernetes writes them, in whole thousandths; at least one of these."""
    return f"{max(1, round(1000 * cores))}m"


def base_cores(deployment: Deployment) -> float:
    """Cores of a replica as deployed: its limit, else its compute threads."""
    limit = quantity((deployment.limits or {}).get("cpu"))
    return limit if limit >= LEAST_CORES else float(_threads(deployment))


def deployed_resources(deployment: Deployment, default: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Resources that a function's pods are made with, but for GPUs.

    Args:
        deployment: the function.
        default: requests of one that states nothing, empty: none.
    """
    stated = {"requests": deployment.requests or {}, "limits": deployment.limits or {}}
    given = {name: {k: v for k, v in part.items() if v} for name, part in stated.items()}
    found = {name: part for name, part in given.items() if part}
    return found or ({"requests": dict(default)} if default else {})


def threads_of(cores: float) -> int:
    """Compute threads that use so many cores."""
    return max(1, math.ceil(cores - 1e-9))


def with_cores(resources: Resources, cores: float, base: float) -> dict[str, dict[str, str]]:
    """Resources with other cores, in the same quality-of-service class.

    Args:
        resources: as deployed.
        cores: wanted of each replica.
        base: what `resources` stand for (`base_cores`).
    """
    requests, limits = dict(resources.get("requests") or {}), dict(resources.get("limits") or {})
    limit = quantity(limits.get("cpu"))
    request = quantity(requests.get("cpu")) or limit  # the API server's own default
    if limit > 0:
        limits["cpu"] = cpu_text(cores)
    if request > 0:
        wanted = request * cores / base if base > 0 else request
        if 0 < limit <= request:
            requests["cpu"] = limits["cpu"]
        elif limit > 0:  # strictly lower, or a pod with equal memory would become Guaranteed
            requests["cpu"] = cpu_text(min(wanted, max(LEAST_CORES, cores - LEAST_CORES)))
        else:
            requests["cpu"] = cpu_text(wanted)
    return {name: part for name, part in (("requests", requests), ("limits", limits)) if part}


def asked_of(pod: Object) -> dict[str, dict[str, str]]:
    """Resources that a function's pod asks for now."""
    for container in pod.get("spec", {}).get("containers") or ():
        if container.get("name") == CONTAINER:
            resources = container.get("resources") or {}
            return {name: dict(resources.get(name) or {}) for name in ("requests", "limits")}
    return {"requests": {}, "limits": {}}


def given_to(pod: Object) -> dict[str, dict[str, str]]:
    """Resources that the kubelet has put into force; as asked for where it has not said any."""
    for entry in pod.get("status", {}).get("containerStatuses") or ():
        if entry.get("name") == CONTAINER and entry.get("resources"):
            resources = entry["resources"]
            return {name: dict(resources.get(name) or {}) for name in ("requests", "limits")}
    return asked_of(pod)


def cores_in(resources: Resources, deployed: Resources, base: float) -> float | None:
    """Cores that a pod's resources stand for; None where they say nothing of CPU.

    Args:
        resources: of a pod.
        deployed: what its function's pods are made with (`deployed_resources`).
        base: cores that these stand for.
    """
    limit = quantity((resources.get("limits") or {}).get("cpu"))
    if limit > 0:
        return limit
    request = quantity((resources.get("requests") or {}).get("cpu"))
    before = quantity((deployed.get("requests") or {}).get("cpu"))
    return base * request / before if request > 0 and before > 0 else None


def cpu_of(resources: Resources) -> tuple[float, float]:
    """CPU request and limit in cores, 0 where there is none; a request that is not stated is the limit."""
    limit = quantity((resources.get("limits") or {}).get("cpu"))
    return quantity((resources.get("requests") or {}).get("cpu")) or limit, limit


def _threads(deployment: Deployment) -> int:
    text = deployment.envVars.get("KEYSTAGE_THREADS", "")
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 6 else 1
