"""Requests with an `Idempotency-Key` over HTTP, as tests of the face send them, and what answers say."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec

from keystage.bundle.api import emulated
from keystage.router.engine import Limits

LIMITS = Limits(looping=True, context_length=256, vocab_size=256, max_body_bytes=20_000)
PIPELINE = msgspec.structs.replace(
    emulated("tiny", 2, execution="looping", context_length=256), chat_template="{{ messages[0].content }}"
)
PATHS = ["/", "/v1/completions", "/v1/chat/completions"]
Answer = tuple[int, dict[str, str], bytes]


def call(port: int, path: str, body: dict[str, Any] | bytes, key: str | None = "k", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        named["Idempotency-Key"] = key
    try:
        connection.request(
            "POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), named
        )
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def request(path: str, **fields: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    return {"max_tokens": 12, "temperature": 1, "return_token_ids": True} | said | fields


def events(body: bytes) -> list[tuple[int | None, Any]]:
    """Number and data of every event; `[DONE]` stays text."""
    found = []
    for part in body.decode().split("\n\n")[:-1]:
        number = None
        lines = part.split("\n")
        if lines[0].startswith("id: "):
            number = int(lines.pop(0)[4:])
        data = lines[0].removeprefix("data: ")
        found.append((number, data if data == "[DONE]" else json.loads(data)))
    return found


def error(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body)["error"]
    return found


def texts(body: bytes, path: str = "/") -> str:
    """Text of a stream."""
    text = ""
    for _, data in events(body):
        if data == "[DONE]" or data.get("choices") == []:
            continue
        part = data if path == "/" else data["choices"][0]
        text += part["delta"].get("content", "") if "chat" in path else part["text"]
    return text


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)
