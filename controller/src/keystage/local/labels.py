"""The labels `com.openfaas.scale.*` of a function: what each asks for, and which are refused and why.

Pure. Before it: a deployment. After it: the supervisor refuses what cannot be honoured, the controller
scales by the rest. A label that is here is honoured exactly or refused by name; none is passed over.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal, get_args

from keystage.local.durations import parse_go_duration

PREFIX = "com.openfaas.scale."
MIN = PREFIX + "min"
MAX = PREFIX + "max"
ZERO = PREFIX + "zero"
ZERO_DURATION = PREFIX + "zero-duration"
TARGET = PREFIX + "target"
TARGET_PROPORTION = PREFIX + "target-proportion"
TYPE = PREFIX + "type"
FACTOR = PREFIX + "factor"
KNOWN = (MIN, MAX, ZERO, ZERO_DURATION, TARGET, TARGET_PROPORTION, TYPE, FACTOR)

MAX_REPLICAS = 1000
DEFAULT_MIN = 1
DEFAULT_MAX = 20
DEFAULT_TARGET = 50.0
DEFAULT_PROPORTION = 0.9
DEFAULT_ZERO_DURATION_S = 900.0
"""Defaults as OpenFaaS has them."""
MIN_ZERO_DURATION_S = 2.0
"""Gateways tell their load once a second: within less a report may be missed that is only late."""
MAX_TARGET = 1e9
MAX_FACTOR = 100

Type = Literal["capacity", "rps"]
_FOREIGN_TYPES = {
    "cpu": "a busy CPU does not tell how many replicas would help: use capacity or rps",
    "queue": "no queue is watched per function: requests that wait at the gateway count as capacity",
    "custom": "there is no metrics query behind it: use capacity or rps",
}
_LOAD_LABELS = (TARGET, TARGET_PROPORTION, TYPE)
_DECIMAL = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")
_SHOWN = 80


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleLabels:
    """What a function's labels ask for.

    Attributes:
        min: fewest replicas while it is not at zero.
        max: most replicas, never below `min`.
        zero: it may go to zero replicas when nothing came for `zero_duration_s`.
        zero_duration_s: seconds.
        target: load per replica, None: not scaled by load.
        target_proportion: part of the target that a replica is given.
        type: what load is: `capacity`, requests in flight; `rps`, requests a second.
        factor: percent of `max` by which load may raise the number before the new replicas are ready; 0: load
            does not scale it; None: no such bound.
    """

    min: int = DEFAULT_MIN
    max: int = DEFAULT_MAX
    zero: bool = False
    zero_duration_s: float = DEFAULT_ZERO_DURATION_S
    target: float | None = None
    target_proportion: float = DEFAULT_PROPORTION
    type: Type = "rps"
    factor: int | None = None


def parse(labels: Mapping[str, str], role: str) -> ScaleLabels:
    """Reads a function's labels.

    Args:
        labels: all of its labels.
        role: `stage`, `router` or `function`.

    Raises:
        ValueError: one is malformed, out of bounds, or not honoured for this role; names label, bound, value.
    """
    unknown = sorted(name for name in labels if name.startswith(PREFIX) and name not in KNOWN)
    if unknown:
        raise ValueError(f"label {unknown[0][:_SHOWN]} is not known here: known are {', '.join(KNOWN)}")
    _check_role(labels, role)
    least = _integer(labels, MIN, 0, MAX_REPLICAS, DEFAULT_MIN)
    most = _integer(labels, MAX, 1, MAX_REPLICAS, max(DEFAULT_MAX, least))
    if most < least:
        raise ValueError(f"label {MAX} must be at least {MIN}, which is {least}, not {most}")
    asked = ScaleLabels(
        min=least,
        max=most,
        zero=_boolean(labels, ZERO),
        zero_duration_s=_duration_s(labels, ZERO_DURATION, DEFAULT_ZERO_DURATION_S),
        target=_target(labels),
        target_proportion=_number(labels, TARGET_PROPORTION, 1.0, DEFAULT_PROPORTION),
        type=_type(labels),
        factor=_integer(labels, FACTOR, 0, MAX_FACTOR, 0) if FACTOR in labels else None,
    )
    _check_effect(labels, asked)
    return asked


def whole(text: str) -> int | None:
    """The integer of at most nine digits that a text is, None: it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _check_role(labels: Mapping[str, str], role: str) -> None:
    if role == "function":
        return
    who = {
        "stage": "a stage is sized by its pipeline's queueing model and objective (KEYSTAGE_SLO)",
        "router": "a router is one process per pipeline",
    }.get(role, f"role {role} is not scaled by load")
    for name in _LOAD_LABELS:
        if name in labels:
            raise ValueError(f"label {name} is not honoured for a {role}: {who}, not {_said(labels[name])}")
    if labels.get(FACTOR, "0") != "0":
        raise ValueError(f"label {FACTOR} of a {role} must be 0: {who}, not {_said(labels[FACTOR])}")
    if role != "router":
        return
    for name in (MIN, MAX):
        if labels.get(name, "1") != "1":
            raise ValueError(f"label {name} of a router must be 1: {who}, not {_said(labels[name])}")
    if labels.get(ZERO, "false") != "false":
        raise ValueError(
            f"label {ZERO} of a router must be false: a router wakes the stages of its pipeline, "
            f"not {_said(labels[ZERO])}"
        )


def _check_effect(labels: Mapping[str, str], asked: ScaleLabels) -> None:
    """Refuses what would be passed over because another label is missing."""
    if ZERO_DURATION in labels and not asked.zero:
        raise ValueError(
            f"label {ZERO_DURATION} has no effect without {ZERO}=true, not {_said(labels[ZERO_DURATION])}"
        )
    if asked.factor and asked.target is None:
        raise ValueError(
            f"label {FACTOR} above 0 has no effect without one of {', '.join(_LOAD_LABELS)}, "
            f"not {_said(labels[FACTOR])}"
        )


def _target(labels: Mapping[str, str]) -> float | None:
    """The load per replica; any of the three load labels asks for scaling by load, as in OpenFaaS."""
    if not any(name in labels for name in _LOAD_LABELS):
        return None
    return _number(labels, TARGET, MAX_TARGET, DEFAULT_TARGET)


def _type(labels: Mapping[str, str]) -> Type:
    text = labels.get(TYPE, "rps")
    for kind in get_args(Type):
        if text == kind:
            found: Type = kind
            return found
    reason = _FOREIGN_TYPES.get(text)
    known = " or ".join(get_args(Type))
    raise ValueError(f"label {TYPE} must be {known}, not {_said(text)}" + (f": {reason}" if reason else ""))


def _integer(labels: Mapping[str, str], name: str, least: int, most: int, default: int) -> int:
    text = labels.get(name)
    if text is None:
        return default
    value = whole(text)
    if value is None or not least <= value <= most:
        raise ValueError(f"label {name} must be an integer in {least}..{most}, not {_said(text)}")
    return value


def _number(labels: Mapping[str, str], name: str, most: float, default: float) -> float:
    text = labels.get(name)
    if text is None:
        return default
    value = float(text) if _DECIMAL.fullmatch(text) else 0.0
    if not 0 < value <= most:
        raise ValueError(f"label {name} must be a number above 0 and at most {most:g}, not {_said(text)}")
    return value


def _boolean(labels: Mapping[str, str], name: str) -> bool:
    text = labels.get(name, "false")
    if text not in ("true", "false"):
        raise ValueError(f"label {name} must be true or false, not {_said(text)}")
    return text == "true"


def _duration_s(labels: Mapping[str, str], name: str, default: float) -> float:
    text = labels.get(name)
    if text is None:
        return default
    try:
        value = parse_go_duration(text)
    except ValueError as error:
        raise ValueError(f"label {name}: {error}") from None
    if value < MIN_ZERO_DURATION_S:
        raise ValueError(f"label {name} must be at least {MIN_ZERO_DURATION_S:g} s, not {_said(text)}")
    return value


def _said(text: str) -> str:
    return repr(text[:_SHOWN])
