"""What a deployment must keep to in order to become pods. Pure.

Before it: a deployment that somebody gave the gateway. After it: a custom resource that the controller can
make objects of, all of which the API server accepts. To what `local.checks` asks of every world it adds what
Kubernetes asks of names, labels and quantities, and refuses what would be passed over in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from keystage.kubernetes.api import COMPONENT_LABEL, GROUP
from keystage.kubernetes.cores import quantity
from keystage.local import checks, labels
from keystage.local.api import SUBDOMAIN, Deployment, Load, role_of

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""A function names a Service: it begins with a letter (RFC 1035)."""
MAX_IMAGE = 1024
MAX_LABEL = 63
MAX_PREFIX = 253
MAX_ANNOTATIONS_BYTES = 256 << 10
MAX_SPEC_BYTES = 1 << 20
"""The API server keeps no object above 1.5 MiB, and adds to it who owns which field."""
RESOURCES = ("cpu", "memory")
_WORD = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_PREFIX = re.compile(SUBDOMAIN)
_IMAGE = re.compile(r"[!-~]+")
_CONSTRAINT = re.compile(r"\s*([^\s=!]+)\s*={1,2}\s*([^\s=]*)\s*")
_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,2}|[num]|k|[KMGTPE]i|[MGTPE])?")
_SHOWN = 80


def check(deployment: Deployment) -> None:
    """Refuses what can never run here.

    Raises:
        ValueError: names function, field, bound and actual value.
    """
    checks.check(deployment)
    name = deployment.service
    if not NAME.fullmatch(name):
        raise ValueError(
            f"function name {name!r} must begin with a letter: it names a Service ({NAME.pattern})"
        )
    if role_of(deployment) == "router" and deployment.envVars["KEYSTAGE_PIPELINE"] != name:
        pipeline = deployment.envVars["KEYSTAGE_PIPELINE"]
        raise ValueError(
            f"function {name}: a router must be named as its pipeline, {_said(pipeline)}: workers find it so"
        )
    try:
        if not deployment.image:
            raise ValueError("image is empty; Kubernetes runs images only")
        if len(deployment.image) > MAX_IMAGE or not _IMAGE.fullmatch(deployment.image):
            raise ValueError(
                f"image must be a reference of at most {MAX_IMAGE} characters, not {_said(deployment.image)}"
            )
        _check_labels(deployment.labels)
        _check_annotations(deployment.annotations)
        for constraint in deployment.constraints:
            _check_constraint(constraint)
        _check_resources(deployment)
        size = len(msgspec.json.encode(deployment))
        if size > MAX_SPEC_BYTES:
            raise ValueError(f"a deployment must have at most {MAX_SPEC_BYTES} bytes, not {size}")
    except ValueError as error:
        raise ValueError(f"function {name}: {error}") from None


def check_replicas(name: str, replicas: int) -> None:
    """Refuses impossible replica numbers.

    Raises:
        ValueError: names the bounds and the number.
    """
    checks.check_replicas(name, replicas)


def check_load(name: str, load: Load) -> None:
    """Refuses impossible reports of a load.

    Raises:
        ValueError: names the bounds and the number.
    """
    checks.check_load(name, load)


def _check_labels(given: Mapping[str, str]) -> None:
    for key, value in given.items():
        _check_own("label", key)
        if not key.startswith(labels.PREFIX):  # of scaling: checked already, and no label of a pod
            _check_value(f"label {key}", value)


def _check_annotations(given: Mapping[str, str]) -> None:
    for key in given:
        _check_own("annotation", key)
    size = sum(len(key.encode()) + len(value.encode()) for key, value in given.items())
    if size > MAX_ANNOTATIONS_BYTES:
        raise ValueError(f"annotations must have at most {MAX_ANNOTATIONS_BYTES} bytes, not {size}")


def _check_key(what: str, key: str) -> None:
    prefix, slash, word = key.rpartition("/")
    is_name = 0 < len(word) <= MAX_LABEL and _WORD.fullmatch(word)
    if not is_name or (slash and (len(prefix) > MAX_PREFIX or not _PREFIX.fullmatch(prefix))):
        raise ValueError(
            f"{what} {_said(key)} must be a name of at most {MAX_LABEL} letters, digits, '-', '_' and '.', "
            "a DNS subdomain and '/' before it if need be"
        )


def _check_own(what: str, key: str) -> None:
    _check_key(what, key)
    if key == COMPONENT_LABEL:
        raise ValueError(f"{what} {_said(key)} is Keystage's own: its gateways are found by it")
    if key.startswith(f"{GROUP}/"):
        raise ValueError(f"{what} {_said(key)} is Keystage's own: names under {GROUP}/ are not taken")


def _check_value(what: str, value: str) -> None:
    if len(value) > MAX_LABEL or not _WORD.fullmatch(value):
        raise ValueError(
            f"{what} must have at most {MAX_LABEL} letters, digits, '-', '_' and '.', and begin and end with "
            f"a letter or digit, not {_said(value)}"
        )


def _check_constraint(text: str) -> None:
    found = _CONSTRAINT.fullmatch(text)
    if found is None:
        raise ValueError(f"constraint {_said(text)} must be a label of nodes: label=value")
    _check_key("constraint", found[1])
    _check_value(f"constraint {found[1]}", found[2])


def _check_resources(deployment: Deployment) -> None:
    requests, limits = deployment.requests or {}, deployment.limits or {}
    for field, given in (("requests", requests), ("limits", limits)):
        for key, text in given.items():
            if key not in RESOURCES:
                raise ValueError(f"{field} must be of {' or '.join(RESOURCES)}, not of {_said(key)}")
            if text and (not _QUANTITY.fullmatch(text) or quantity(text) <= 0):
                raise ValueError(
                    f"{field}.{key} must be a quantity above 0 such as 500m or 1Gi, not {_said(text)}"
                )
    for key in RESOURCES:
        low, high = requests.get(key), limits.get(key)
        if low and high and quantity(low) > quantity(high):
            raise ValueError(f"requests.{key} must be at most limits.{key}, which is {high}, not {low}")


def _said(text: str) -> str:
    return repr(text[:_SHOWN])
