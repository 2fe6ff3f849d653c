"""Label and field selectors as the API server reads them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from support.kube.answers import Object, bad_request
from support.kube.kinds import Resource

Matches = Callable[[Object], bool]

_SET = re.compile(r"\s*([^\s!=,()]+)\s+(in|notin)\s*\(([^)]*)\)\s*$")
_SPLIT = re.compile(r",(?![^(]*\))")
_LABEL_KEY = re.compile(
    r"([a-z0-9A-Z]([-a-z0-9A-Z.]*[a-z0-9A-Z])?/)?[a-zA-Z0-9]([-a-zA-Z0-9_.]{0,61}[a-zA-Z0-9])?"
)
_LABEL_VALUE = re.compile(r"([a-zA-Z0-9]([-a-zA-Z0-9_.]{0,61}[a-zA-Z0-9])?)?")


def is_label_key(text: str) -> bool:
    """May be a label's key."""
    return _LABEL_KEY.fullmatch(text) is not None and len(text.rpartition("/")[2]) <= 63


def is_label_value(text: str) -> bool:
    """May be a label's value."""
    return len(text) <= 63 and _LABEL_VALUE.fullmatch(text) is not None


def by_labels(text: str) -> Matches:
    """Reads a label selector.

    Raises:
        Refused: it is none.
    """
    tests = [_label_test(part.strip()) for part in (_SPLIT.split(text) if text.strip() else ())]
    return lambda item: all(test(item["metadata"].get("labels") or {}) for test in tests)


def _label_test(part: str) -> Callable[[Mapping[str, str]], bool]:
    if found := _SET.match(part):
        key, operator, listed = found[1], found[2], {v.strip() for v in found[3].split(",")}
        _check(key, *listed)
        if operator == "in":
            return lambda labels: labels.get(key) in listed and key in labels
        return lambda labels: labels.get(key) not in listed
    for sign in ("!=", "==", "="):
        if sign in part:
            key, _, value = (p.strip() for p in part.partition(sign))
            _check(key, value)
            if sign == "!=":
                return lambda labels: labels.get(key) != value
            return lambda labels: labels.get(key) == value
    if part.startswith("!"):
        key = part[1:].strip()
        _check(key)
        return lambda labels: key not in labels
    _check(part)
    return lambda labels: part in labels


def _check(key: str, *values: str) -> None:
    if not is_label_key(key) or not all(is_label_value(v) for v in values):
        raise bad_request(f"unable to parse requirement: invalid label key or value in {key!r} {values}")


def of_label_selector(selector: Object) -> Matches:
    """A `LabelSelector` object: an empty one selects everything."""
    parts = [f"{k}={v}" for k, v in (selector.get("matchLabels") or {}).items()]
    parts += [expression(rule) for rule in selector.get("matchExpressions") or ()]
    return by_labels(",".join(parts))


def expression(rule: Object) -> str:
    """One of `matchExpressions` as text."""
    key, listed = rule["key"], ",".join(rule.get("values") or ())
    match rule["operator"]:
        case "In":
            return f"{key} in ({listed})"
        case "NotIn":
            return f"{key} notin ({listed})"
        case "Exists":
            return str(key)
        case _:
            return f"!{key}"


def by_fields(text: str, resource: Resource) -> Matches:
    """Reads a field selector.

    Raises:
        Refused: it is none, or names a field that this resource cannot be selected by.
    """
    tests: list[tuple[str, str, bool]] = []
    for part in text.split(",") if text.strip() else ():
        sign = next((s for s in ("!=", "==", "=") if s in part), None)
        if sign is None:
            raise bad_request(f"invalid selector: {text!r}; can't understand {part!r}")
        key, _, value = (p.strip() for p in part.partition(sign))
        if key not in resource.fields:
            raise bad_request(f"field label not supported: {key}")
        tests.append((key, value, sign != "!="))
    return lambda item: all((_text(item, key) == value) == is_equal for key, value, is_equal in tests)


def _text(item: Object, path: str) -> str:
    value: Any = item
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None and path in ("spec.unschedulable", "spec.hostNetwork"):
        return "false"
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
