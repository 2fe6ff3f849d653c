"""The JSON Schema of a request field takes exactly the values that its reader takes."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.bundle.api import emulated
from keystage.router import fields
from keystage.router.engine import Limits
from keystage.router.fields import read_fields
from keystage.router.openai_chat import read_messages
from keystage.router.openai_errors import FieldRefused
from keystage.router.openapi import request_schema

VOCABULARY = 256
LIMITS = Limits(looping=True, context_length=2**40, vocab_size=VOCABULARY, max_body_bytes=1000)
TABLES = {
    "plain": fields.PLAIN,
    "completion": fields.COMPLETION,
    "chat": fields.CHAT,
    "embeddings": fields.EMBEDDINGS,
    "fill-mask": fields.FILL_MASK,
}
REQUIRED = {"chat": "messages", "embeddings": "input", "fill-mask": "text"}
PIPELINE = emulated("tiny", 1, execution="looping")

EDGES: list[Any] = [
    *(-1, 0, 1, 2, 3, 1.0, 1.5, 0.5, 2.1, 0.0, 1e-300, 1e300, True, False, None),
    *(PIPELINE.hidden_size, PIPELINE.hidden_size + 1, 100, 101),
    *(2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1),
    *("", "a", "x" * 256, "x" * 257, [], {}, [[]], [{}], [0], [None], ["a"] * 4, ["a"] * 5, [""]),
    *(
        [VOCABULARY - 1],
        [VOCABULARY],
        [-1],
        [1.0],
        [1.5],
        [True],
        [1, "a"],
        ["a"],
        ["a", "b"],
        [["a"]],
        [[1]],
    ),
    *({"include_usage": None}, {"include_obfuscation": 0}, {"other": None}),
]
"""Both sides of every bound there is; tried one by one for every field."""
numbers = st.integers(-(2**64), 2**65) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.sampled_from(["", "a", "text", "auto", "none", "medium", "user", "x" * 256, "x" * 257])
scalars = st.none() | st.booleans() | numbers | texts
names = st.sampled_from(["type", "text", "role", "content", "include_usage", "include_obfuscation", "other"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
ids = st.lists(st.integers(-1, VOCABULARY) | st.sampled_from([1.0, 1.5, True]), max_size=3)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url"]), "text": texts | st.none()}, optional={"other": scalars}
)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", None]),
        "content": texts | st.none() | st.lists(parts, max_size=2),
    },
    optional={"name": st.sampled_from([None, [], "a", {}]), "tool_calls": st.sampled_from([None, [], [1]])},
)
likely = {
    "prompt": texts
    | ids
    | st.lists(texts | ids, max_size=2)
    | st.lists(st.lists(ids, max_size=1), max_size=1),
    "input": texts | ids | st.lists(texts, max_size=2) | st.lists(ids, max_size=2),
    "messages": st.lists(messages, max_size=2),
    "stop": st.lists(texts, max_size=5),
    "stream_options": st.dictionaries(names, scalars, max_size=2),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "text", "x": 1}]),
    "modalities": st.sampled_from([["text"], ["audio"], []]),
    "tools": st.sampled_from([[], [{}]]),
    "logit_bias": st.sampled_from([{}, {"1": 2}]),
}


def taken(table: dict[str, fields.Field], name: str, value: Any) -> bool:
    """Whether the router takes a field's value, as far as the field alone decides."""
    try:
        read = read_fields(table, {name: value}).get(name)
        if name == "messages":
            read_messages(read)
    except FieldRefused:
        return False
    if name == "prompt" and isinstance(read, list):  # as the whole request checks it
        return bool(read) and all(0 <= token < VOCABULARY for token in read)
    if name == "input" and read is not None:
        return all(isinstance(item, str) or all(0 <= id_ < VOCABULARY for id_ in item) for item in read)
    if name == "dimensions":  # as the whole request checks it
        return read in (None, PIPELINE.hidden_size)
    return read not in ("", None) if name in (*REQUIRED.values(), "prompt") else True


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, table in TABLES.items() for name in table if name != "model"]
)
def test_schema_and_reader_agree(kind: str, name: str) -> None:
    table = TABLES[kind]
    schema = request_schema(table, REQUIRED.get(kind, "prompt"), LIMITS, PIPELINE)
    components: dict[str, Any] = {"PromptText": {"type": "string", "minLength": 1}}  # it has no first token
    components |= {"TokenId": {"type": "integer", "minimum": 0, "maximum": VOCABULARY - 1}}
    validator = jsonschema_rs.Draft202012Validator(
        {**schema["properties"][name], "components": {"schemas": components}}
    )

    def check(value: Any) -> None:
        value = msgspec.json.decode(msgspec.json.encode(value))  # as it comes over the wire
        assert validator.is_valid(value) is taken(table, name, value), (name, value)

    @settings(max_examples=40, deadline=None, database=None)
    @given(likely[name] | values if name in likely else values)
    def agree(value: Any) -> None:
        check(value)

    for edge in EDGES:
        check(edge)
    agree()
