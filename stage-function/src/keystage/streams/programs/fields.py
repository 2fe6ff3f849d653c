"""Fields of a JSON request, read one by one: what is wrong is refused by name.

The `parse` of the ready programs is made of these. Every refusal is a 400 that names field, bound and value.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import msgspec

from keystage.streams.api import ProgramError
from keystage.wire.unreadable import UNREADABLE


def json_object(body: bytes, content_type: str, known: Collection[str]) -> dict[str, Any]:
    """The request as an object.

    Args:
        body: the request's.
        content_type: `application/json`, or none.
        known: names of its fields.

    Raises:
        ProgramError: another type, no object, or a field of another name.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in ("", "application/json"):
        raise ProgramError(f"content type must be application/json, got {kind}", 415)
    try:
        fields = msgspec.json.decode(body)
    except UNREADABLE as error:
        raise ProgramError(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ProgramError(f"the body must be a JSON object, got {type(fields).__name__}")
    for name in fields:
        if name not in known:
            raise ProgramError(f"field {name!r} is unknown, known are {', '.join(known)}")
    return fields


def text(fields: dict[str, Any], name: str) -> str:
    """A text that must be there.

    Raises:
        ProgramError: missing, or no text.
    """
    value = fields.get(name)
    if not isinstance(value, str):
        raise ProgramError(f"{name} must be a text, got {'nothing' if value is None else repr(value)}")
    return value


def whole(fields: dict[str, Any], name: str, default: int, least: int, most: int) -> int:
    """A whole number.

    Raises:
        ProgramError: no whole number, or out of bounds.
    """
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ProgramError(f"{name} must be a whole number from {least} to {most}, got {value!r}")
    return value


def number(fields: dict[str, Any], name: str, default: float, least: float, most: float) -> float:
    """A number.

    Raises:
        ProgramError: no number, or out of bounds.
    """
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ProgramError(f"{name} must be a number, got {value!r}")
    if not least <= value <= most:
        raise ProgramError(f"{name} must be from {least} to {most}, got {value}")
    return float(value)
