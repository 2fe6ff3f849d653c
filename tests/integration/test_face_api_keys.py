"""API keys over HTTP: who is let in, as whom, how urgently, and what needs no key."""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.face_server import served

from keystage.bundle.api import emulated
from keystage.router.api_keys import ApiKeys
from keystage.router.engine import Generation, Limits
from keystage.router.face_probe import HashEngine

KEY, SMALL = "ks-a-key-of-some-length", "ks-another"
LIMITS = Limits(looping=True, context_length=256, vocab_size=256, max_body_bytes=20_000)
PIPELINE = emulated("tiny", 2, execution="looping", context_length=256)


class Noted(HashEngine):
    """Notes who asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        super().__init__(LIMITS, answer=self._note)

    def _note(self, request: Generation) -> list[int]:
        self.seen.append((request.tenant, request.priority))
        return [65] * request.max_tokens


@pytest.fixture
def engine() -> Noted:
    return Noted()


@pytest.fixture
def port(engine: Noted, tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "keys"
    lines = [
        f"big {hashlib.sha256(KEY.encode()).hexdigest()} weight=4 priority=high",
        f"small {hashlib.sha256(SMALL.encode()).hexdigest()} priority=low",
    ]
    path.write_text("\n".join(lines))
    keys = ApiKeys(path)
    keys.load()
    with served(engine, PIPELINE, keys=keys) as port:
        yield port


def ask(port: int, path: str = "/", **headers: str) -> tuple[int, dict[str, str], Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", path, body, named)
        answer = connection.getresponse()
        raw = answer.read()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, json.loads(raw)
    finally:
        connection.close()


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
    ],
)
def test_without_a_known_key_nothing_is_served(port: int, engine: Noted, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    for path in ("/", "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/nowhere"):
        status, found, body = ask(port, path, **headers)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert found["www-authenticate"] == 'Bearer realm="keystage"'
        assert KEY not in json.dumps(body)
    assert engine.seen == []


def test_the_openai_client_raises_its_error_and_is_let_in_with_the_key(port: int, engine: Noted) -> None:
    url = f"http://127.0.0.1:{port}/v1"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list().data] == ["tiny"]
    client.completions.create(model="tiny", prompt="a", max_tokens=2)
    assert engine.seen == [("big", 0)]


def test_a_request_has_its_tenant_and_priority(port: int, engine: Noted) -> None:
    for wanted in ("low", "Normal", "high"):
        assert ask(port, Authorization=f"Bearer {KEY}", X_Keystage_Priority=wanted)[0] == 200
    assert ask(port, Authorization=f"bearer {SMALL}")[0] == 200
    assert engine.seen == [("big", -1), ("big", 0), ("big", 1), ("small", -1)]


def test_a_priority_beyond_the_key_s_is_refused_by_name(port: int) -> None:
    status, _, body = ask(port, Authorization=f"Bearer {SMALL}", X_Keystage_Priority="normal")
    assert (status, body["error"]["code"]) == (403, "priority_not_allowed")
    assert body["error"]["message"] == "tenant small asks for priority normal; its key allows low at most"
    status, _, body = ask(port, Authorization=f"Bearer {KEY}", X_Keystage_Priority="urgent")
    assert status == 400
    assert "must be low, normal or high, not b'urgent'" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/_/health", "/_/ready", "/_/stats", "/metrics", "/openapi.json"])
def test_what_the_platform_asks_needs_no_key_and_tells_none(port: int, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 200
    for secret in (KEY.encode(), SMALL.encode(), hashlib.sha256(KEY.encode()).hexdigest().encode()):
        assert secret not in body


def test_without_keys_a_request_may_say_how_urgent_it_is(engine: Noted) -> None:
    with served(engine, PIPELINE) as port:
        assert ask(port, X_Keystage_Priority="high", Authorization="Bearer whatever")[0] == 200
        assert ask(port)[0] == 200
        assert ask(port, X_Keystage_Priority="x")[0] == 400
    assert engine.seen == [("", 1), ("", 0)]
