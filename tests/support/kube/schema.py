"""Schemas of Kubernetes objects: unknown fields are dropped, defaults filled in, faults found. Pure.

One shape for both sorts: the structural schema of a custom resource, and the published JSON schema of a
built-in kind (where `$ref` names a shared definition, and empty values are not written).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from support.kube.answers import Cause
from support.kube.quantities import canonical

Schema = dict[str, Any]
Definitions = Mapping[str, Schema]

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"


class Typed:
    """A schema with the definitions that it may point at.

    Args:
        schema: its own part.
        definitions: by name, for `$ref`.
        is_builtin: empty values are dropped, and null counts as absent.
    """

    __slots__ = ("definitions", "is_builtin", "is_quantity", "schema")

    def __init__(self, schema: Schema, definitions: Definitions, *, is_builtin: bool) -> None:
        self.is_quantity = False
        while "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            self.is_quantity = name == QUANTITY
            schema = definitions[name]
        self.schema = schema
        self.definitions = definitions
        self.is_builtin = is_builtin

    def _of(self, schema: Schema) -> Typed:
        return Typed(schema, self.definitions, is_builtin=self.is_builtin)

    @property
    def is_open(self) -> bool:
        """Its fields are not known and are all kept."""
        if self.schema.get("x-kubernetes-preserve-unknown-fields"):
            return True
        known = {"properties", "additionalProperties", "items"} & self.schema.keys()
        return self.is_builtin and not known

    @property
    def types(self) -> tuple[str, ...]:
        """Names of the types that a value may have; none: any."""
        kind = self.schema.get("type")
        if kind is None:
            return ()
        return (kind,) if isinstance(kind, str) else tuple(kind)

    @property
    def is_nullable(self) -> bool:
        """Null may stand there."""
        return bool(self.schema.get("nullable")) or "null" in self.types

    @property
    def is_map(self) -> bool:
        """Keys are free, values are of one shape."""
        return isinstance(self.schema.get("additionalProperties"), dict)

    @property
    def is_atomic(self) -> bool:
        """Has one owner as a whole (server-side apply)."""
        if "array" in self.types:
            return bool(self.schema.get("x-kubernetes-list-type", "atomic") == "atomic")
        return bool(self.schema.get("x-kubernetes-map-type") == "atomic")

    @property
    def list_keys(self) -> tuple[str, ...]:
        """Of a list whose items are found by keys."""
        return tuple(self.schema.get("x-kubernetes-list-map-keys", ()))

    @property
    def is_set(self) -> bool:
        """A list of distinct scalars."""
        return bool(self.schema.get("x-kubernetes-list-type") == "set")

    @property
    def merge_key(self) -> str:
        """Key of a strategic merge patch, empty: the list is replaced."""
        strategy = self.schema.get("x-kubernetes-patch-strategy", "")
        return self.schema.get("x-kubernetes-patch-merge-key", "") if "merge" in strategy.split(",") else ""

    @property
    def is_merged_list(self) -> bool:
        """A strategic merge patch adds to it."""
        return "merge" in self.schema.get("x-kubernetes-patch-strategy", "").split(",")

    def field(self, name: str) -> Typed | None:
        """Schema of a field or of a map's value; None: not known."""
        found = self.schema.get("properties", {}).get(name)
        if found is not None:
            return self._of(found)
        if self.is_map:
            return self._of(self.schema["additionalProperties"])
        return None

    def items(self) -> Typed | None:
        """Schema of a list's items."""
        found = self.schema.get("items")
        return None if found is None else self._of(found)

    def prune(self, value: Any) -> Any:
        """A copy without unknown fields; for built-in kinds also without empty ones."""
        if isinstance(value, list) and (items := self.items()) is not None:
            return [items.prune(item) for item in value]
        if not isinstance(value, dict) or self.is_open:
            if self.is_quantity and isinstance(value, str | int | float):
                try:
                    return canonical(value)
                except ValueError:
                    return value
            return copy.deepcopy(value)
        kept: dict[str, Any] = {}
        required = self.schema.get("required", ())
        for name, inner in value.items():
            schema = self.field(name)
            if schema is None:
                continue
            if schema.is_builtin and inner is None:
                continue
            pruned = schema.prune(inner)
            if schema.is_builtin and not self.is_map and name not in required and schema.is_empty(pruned):
                continue
            kept[name] = pruned
        return kept

    def is_empty(self, value: Any) -> bool:
        """Would not be written by the server (`omitempty`)."""
        return value in ("", []) or (value == {} and self.is_map)

    def fill(self, value: Any) -> Any:
        """Puts defaults in, in place; a null where none may be gives way to a default."""
        if isinstance(value, list) and (items := self.items()) is not None:
            for item in value:
                items.fill(item)
        if not isinstance(value, dict):
            return value
        for name in self.schema.get("properties", {}):
            schema = self.field(name)
            assert schema is not None
            default = schema.schema.get("default")
            if default is not None and (
                name not in value or (value[name] is None and not schema.is_nullable)
            ):
                value[name] = copy.deepcopy(default)
        for name, inner in value.items():
            known = self.field(name)
            if known is not None:
                known.fill(inner)
        return value

    def faults(self, value: Any, path: str = "") -> list[Cause]:
        """What breaks the rules."""
        if value is None:
            if self.is_nullable or not self.types:
                return []
            return [_wrong_type(path, self.types, "null")]
        if "oneOf" in self.schema:
            return []
        types = [t for t in self.types if t != "null"]
        if types and not any(_is_of(value, t) for t in types):
            return [_wrong_type(path, types, value)]
        found = [*_bound_faults(self.schema, value, path)]
        if isinstance(value, dict):
            found += self._field_faults(value, path)
        if isinstance(value, list) and (items := self.items()) is not None:
            for index, item in enumerate(value):
                found += items.faults(item, f"{path}[{index}]")
            if self.is_set and len({str(v) for v in value}) < len(value):
                found.append(Cause("FieldValueDuplicate", "Duplicate value", path))
        return found

    def _field_faults(self, value: Mapping[str, Any], path: str) -> list[Cause]:
        found = [
            Cause("FieldValueRequired", "Required value", f"{path}.{name}".lstrip("."))
            for name in self.schema.get("required", ())
            if value.get(name) is None
        ]
        for name, inner in value.items():
            schema = self.field(name)
            if schema is not None and not (inner is None and name in self.schema.get("required", ())):
                found += schema.faults(inner, f"{path}.{name}".lstrip("."))
        return found


def _is_of(value: Any, kind: str) -> bool:
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _name_of_type(value: Any) -> str:
    for name, types in _TYPES.items():
        if isinstance(value, types) and not (name == "integer" and isinstance(value, bool)):
            return name
    return "null"


def _wrong_type(path: str, types: list[str] | tuple[str, ...], value: Any) -> Cause:
    got = "null" if value == "null" else _name_of_type(value)
    text = f'Invalid value: "{got}": {path} in body must be of type {types[0]}: "{got}"'
    return Cause("FieldValueTypeInvalid", text, path)


def _bound_faults(schema: Schema, value: Any, path: str) -> list[Cause]:
    rules: list[tuple[bool, str]] = []
    if isinstance(value, str):
        rules = [
            ("maxLength" in schema and len(value) > schema.get("maxLength", 0), "may not be longer"),
            (
                len(value) < schema.get("minLength", 0),
                f"should be at least {schema.get('minLength')} chars long",
            ),
            (
                "pattern" in schema and re.search(schema["pattern"], value) is None,
                f"should match '{schema.get('pattern')}'",
            ),
        ]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum"), schema.get("maximum")
        rules = [
            (low is not None and value < low, f"should be greater than or equal to {low}"),
            (high is not None and value > high, f"should be less than or equal to {high}"),
            (schema.get("format") == "int32" and abs(value) > 2**31 - 1, "must be of type int32"),
        ]
    elif isinstance(value, list):
        most = schema.get("maxItems")
        rules = [(most is not None and len(value) > most, f"must have at most {most} items")]
    elif isinstance(value, dict):
        most = schema.get("maxProperties")
        rules = [(most is not None and len(value) > most, f"must have at most {most} properties")]
    found = [
        Cause("FieldValueInvalid", f"Invalid value: {_told(value)}: {path} in body {text}", path)
        for is_broken, text in rules
        if is_broken
    ]
    if "enum" in schema and value not in schema["enum"]:
        supported = ", ".join(f'"{v}"' for v in schema["enum"])
        text = f"Unsupported value: {_told(value)}: supported values: {supported}"
        found.append(Cause("FieldValueNotSupported", text, path))
    return found


def _told(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
