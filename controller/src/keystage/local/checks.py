"""What a deployment must keep to wherever it runs: names, role, environment, probes, scale labels.

Pure. `local.program` asks it for functions that are processes, `kubernetes.checks` for those that are pods;
each adds what only its own world refuses. Who asks makes an error of its own of the `ValueError`.
"""

from __future__ import annotations

import math
import re

from keystage.local import labels
from keystage.local.api import Deployment, Load, role_of

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
MAX_NAME = 63
MAX_REPLICAS = labels.MAX_REPLICAS
ROLES = ("stage", "router", "function")
SHARING = ("shared", "private")
"""KEYSTAGE_SHARING: all replicas of a stage on a node share its parameters, or each has a copy of its own."""
READY_ANNOTATION = "com.openfaas.ready.http.path"
HEALTH_ANNOTATION = "com.openfaas.health.http.path"
_NEEDED = {
    "stage": ("KEYSTAGE_PIPELINE", "KEYSTAGE_BUNDLE", "KEYSTAGE_STAGES"),
    "router": ("KEYSTAGE_PIPELINE", "KEYSTAGE_BUNDLE"),
}
"""Variables that a replica reads; labels of that meaning do not reach it."""
MAX_GATEWAY = 128
MAX_NAMED = 10_000
"""Replicas that one report of a load may name."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PIPELINE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
"""It names the router's socket."""
_PROBE_PATH = re.compile(r"/[!-~]{0,1023}")


def check(deployment: Deployment) -> None:
    """Refuses what can never run anywhere.

    Raises:
        ValueError: names the field, the bound and the actual value.
    """
    check_name(deployment.service)
    kind = role_of(deployment)
    if kind not in ROLES:
        raise ValueError(
            f"function {deployment.service}: KEYSTAGE_ROLE or label keystage.role must be one of "
            f"{', '.join(ROLES)}, not {kind[:80]!r}"
        )
    if "\0" in deployment.envProcess:
        raise ValueError(f"function {deployment.service}: envProcess holds a NUL, which no command line can")
    _check_environment(deployment)
    for annotation in (READY_ANNOTATION, HEALTH_ANNOTATION):
        path = deployment.annotations.get(annotation, "/")
        if not _PROBE_PATH.fullmatch(path):
            raise ValueError(
                f"function {deployment.service}: annotation {annotation} must be a path of at most 1024 "
                f"characters, not {path[:80]!r}"
            )
    scale_of(deployment)
    drain_s_of(deployment)
    for key in _NEEDED.get(kind, ()):
        if not deployment.envVars.get(key):
            raise ValueError(f"function {deployment.service} has role {kind} and needs {key}")
    pipeline = deployment.envVars.get("KEYSTAGE_PIPELINE", "")
    if kind in _NEEDED and not _PIPELINE.fullmatch(pipeline):
        raise ValueError(
            f"function {deployment.service}: KEYSTAGE_PIPELINE must match {_PIPELINE.pattern}, "
            f"not {pipeline[:80]!r}"
        )


def check_name(name: str) -> None:
    """Refuses what is no function name.

    Raises:
        ValueError: names the rule and the name.
    """
    if len(name) > MAX_NAME or not NAME.fullmatch(name):
        raise ValueError(
            f"function name {name[:80]!r} must have at most {MAX_NAME} characters and match {NAME.pattern}"
        )


def check_replicas(name: str, replicas: int) -> None:
    """Refuses impossible replica numbers.

    Raises:
        ValueError: names the bounds and the number.
    """
    if not 0 <= replicas <= MAX_REPLICAS:
        raise ValueError(f"function {name}: replicas must be in 0..{MAX_REPLICAS}, not {replicas}")


def check_load(function: str, load: Load) -> None:
    """Refuses impossible reports of a load.

    Raises:
        ValueError: names the bounds and the number.
    """
    if not 1 <= len(load.gateway) <= MAX_GATEWAY:
        raise ValueError(
            f"function {function}: gateway must have 1..{MAX_GATEWAY} characters, not {len(load.gateway)}"
        )
    if len(load.replicas) > MAX_NAMED:
        raise ValueError(
            f"function {function}: replicas must name at most {MAX_NAMED}, not {len(load.replicas)}"
        )
    counts = [(f"replicas[{replica[:MAX_GATEWAY]}]", count) for replica, count in load.replicas.items()]
    for name, value in (("in_flight", load.in_flight), ("started", load.started), *counts):
        if value < 0:
            raise ValueError(f"function {function}: {name} must be at least 0, not {value}")


def scale_of(deployment: Deployment) -> labels.ScaleLabels:
    """What its labels ask for.

    Raises:
        ValueError: a number is none, or out of bounds.
    """
    try:
        return labels.parse(deployment.labels, role_of(deployment))
    except ValueError as error:
        raise ValueError(f"function {deployment.service}: {error}") from None


def drain_s_of(deployment: Deployment) -> float | None:
    """Seconds that a replica may take to finish after being told to stop, None where it is not said.

    Raises:
        ValueError: it is no number of seconds.
    """
    text = deployment.envVars.get("KEYSTAGE_DRAIN_S")
    if text is None:
        return None
    try:
        drain_s = float(text)
    except ValueError:
        drain_s = math.nan
    if not 0 <= drain_s < math.inf:
        raise ValueError(f"function {deployment.service}: KEYSTAGE_DRAIN_S must be seconds, not {text!r}")
    return drain_s


def _check_environment(deployment: Deployment) -> None:
    for key, value in deployment.envVars.items():
        if not _ENV_NAME.fullmatch(key) or "\0" in value:
            raise ValueError(f"function {deployment.service}: {key!r} is no name of an environment variable")
    sharing = deployment.envVars.get("KEYSTAGE_SHARING", SHARING[0])
    if sharing not in SHARING:
        raise ValueError(
            f"function {deployment.service}: KEYSTAGE_SHARING must be one of {', '.join(SHARING)}, "
            f"not {sharing!r}"
        )
