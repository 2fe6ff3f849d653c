"""Which fields an object has, as sets of paths: the base of field ownership (server-side apply). Pure.

An element of a path is `f:name` (a field), `k:{...}` (a list's item, by its keys) or `v:...` (of a set).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

from support.kube.answers import Object
from support.kube.schema import Typed

Path = tuple[str, ...]
Fields = frozenset[Path]

BOOKKEEPING = frozenset(
    {
        ("f:apiVersion",),
        ("f:kind",),
        ("f:metadata",),
        *(
            ("f:metadata", f"f:{name}")
            for name in (
                "name", "namespace", "creationTimestamp", "selfLink", "uid", "generation", "managedFields",
                "resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds",
            )
        ),
    }
)  # fmt: skip
"""Fields that nobody owns."""
_KEY_DEFAULTS = {"protocol": "TCP"}


def item_element(item: Any, schema: Typed) -> str:
    """The element by which a list's item is found."""
    if not schema.list_keys or not isinstance(item, dict):
        return "v:" + _text(item)
    keys = {k: item.get(k, _KEY_DEFAULTS.get(k)) for k in schema.list_keys}
    return "k:" + _text({k: v for k, v in keys.items() if v is not None})


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def fields_of(value: Any, schema: Typed | None, path: Path = ()) -> Fields:
    """Every field of an object that can have an owner."""
    return frozenset(p for p in _walk(value, schema, path) if p not in BOOKKEEPING)


def _walk(value: Any, schema: Typed | None, path: Path) -> Iterable[Path]:
    if schema is None:
        if path:
            yield path
        return
    if isinstance(value, dict) and value and not schema.is_atomic and not schema.is_open:
        for name, inner in value.items():
            yield from _walk(inner, schema.field(name), (*path, f"f:{name}"))
    elif isinstance(value, list) and value and not schema.is_atomic:
        for item in value:
            at = (*path, item_element(item, schema))
            yield at
            if isinstance(item, dict):
                yield from _walk(item, schema.items(), at)
    elif path:
        yield path


def with_holders(fields: Fields) -> Fields:
    """The fields, and everything that holds them: it goes when nothing in it has an owner any more."""
    return frozenset(path[:n] for path in fields for n in range(1, len(path) + 1)) - BOOKKEEPING


def value_at(value: Any, schema: Typed | None, path: Path) -> Any:
    """What stands at a path; `KeyError` if nothing does."""
    for element in path:
        if isinstance(value, dict) and element.startswith("f:"):
            value = value[element[2:]]
            schema = None if schema is None else schema.field(element[2:])
        elif isinstance(value, list) and schema is not None:
            for item in value:
                if item_element(item, schema) == element:
                    value = item
                    break
            else:
                raise KeyError(element)
            schema = schema.items()
        else:
            raise KeyError(element)
    return value


def without(value: Any, schema: Typed, paths: Iterable[Path]) -> None:
    """Removes what stands at paths, in place; items of lists as a whole."""
    for path in sorted(paths, key=len):  # an item goes before what is in it, by which it is found
        try:
            holder = value_at(value, schema, path[:-1])
            inner: Typed | None = schema
            for element in path[:-1]:
                assert inner is not None
                inner = inner.field(element[2:]) if element.startswith("f:") else inner.items()
            if path[-1].startswith("f:"):
                holder.pop(path[-1][2:], None)
            elif inner is not None:
                holder[:] = [item for item in holder if item_element(item, inner) != path[-1]]
        except (KeyError, AttributeError):
            continue


def merged(live: Any, wanted: Any, schema: Typed | None) -> Any:
    """`wanted` laid over `live` as server-side apply does."""
    if schema is None or live is None or schema.is_atomic or schema.is_open:
        return copy.deepcopy(wanted)
    if isinstance(live, dict) and isinstance(wanted, dict):
        result = dict(live)
        for name, inner in wanted.items():
            result[name] = merged(live.get(name), inner, schema.field(name))
        return result
    if isinstance(live, list) and isinstance(wanted, list):
        items = schema.items()
        given = {item_element(item, schema): item for item in wanted}
        known = {item_element(item, schema): item for item in live}
        result_list = [
            merged(item, given[at], items) if at in given else copy.deepcopy(item)
            for at, item in known.items()
        ]
        return result_list + [copy.deepcopy(item) for at, item in given.items() if at not in known]
    return copy.deepcopy(wanted)


def to_json(fields: Iterable[Path]) -> Object:
    """As `fieldsV1` of a managed fields' entry."""
    root: Object = {}
    for path in sorted(fields):
        node = root
        for element in path:
            node = node.setdefault(element, {})
    for path in fields:
        node = root
        for element in path:
            node = node[element]
        if node or path[-1].startswith("k:"):
            node["."] = {}
    return root


def from_json(node: Object, path: Path = ()) -> Fields:
    """The set that `fieldsV1` describes."""
    found: set[Path] = set()
    for element, inner in node.items():
        if element == ".":
            found.add(path)
        elif not inner:
            found.add((*path, element))
        else:
            found |= from_json(inner, (*path, element))
    return frozenset(found)


def dotted(path: Path) -> str:
    """As conflicts name it: `.spec.containers[name="x"].image`."""
    text = ""
    for element in path:
        if element.startswith("f:"):
            text += f".{element[2:]}"
        elif element.startswith("k:"):
            text += "[" + ",".join(f"{k}={json.dumps(v)}" for k, v in json.loads(element[2:]).items()) + "]"
        else:
            text += f"[={element[2:]}]"
    return text
