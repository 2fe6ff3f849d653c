"""What the router sends, member for member, is what its OpenAPI document says: whole answers and events."""

from __future__ import annotations

import http.client
import json
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from support.face_server import served

from keystage.bundle.api import emulated
from keystage.router.engine import Failure, Limits, Refusal
from keystage.router.face_probe import HashEngine
from keystage.router.openapi import document

LIMITS = Limits(looping=True, context_length=64, vocab_size=256, max_body_bytes=10_000)
PIPELINE = msgspec.structs.replace(
    emulated("tiny", 2, execution="looping", context_length=64), chat_template="{{ messages[0].content }}"
)
PATHS = ["/", "/v1/completions", "/v1/chat/completions"]


def data_schema(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Schemas of an event and of the JSON in its data."""
    doc = document(PIPELINE, LIMITS)
    content = doc["paths"][path]["post"]["responses"]["200"]["content"]
    event = content["text/event-stream"]["schema"]
    (inner,) = [s["contentSchema"] for s in event["properties"]["data"]["anyOf"] if "contentSchema" in s]
    return event, {**inner, "components": doc["components"]}


def call(port: int, method: str, path: str, body: object = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, None if body is None else json.dumps(body).encode())
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fails", [False, True])
def test_every_event_of_a_stream_is_as_documented(path: str, fails: bool) -> None:
    def refuse(position: int) -> Refusal | None:
        return Failure("stage 1 failed") if fails and position == 3 else None

    event, inner = data_schema(path)
    validators = jsonschema_rs.validator_for(event), jsonschema_rs.Draft202012Validator(inner)
    body: dict[str, Any] = {"max_tokens": 6, "stream": True, "return_token_ids": True, "stop": "zzz"}
    body |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    if path != "/":
        body["stream_options"] = {"include_usage": True}
    if path == "/v1/completions":
        body["echo"] = True
    with served(HashEngine(LIMITS, refuse=refuse), PIPELINE) as port:
        _, text = call(port, "POST", path, body)
    events = [part.removeprefix("data: ") for part in text.split("\n\n")[:-1]]
    assert len(events) >= 4
    assert ("[DONE]" in events) is not fails
    for data in events:
        assert validators[0].is_valid({"data": data})
        if data != "[DONE]":
            validators[1].validate(json.loads(data))
    bare = {"text": "x", "choices": [], "surplus": 1}
    assert not validators[1].is_valid(bare)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        *[("POST", path, {"return_token_ids": ids}, 200) for path in PATHS for ids in (True, False)],
        *[("POST", path, {"temperature": 3}, 400) for path in PATHS],
        *[("POST", path, {"model": "other"}, 404) for path in PATHS],
        *[("POST", path, {"stop": ["a" * 200] * 60}, 413) for path in PATHS],
        *[("GET", path, None, 200) for path in ("/v1/models", "/_/health", "/_/ready", "/openapi.json")],
        ("GET", "/v1/models/tiny", None, 200),
        ("GET", "/v1/models/other", None, 404),
    ],
)
def test_every_member_of_an_answer_is_documented(
    method: str, path: str, body: dict[str, Any] | None, status: int
) -> None:
    if body is not None:
        body |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    with served(HashEngine(LIMITS), PIPELINE) as port:
        got, text = call(port, method, path, body)
    assert got == status, text
    doc = document(PIPELINE, LIMITS)
    item = doc["paths"].get(path) or doc["paths"]["/v1/models/{name}"]
    schema = item[method.lower()]["responses"][str(status)]["content"]["application/json"]["schema"]
    jsonschema_rs.Draft202012Validator({**schema, "components": doc["components"]}).validate(json.loads(text))
