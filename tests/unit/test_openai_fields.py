"""Every field is honoured or refused by its name, its bound and its value."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from keystage.bundle.api import Pipeline, emulated
from keystage.router.engine import Limits, Refusal
from keystage.router.fields import CHAT, COMPLETION, PLAIN, Field, Verdict
from keystage.router.openai import Call, CallReader, Dialect
from keystage.router.text import ByteText

CONTEXT = 64
LIMITS = Limits(looping=True, context_length=CONTEXT, vocab_size=256, max_body_bytes=1 << 20)
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
PIPELINE = msgspec.structs.replace(
    emulated("tiny", 2, execution="looping"), eos=[7], chat_template=TEMPLATE, context_length=CONTEXT
)
BASE: dict[Dialect, dict[str, Any]] = {
    Dialect.PLAIN: {"prompt": "hello"},
    Dialect.COMPLETION: {"model": "tiny", "prompt": "hello"},
    Dialect.CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
}


def read(dialect: Dialect, body: object, pipeline: Pipeline = PIPELINE) -> Call:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(CallReader(pipeline, LIMITS, ByteText()).read(dialect, raw, None))


def refusal(dialect: Dialect, body: object, pipeline: Pipeline = PIPELINE) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(dialect, body, pipeline)
    return caught.value


@pytest.mark.parametrize("dialect", Dialect)
def test_defaults(dialect: Dialect) -> None:
    call = read(dialect, BASE[dialect])
    prompt = len(call.generation.prompt)
    assert call.generation.max_tokens == (CONTEXT - prompt if dialect is Dialect.CHAT else 16)
    assert call.generation.temperature == (0.0 if dialect is Dialect.PLAIN else 1.0)
    assert (call.generation.top_p, tuple(call.generation.eos)) == (1.0, (7,))
    assert not call.stream
    assert call.stops == ()


@pytest.mark.parametrize("dialect", Dialect)
def test_honoured_values_reach_the_engine(dialect: Dialect) -> None:
    body = BASE[dialect] | {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.25,
        "seed": -1,
        "stop": ["a", "b"],
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    call = read(dialect, body)
    made = call.generation
    assert (made.max_tokens, made.temperature, made.top_p, made.seed) == (5, 0.5, 0.25, 2**64 - 1)
    assert (call.stops, call.stream, call.token_ids, tuple(made.eos)) == (("a", "b"), True, True, ())


def test_absent_seed_is_drawn_anew() -> None:
    assert len({read(Dialect.PLAIN, BASE[Dialect.PLAIN]).generation.seed for _ in range(8)}) == 8


def test_null_means_absent() -> None:
    body = BASE[Dialect.COMPLETION] | dict.fromkeys(COMPLETION.keys() - {"prompt"}, None)
    assert read(Dialect.COMPLETION, body).generation.max_tokens == 16


BAD = [
    ("max_tokens", 0, "invalid_value"),
    ("max_tokens", -3, "invalid_value"),
    ("max_tokens", 10**9, "context_length_exceeded"),
    ("max_tokens", 2**70, "invalid_value"),
    ("max_tokens", 1.5, "invalid_type"),
    ("max_tokens", "5", "invalid_type"),
    ("max_tokens", True, "invalid_type"),
    ("temperature", -0.1, "invalid_value"),
    ("temperature", 2.1, "invalid_value"),
    ("temperature", "hot", "invalid_type"),
    ("top_p", 0, "invalid_value"),
    ("top_p", 1.01, "invalid_value"),
    ("top_p", False, "invalid_type"),
    ("seed", 2**64, "invalid_value"),
    ("seed", -(2**63) - 1, "invalid_value"),
    ("seed", 1.5, "invalid_type"),
    ("seed", 1e300, "invalid_value"),
    ("seed", [[[[[1]]]]], "invalid_type"),
    ("stop", 5, "invalid_type"),
    ("stop", ["a", 5], "invalid_type"),
    ("stop", "", "invalid_value"),
    ("stop", list("abcde"), "invalid_value"),
    ("stop", "x" * 257, "invalid_value"),
    ("stream", 1, "invalid_type"),
    ("stream", "true", "invalid_type"),
    ("model", 5, "invalid_type"),
    ("model", "other", "model_not_found"),
    ("nonsense", 1, "unknown_parameter"),
    ("nonsense", None, "unknown_parameter"),
]


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(("name", "value", "code"), BAD)
def test_bad_values_are_refused_by_name(dialect: Dialect, name: str, value: object, code: str) -> None:
    refused = refusal(dialect, BASE[dialect] | {name: value})
    assert (refused.code, refused.param) == (code, name)
    assert refused.status == (404 if code == "model_not_found" else 400)
    assert name in str(refused)


OPENAI_BAD = [
    ("n", 2),
    ("n", True),
    ("frequency_penalty", 0.1),
    ("presence_penalty", -1),
    ("logit_bias", {"5": 1}),
    ("logprobs", True),
]


@pytest.mark.parametrize("dialect", [Dialect.COMPLETION, Dialect.CHAT])
@pytest.mark.parametrize(("name", "value"), OPENAI_BAD)
def test_what_is_not_served_is_refused(dialect: Dialect, name: str, value: object) -> None:
    refused = refusal(dialect, BASE[dialect] | {name: value})
    assert (refused.code, refused.param) == ("unsupported_value", name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("top_logprobs", 3),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "low"),
        ("audio", {}),
        ("store", True),
        ("service_tier", "priority"),
    ],
)
def test_chat_fields_that_are_not_served(name: str, value: object) -> None:
    refused = refusal(Dialect.CHAT, BASE[Dialect.CHAT] | {name: value})
    assert refused.code in ("unsupported_value", "unsupported_parameter")
    assert refused.param == name


@pytest.mark.parametrize(("dialect", "table"), [(Dialect.COMPLETION, COMPLETION), (Dialect.CHAT, CHAT)])
def test_each_neutral_value_is_accepted_and_no_other(dialect: Dialect, table: dict[str, Field]) -> None:
    neutral = {name: field for name, field in table.items() if field.verdict is Verdict.NEUTRAL}
    for name, field in neutral.items():
        for value in json.loads(f"[{field.note}]"):
            read(dialect, BASE[dialect] | {name: value})
        refused = refusal(dialect, BASE[dialect] | {name: "something else"})
        assert (refused.code, refused.param) == ("unsupported_value", name)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (["a", "b"], "unsupported_value"),
        ([[1], [2]], "unsupported_value"),
        ([1, "a"], "invalid_type"),
        ([True], "invalid_type"),
        ([256], "invalid_value"),
        ([-1], "invalid_value"),
        (5, "invalid_type"),
        ("", "invalid_value"),
        ([], "invalid_value"),
        ("x" * CONTEXT, "context_length_exceeded"),
        ("x" * (CONTEXT + 100), "context_length_exceeded"),
        (None, "missing_parameter"),
    ],
)
@pytest.mark.parametrize("dialect", [Dialect.PLAIN, Dialect.COMPLETION])
def test_bad_prompts(dialect: Dialect, value: object, code: str) -> None:
    refused = refusal(dialect, {"prompt": value})
    assert (refused.code, refused.param) == (code, "prompt")


@pytest.mark.parametrize("value", ["hi", [104, 105], ["hi"], [[104, 105]]])
def test_forms_of_a_prompt(value: object) -> None:
    assert list(read(Dialect.COMPLETION, {"prompt": value}).generation.prompt) == [104, 105]


def test_token_to_begin_with() -> None:
    pipeline = msgspec.structs.replace(PIPELINE, bos=1)
    assert list(read(Dialect.PLAIN, {"prompt": ""}, pipeline).generation.prompt) == [1]
    assert list(read(Dialect.PLAIN, {"prompt": "a"}, pipeline).generation.prompt) == [1, 97]
    assert list(read(Dialect.PLAIN, {"prompt": [97]}, pipeline).generation.prompt) == [97]


def test_context_refusal_names_prompt_request_and_bound() -> None:
    assert read(Dialect.COMPLETION, {"prompt": "x" * 60, "max_tokens": 4}).generation.max_tokens == 4
    refused = refusal(Dialect.COMPLETION, {"prompt": "x" * 60, "max_tokens": 5})
    assert refused.param == "max_tokens"
    assert all(word in str(refused) for word in ("60", "5", "65", "64"))


def test_default_length_fits_itself_to_the_context() -> None:
    assert read(Dialect.COMPLETION, {"prompt": "x" * 60}).generation.max_tokens == 4


def test_two_names_of_one_bound_must_agree() -> None:
    base = BASE[Dialect.CHAT]
    assert read(Dialect.CHAT, base | {"max_tokens": 3, "max_completion_tokens": 3}).generation.max_tokens == 3
    refused = refusal(Dialect.CHAT, base | {"max_tokens": 3, "max_completion_tokens": 4})
    assert refused.param == "max_completion_tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt":1e999}',
        b"[" * 100000,
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\xff"}',
    ],
)
def test_malformed_bodies(body: bytes) -> None:
    refused = refusal(Dialect.PLAIN, body)
    assert (refused.status, refused.code) == (400, "malformed_body")


def test_stream_options() -> None:
    base = BASE[Dialect.CHAT] | {"stream": True}
    assert read(Dialect.CHAT, base | {"stream_options": {"include_usage": True}}).include_usage
    assert not read(Dialect.CHAT, base | {"stream_options": {"include_usage": False}}).include_usage
    assert not read(Dialect.CHAT, base | {"stream_options": {}}).include_usage
    bad = refusal(Dialect.CHAT, base | {"stream_options": {"colour": 1}})
    assert bad.param == "stream_options.colour"
    alone = refusal(Dialect.CHAT, BASE[Dialect.CHAT] | {"stream_options": {"include_usage": True}})
    assert alone.param == "stream_options"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "tool", "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "hi", "name": "bob"}], "messages[0].name"),
        (
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [1]}],
            "messages[1].tool_calls",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "x": 5}]}], "messages[0].content[0].x"),
    ],
)
def test_bad_messages_are_refused_by_path(messages: object, param: str) -> None:
    assert refusal(Dialect.CHAT, {"messages": messages}).param == param


def test_messages_become_the_templates_prompt() -> None:
    messages = [
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None},
    ]
    made = read(Dialect.CHAT, {"messages": messages}).generation
    assert bytes(made.prompt) == b"s:brief;u:ab;a:c;"


def test_pipeline_without_template_has_no_chat() -> None:
    bare = msgspec.structs.replace(PIPELINE, chat_template="")
    assert "no chat template" in str(refusal(Dialect.CHAT, BASE[Dialect.CHAT], bare))


def test_long_texts_are_tokenised_too() -> None:
    assert refusal(Dialect.PLAIN, {"prompt": "x" * 50_000}).code == "context_length_exceeded"


def test_plain_call_knows_only_its_own_fields() -> None:
    assert refusal(Dialect.PLAIN, {"prompt": "a", "n": 1}).code == "unknown_parameter"
    assert set(PLAIN) < set(COMPLETION) | set(CHAT)
