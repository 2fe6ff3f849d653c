"""JSON Schemas in words, for docs/api-reference.md: a type in a cell, an object as rows of a table. Pure.

It knows what the documents of gateway and router use, and says `any` for the rest; a test looks that no
schema of theirs ends as `any` that is not one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
_BOUNDS = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "above {}"),
    ("maximum", "at most {}"),
    ("minLength", "length {} or more"),
    ("maxLength", "length {} at most"),
    ("minItems", "{} or more"),
    ("maxItems", "{} at most"),
    ("pattern", "`{}`"),
    ("format", "{}"),
    ("contentEncoding", "in {}"),
    ("contentMediaType", "{}"),
)
_EVENT = "data"


def kind(schema: Schema) -> str:
    """The type of a value, with its bounds, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return _code(schema["const"])
    if "enum" in schema:
        return " or ".join(_code(value) for value in schema["enum"])
    if "anyOf" in schema and "type" not in schema:
        words = [kind(one) for one in schema["anyOf"]]
        return " or ".join(dict.fromkeys(words))
    return " ".join([_plain(schema), *_bounds(schema)])


def is_inline(schema: Schema) -> bool:
    """Whether it is an object, or some, that is described where it stands."""
    return bool(shapes(schema))


def shapes(schema: Schema) -> list[Schema]:
    """Objects with members that a value may be: of events, what their data may be."""
    members = schema.get("properties", {})
    if list(members) == [_EVENT]:
        return [shape for one in members[_EVENT].get("anyOf", ()) for shape in shapes(one)]
    if "contentSchema" in schema:
        return shapes(schema["contentSchema"])
    if members:
        return [] if list(members) == ["error"] else [schema]
    return [shape for one in schema.get("anyOf", ()) for shape in shapes(one)]


def codes(schema: Schema) -> list[str]:
    """Codes of an error object, none where it is no such."""
    error = schema.get("properties", {}).get("error", {})
    found: list[str] = error.get("properties", {}).get("code", {}).get("enum", [])
    return found


def rows(schema: Schema, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(field, type, what) of every member, members of members after it."""
    required = schema.get("required", ())
    for name, member in schema.get("properties", {}).items():
        words = ["required"] if name in required else []
        default = member.get("default")
        words += [f"default {_code(default)}"] if default not in (None, {}, []) else []
        words += [_first(member["description"])] if "description" in member else []
        yield f"`{prefix}{name}`", kind(member), "; ".join(words)
        inner, suffix = _inner(member)
        if inner is not None:
            yield from rows(inner, f"{prefix}{name}{suffix}.")


def _inner(schema: Schema) -> tuple[Schema | None, str]:
    """The object that a member is, or a list of, and how its members' names go on."""
    if schema.get("properties"):
        return schema, ""
    if schema.get("type") == "array":
        inner, suffix = _inner(schema.get("items", {}))
        return inner, f"[]{suffix}"
    for one in schema.get("anyOf", ()):
        inner, suffix = _inner(one)
        if inner is not None:
            return inner, suffix
    return None, ""


def _plain(schema: Schema) -> str:
    name = schema.get("type", "any")
    if isinstance(name, list):
        return " or ".join(name)
    if name == "array":
        items = schema.get("items", {})
        return "list" if "properties" in items or not items else f"list of {kind(items)}"
    if name == "object":
        values = schema.get("additionalProperties")
        return f"object of {kind(values)}" if isinstance(values, dict) and values else "object"
    return str(name)


def _bounds(schema: Schema) -> list[str]:
    found = [words.format(schema[key]) for key, words in _BOUNDS if key in schema and schema[key] != 0]
    found += ["at least 0"] if schema.get("minimum") == 0 else []
    found += ["above 0"] if schema.get("exclusiveMinimum") == 0 else []
    return [f"({', '.join(found)})"] if found else []


def _code(value: object) -> str:
    return f"`{json.dumps(value)}`"


def _first(text: str) -> str:
    return text.strip().split("\n\n")[0].replace("\n", " ")
