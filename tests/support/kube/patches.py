"""Patches: merge (RFC 7386), strategic merge with list keys, JSON patch (RFC 6902). Pure."""

from __future__ import annotations

import copy
from typing import Any

from support.kube.answers import bad_request
from support.kube.schema import Typed


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(result.get(name), value)
    return result


def strategic(target: Any, patch: Any, schema: Typed | None) -> Any:
    """Strategic merge: items of lists are found by the merge key of the schema."""
    if isinstance(patch, list):
        return _strategic_list(target, patch, schema)
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    patch = dict(patch)
    directive = patch.pop("$patch", None)
    if directive == "replace":
        return copy.deepcopy(patch)
    if directive == "delete":
        return {}
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if name.startswith(("$setElementOrder/", "$retainKeys")):
            continue
        if name.startswith("$deleteFromPrimitiveList/"):
            of = name.partition("/")[2]
            result[of] = [v for v in result.get(of, []) if v not in value]
        elif value is None:
            result.pop(name, None)
        else:
            inner = None if schema is None else schema.field(name)
            result[name] = strategic(result.get(name), value, inner)
    return result


def _strategic_list(target: Any, patch: list[Any], schema: Typed | None) -> list[Any]:
    present = list(target) if isinstance(target, list) else []
    if schema is None or not schema.is_merged_list:
        return copy.deepcopy(patch)
    key = schema.merge_key
    if not key:
        return present + [v for v in patch if v not in present]
    if any(isinstance(i, dict) and i.get("$patch") == "replace" for i in patch):
        return [i for i in copy.deepcopy(patch) if i.get("$patch") != "replace"]
    items = schema.items()
    for item in patch:
        if key not in item:
            raise bad_request(f"map: {item} does not contain declared merge key: {key}")
        at = next((i for i, known in enumerate(present) if known.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            present = [known for known in present if known.get(key) != item[key]]
        elif at is None:
            present.append(strategic({}, item, items))
        else:
            present[at] = strategic(present[at], item, items)
    return present


def json_patch(target: Any, steps: Any) -> Any:
    """RFC 6902: add, remove, replace, test."""
    if not isinstance(steps, list):
        raise bad_request("a JSON patch is a list")
    result = copy.deepcopy(target)
    for step in steps:
        try:
            result = _step(result, step)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise bad_request(f"JSON patch {step} does not fit: {error!r}") from error
    return result


def _step(root: Any, step: dict[str, Any]) -> Any:
    parts = [p.replace("~1", "/").replace("~0", "~") for p in step["path"].split("/")[1:]]
    holder = root
    for part in parts[:-1]:
        holder = holder[int(part)] if isinstance(holder, list) else holder[part]
    last: Any = parts[-1]
    if isinstance(holder, list):
        last = len(holder) if last == "-" else int(last)
    match step["op"]:
        case "add" if isinstance(holder, list):
            holder.insert(last, step["value"])
        case "add":
            holder[last] = step["value"]
        case "replace":
            _ = holder[last]  # what is not there cannot be replaced
            holder[last] = step["value"]
        case "remove":
            del holder[last]
        case "test":
            if holder[last] != step["value"]:
                raise ValueError("test failed")
        case other:
            raise ValueError(f"unknown operation {other}")
    return root
