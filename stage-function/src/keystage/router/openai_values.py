"""Readers of single request values: the right type within the bounds, or a refusal by name.

`router.fields` builds its tables from these. A reader gets the field's name and the decoded JSON
value (never null) and returns the value to use; its `schema` says the same in JSON Schema, for
`router.openapi`. Pure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from keystage.router.openai_errors import FieldRefused


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """Reads one value.

    Attributes:
        read: takes the field's name and its value, returns the value to use or raises `FieldRefused`.
        schema: the values that it takes, in JSON Schema.
    """

    read: Callable[[str, Any], Any]
    schema: Mapping[str, Any]

    def __call__(self, name: str, value: Any) -> Any:
        """Reads a value.

        Raises:
            FieldRefused: names the field, the bound and the value.
        """
        return self.read(name, value)


def _reads(schema: Mapping[str, Any]) -> Callable[[Callable[[str, Any], Any]], Reader]:
    return lambda read: Reader(read, schema)


TOKEN_IDS = {"type": "array", "items": {"$ref": "#/components/schemas/TokenId"}, "minItems": 1}
_ONE_PROMPT = [{"$ref": "#/components/schemas/PromptText"}, TOKEN_IDS]
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
"""Held-back text is compared with every stop string at every token: they must be short."""
_SHOWN_CHARACTERS = 60
"""A refusal shows the value it refuses, cut to this."""


def shown(value: object) -> str:
    """The value as it may stand in a message: JSON, cut."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def wrong_type(name: str, wanted: str, value: object) -> FieldRefused:
    """Refusal of a value of the wrong type."""
    return FieldRefused("invalid_type", f"{name} must be {wanted}, not {shown(value)}", param=name)


def out_of_range(name: str, wanted: str, value: object) -> FieldRefused:
    """Refusal of a value of the right type outside its bounds."""
    return FieldRefused("invalid_value", f"{name} must be {wanted}, not {shown(value)}", param=name)


@_reads({"type": "string"})
def text(name: str, value: object) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    return value


@_reads({"type": "boolean"})
def flag(name: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise wrong_type(name, "true or false", value)
    return value


def _whole(value: object) -> object:
    """A number without a fraction as an integer: JSON has one kind of numbers, and so has its schema."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def integer(low: int, high: int) -> Reader:
    """Whole numbers in [low, high]."""

    def read(name: str, value: object) -> int:
        value = _whole(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(name, "a whole number", value)
        if not low <= value <= high:
            raise out_of_range(name, f"within [{low}, {high}]", value)
        return value

    return Reader(read, {"type": "integer", "minimum": low, "maximum": high})


def real(low: float, high: float, *, above_low: bool = False) -> Reader:
    """Finite numbers in [low, high], or (low, high] with `above_low`."""
    bounds = f"within {'(' if above_low else '['}{low:g}, {high:g}]"

    def read(name: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong_type(name, "a number", value)
        if not low <= value <= high or (above_low and value == low):  # not-a-number fails the first
            raise out_of_range(name, bounds, value)
        return float(value)

    least = "exclusiveMinimum" if above_low else "minimum"
    return Reader(read, {"type": "number", least: low, "maximum": high})


_WORD = integer(-(2**63), 2**64 - 1)
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}


@_reads(_WORD.schema)
def seed(name: str, value: object) -> int:
    """Any signed or unsigned 64-bit number, as an unsigned one."""
    number: int = _WORD(name, value)
    return number % 2**64


@_reads({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]})
def stops(name: str, value: object) -> tuple[str, ...]:
    """A string or up to four, none empty."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(stop, str) for stop in given):
        raise wrong_type(name, f"a string or a list of up to {MAX_STOPS} strings", value)
    if len(given) > MAX_STOPS:
        raise out_of_range(name, f"at most {MAX_STOPS} strings", value)
    for stop in given:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise FieldRefused(
                "invalid_value",
                f"{name}: a stop string has 1 to {MAX_STOP_CHARACTERS} characters, not {len(stop)}",
                param=name,
            )
    return tuple(given)


@_reads(
    {
        "type": "object",
        "properties": {
            "include_usage": {"type": ["boolean", "null"]},
            "include_obfuscation": {"enum": [False, None]},
        },
        "additionalProperties": False,
    }
)
def stream_options(name: str, value: object) -> bool:
    """`{"include_usage": bool}`; returns whether usage is wanted."""
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    include_usage = False
    for key, inner in value.items():
        path = f"{name}.{key}"
        if key == "include_usage":
            include_usage = inner is not None and flag(path, inner)
        elif key != "include_obfuscation" or (inner is not None and inner is not False):
            raise FieldRefused("unknown_parameter", f"{path} is not supported", param=path)
    return include_usage


@_reads(
    {
        "anyOf": [
            *_ONE_PROMPT,
            {"type": "array", "items": {"anyOf": _ONE_PROMPT}, "minItems": 1, "maxItems": 1},
        ]
    }
)
def prompt(name: str, value: Any) -> str | list[int]:
    """A string or a list of token ids; also a list that holds exactly one of these."""
    if isinstance(value, list) and set(map(type, value)) <= {str, list} and value:
        if len(value) != 1:
            raise FieldRefused(
                "unsupported_value",
                f"{name}: one prompt per request is served, not {len(value)}",
                param=name,
            )
        value = value[0]
    if isinstance(value, str):
        return value
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    ids = list(map(_whole, value)) if float in kinds else value
    if not isinstance(value, list) or not set(map(type, ids)) <= {int}:
        raise wrong_type(name, "a string or a list of token ids", value)
    return cast("list[int]", ids)


MAX_INPUTS = 2048
"""OpenAI's bound of `input`."""
_ONE_TEXT = {"type": "string", "minLength": 1}


@_reads(
    {
        "anyOf": [
            _ONE_TEXT,
            TOKEN_IDS,
            {"type": "array", "items": _ONE_TEXT, "minItems": 1, "maxItems": MAX_INPUTS},
            {"type": "array", "items": TOKEN_IDS, "minItems": 1, "maxItems": MAX_INPUTS},
        ]
    }
)
def inputs(name: str, value: Any) -> list[str | list[int]]:
    """A string, token ids, or a list of strings or of token ids; none empty."""
    if isinstance(value, str):
        value = [value]
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds <= {int, float} and kinds:
        value, kinds = [value], {list}
    if kinds not in ({str}, {list}):
        raise wrong_type(name, "a string, token ids, or a list of strings or of token ids", value)
    if len(value) > MAX_INPUTS:
        raise out_of_range(name, f"at most {MAX_INPUTS} inputs", len(value))
    return [_one_input(name, given) for given in value]


def _one_input(name: str, value: str | list[Any]) -> str | list[int]:
    if not value:
        raise out_of_range(name, "without empty inputs", value)
    if isinstance(value, str):
        return value
    ids = [_whole(token) for token in value]
    if set(map(type, ids)) != {int}:
        raise wrong_type(name, "a string, token ids, or a list of strings or of token ids", value)
    return cast("list[int]", ids)


@_reads(_ONE_TEXT)
def filled_text(name: str, value: object) -> str:
    """A string that is not empty."""
    found: str = text(name, value)
    if not found:
        raise out_of_range(name, "a string that is not empty", value)
    return found


def choice(*accepted: str) -> Reader:
    """One of a few words."""

    def read(name: str, value: object) -> object:
        if value not in accepted or not isinstance(value, str):
            raise FieldRefused(
                "unsupported_value", f"{name} must be {_listed(accepted)}, not {shown(value)}", param=name
            )
        return value

    return Reader(read, {"enum": list(accepted)})


def neutral(*accepted: object) -> Reader:
    """Values that ask for nothing; all others are refused."""

    def read(name: str, value: object) -> None:
        if not any(_is_same(value, other) for other in accepted):
            wanted = _listed(accepted)
            raise FieldRefused(
                "unsupported_value", f"{name} is served only as {wanted}, not {shown(value)}", param=name
            )

    return Reader(read, {"enum": list(accepted)})


@_reads({"type": "null"})
def refused(name: str, value: object) -> None:
    """A field of the API that is not served at all."""
    raise FieldRefused("unsupported_parameter", f"{name} is not supported (given {shown(value)})", param=name)


@_reads({})
def ignored(name: str, value: object) -> None:
    """A field that its documentation lets a server ignore."""


def _listed(values: Sequence[object]) -> str:
    return " or ".join(shown(value) for value in values)


def _is_same(value: object, other: object) -> bool:
    """Equality that keeps 1 and true apart."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
