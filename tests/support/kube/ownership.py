"""Who owns which field: managed fields after writes, and server-side apply. Pure; time is given."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Literal

from support.kube.answers import Cause, Object, apply_conflict
from support.kube.fieldsets import (
    Fields,
    Path,
    dotted,
    fields_of,
    from_json,
    merged,
    to_json,
    value_at,
    with_holders,
    without,
)
from support.kube.schema import Typed


@dataclasses.dataclass(frozen=True, slots=True)
class Writer:
    """Who writes: a manager, how, through which subresource."""

    manager: str
    operation: Literal["Apply", "Update"]
    subresource: str = ""


Owned = dict[Writer, Fields]


def owned_of(item: Object) -> Owned:
    """Managed fields of an object."""
    return {
        Writer(e["manager"], e["operation"], e.get("subresource", "")): from_json(e["fieldsV1"])
        for e in item.get("metadata", {}).get("managedFields", ())
    }


def with_owned(item: Object, owned: Owned, before: Object | None, api_version: str, now: str) -> None:
    """Writes managed fields into an object; entries that did not change keep their time."""
    times = {} if before is None else {
        Writer(e["manager"], e["operation"], e.get("subresource", "")): (from_json(e["fieldsV1"]), e["time"])
        for e in before["metadata"].get("managedFields", ())
    }  # fmt: skip
    entries = []
    for writer, fields in owned.items():
        if not fields:
            continue
        known = times.get(writer)
        entry: Object = {
            "manager": writer.manager,
            "operation": writer.operation,
            "apiVersion": api_version,
            "time": known[1] if known is not None and known[0] == fields else now,
            "fieldsType": "FieldsV1",
            "fieldsV1": to_json(fields),
        }
        if writer.subresource:
            entry["subresource"] = writer.subresource
        entries.append(entry)
    if entries:
        item["metadata"]["managedFields"] = entries
    else:
        item["metadata"].pop("managedFields", None)


def _get(item: Any, schema: Typed, path: Path) -> Any:
    try:
        return value_at(item, schema, path)
    except KeyError:
        return _ABSENT


_ABSENT = object()


def after_update(before: Object | None, item: Object, schema: Typed, writer: Writer) -> Owned:
    """Owners after a create, an update or a patch: what changed is the writer's alone."""
    owned = {} if before is None else owned_of(before)
    present = fields_of(item, schema)
    if before is None:
        changed = present
    else:
        changed = frozenset(p for p in present if _differs(_get(before, schema, p), _get(item, schema, p), p))
    result = {
        other: fields & _kept(fields, item, schema) - (changed if other != writer else frozenset())
        for other, fields in owned.items()
    }
    new = frozenset(p for p in with_holders(changed) if before is None or _get(before, schema, p) is _ABSENT)
    result[writer] = result.get(writer, frozenset()) | changed | new
    return result


def _differs(old: Any, new: Any, path: Path) -> bool:
    if not path[-1].startswith("f:"):  # an item of a list is new, or its fields are told of apart
        return old is _ABSENT
    return bool(old is _ABSENT or old != new)


def _kept(fields: Fields, item: Object, schema: Typed) -> Fields:
    return frozenset(p for p in fields if _get(item, schema, p) is not _ABSENT)


def applied(
    live: Object, wanted: Object, schema: Typed, writer: Writer, *, force: bool, ignored: tuple[str, ...]
) -> tuple[Object, Owned]:
    """The object after server-side apply, and the owners.

    Args:
        live: as it is, or its name and nothing else.
        wanted: what the manager applies.
        schema: of the object.
        writer: who.
        force: take fields from others.
        ignored: top fields that this subresource does not write.

    Raises:
        Refused: others own fields that get another value, and `force` is not given.
    """
    owned = owned_of(live)
    wanted = {k: v for k, v in wanted.items() if k not in ignored}
    fields = fields_of(wanted, schema)
    taken = {
        other: frozenset(
            p for p in theirs & fields
            if p[-1].startswith("f:") and _get(live, schema, p) != _get(wanted, schema, p)
        )
        for other, theirs in owned.items()
        if other != writer
    }  # fmt: skip
    if not force and any(taken.values()):
        raise apply_conflict(
            [
                Cause("FieldManagerConflict", _conflict_text(other, live["apiVersion"]), dotted(path))
                for other, paths in taken.items()
                for path in sorted(paths)
            ]
        )
    result = merged(copy.deepcopy(live), wanted, schema)
    owned = {o: f - taken.get(o, frozenset()) for o, f in owned.items()}
    others = frozenset().union(*(f for o, f in owned.items() if o != writer))
    dropped = with_holders(owned.get(writer, frozenset())) - with_holders(others | fields)
    without(result, schema, dropped)
    owned[writer] = fields
    return result, {o: _kept(f, result, schema) for o, f in owned.items()}


def _conflict_text(other: Writer, version: str) -> str:
    text = f'conflict with "{other.manager}"'
    if other.subresource:
        text += f' with subresource "{other.subresource}"'
    return text if other.operation == "Apply" else f"{text} using {version}"
