"""The face over real HTTP: uvicorn on port 0, requests by the standard library and raw sockets."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.face_server import served

from keystage.bundle.api import emulated
from keystage.router.engine import Failure, Generation, Limits, QueueFull, Refusal, TooLate
from keystage.router.face_probe import HashEngine, token_at

LIMITS = Limits(looping=True, context_length=256, vocab_size=256, max_body_bytes=20_000)
PIPELINE = emulated("tiny", 2, execution="looping", context_length=256)


def call(
    port: int, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, raw, headers or {})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def events(body: bytes) -> list[Any]:
    """Decoded events; `[DONE]` stays text."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part[6:] if part[6:] == "[DONE]" else json.loads(part[6:]) for part in parts]


def expected(seed: int, count: int) -> list[int]:
    return [token_at(seed, position, 256) for position in range(count)]


@pytest.fixture(scope="module")
def engine() -> HashEngine:
    return HashEngine(LIMITS, delay_s=0.001)


@pytest.fixture(scope="module")
def port(engine: HashEngine) -> Iterator[int]:
    with served(engine, PIPELINE) as port:
        yield port


def test_plain_call(port: int) -> None:
    status, headers, body = call(port, "POST", "/", {"prompt": "hello", "max_tokens": 5, "seed": 9})
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == {
        "text": bytes(expected(9, 5)).decode("latin-1"),
        "tokens": 5,
        "prompt_tokens": 5,
        "finish_reason": "length",
        "seed": 9,
        "model": "tiny",
    }


def test_seed_that_was_drawn_repeats_the_answer(port: int) -> None:
    first = json.loads(call(port, "POST", "/", {"prompt": "a", "temperature": 1})[2])
    again = json.loads(call(port, "POST", "/", {"prompt": "a", "temperature": 1, "seed": first["seed"]})[2])
    assert again == first


@pytest.mark.parametrize("path", ["/", "/v1/completions", "/v1/chat/completions"])
def test_stream_carries_each_token_once(path: str, template_port: int) -> None:
    request: dict[str, Any] = {"max_tokens": 20, "seed": 4, "stream": True, "return_token_ids": True}
    request |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    status, headers, body = call(template_port, "POST", path, request)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    got = events(body)
    assert got[-1] == "[DONE]"
    ids: list[int] = []
    text = ""
    for chunk in got[:-1]:
        part = chunk if path == "/" else chunk["choices"][0]
        part = part["delta"] if "chat" in path else part
        ids += part.get("token_ids", [])
        text += part.get("content", "") if "chat" in path else part["text"]
    assert ids == expected(4, 20)
    assert text == bytes(ids).decode("latin-1")
    assert len(got) >= 20


@pytest.fixture(scope="module")
def template_port() -> Iterator[int]:
    pipeline = msgspec.structs.replace(PIPELINE, chat_template="{{ messages[0].content }}")
    with served(HashEngine(LIMITS), pipeline) as port:
        yield port


def test_tokens_that_come_together_make_one_chunk() -> None:
    with served(HashEngine(LIMITS, together=8), PIPELINE) as port:
        got = events(call(port, "POST", "/", {"prompt": "a", "max_tokens": 16, "stream": True})[2])
    assert [len(chunk["text"]) for chunk in got[:-1]] == [8, 8, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_session_early(stream: bool) -> None:
    engine = HashEngine(LIMITS, answer=lambda _request: list(b"one two END three") + [0] * 100)
    with served(engine, PIPELINE) as port:
        request = {"prompt": "a", "max_tokens": 100, "stop": ["END", "zzz"], "stream": stream}
        body = call(port, "POST", "/", request)[2]
    last = events(body)[-2] if stream else json.loads(body)
    text = "".join(chunk["text"] for chunk in events(body)[:-1]) if stream else last["text"]
    assert (text, last["finish_reason"], last["tokens"]) == ("one two ", "stop", 11)
    assert (engine.open, engine.closed_early) == (0, 1)


def test_end_token() -> None:
    engine = HashEngine(LIMITS, answer=lambda request: [65, 66, *request.eos])
    with served(engine, msgspec.structs.replace(PIPELINE, eos=[3])) as port:
        answer = json.loads(call(port, "POST", "/v1/completions", {"prompt": "a"})[2])
    assert answer["choices"][0] == {"index": 0, "logprobs": None, "finish_reason": "stop", "text": "AB"}
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    assert engine.closed_early == 0


def test_echo_puts_the_prompt_first(port: int) -> None:
    request = {"prompt": "héllo", "echo": True, "max_tokens": 1, "seed": 1}
    whole = json.loads(call(port, "POST", "/v1/completions", request)[2])["choices"][0]["text"]
    chunks = events(call(port, "POST", "/v1/completions", request | {"stream": True})[2])[:-1]
    assert whole == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert whole == "héllo" + chr(token_at(1, 0, 256))


def test_usage_in_a_stream(port: int) -> None:
    request = {"prompt": "abc", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    got = events(call(port, "POST", "/v1/completions", request)[2])
    assert got[-2]["choices"] == []
    assert got[-2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert all(chunk["usage"] is None for chunk in got[:-2])


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (QueueFull("queue holds 64 of 64", retry_after_s=1.2), 429, "rate_limit_error"),
        (TooLate("deadline of 2 s passed"), 504, "timeout_error"),
        (Failure("stage 1 failed: boom"), 500, "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusal_before_the_first_token(refusal: Refusal, status: int, kind: str, stream: bool) -> None:
    with served(HashEngine(LIMITS, refuse=lambda _position: refusal), PIPELINE) as port:
        got, headers, body = call(port, "POST", "/v1/completions", {"prompt": "a", "stream": stream})
    assert got == status
    assert json.loads(body) == {
        "error": {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}
    }
    assert headers.get("retry-after") == {429: "2"}.get(status)


def test_refusal_in_a_stream_is_its_last_event() -> None:
    failure = Failure("stage 1 failed on position 3")
    with served(
        HashEngine(LIMITS, refuse=lambda position: failure if position == 3 else None), PIPELINE
    ) as port:
        status, _, body = call(port, "POST", "/", {"prompt": "a", "stream": True})
    got = events(body)
    assert status == 200
    assert [len(chunk["text"]) for chunk in got[:-1]] == [1, 1, 1]
    assert got[-1]["error"]["code"] == "stage_failed"


def test_engine_that_breaks_is_told_to_the_client() -> None:
    def breaks(position: int) -> None:
        if position == 2:
            raise ZeroDivisionError("a bug")

    with served(HashEngine(LIMITS, refuse=breaks), PIPELINE) as port:
        got = events(call(port, "POST", "/", {"prompt": "a", "stream": True})[2])
        assert got[-1]["error"]["type"] == "server_error"
        assert "a bug" not in json.dumps(got)
        assert call(port, "POST", "/", {"prompt": "a", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("path", [b"/", b"/v1/completions"])
def test_client_that_leaves_closes_the_session(path: bytes, stream: bytes) -> None:
    entered, left = threading.Event(), threading.Event()

    class Watched(HashEngine):
        async def generate(self, request: Any) -> Any:
            entered.set()
            try:
                async for ids in super().generate(request):
                    yield ids
            finally:
                left.set()

    engine = Watched(LIMITS, delay_s=30, answer=lambda _request: [1] * 100)
    with served(engine, PIPELINE) as port:
        body = b'{"prompt":"a","max_tokens":100,"stream":%b}' % stream
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(
                b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path, len(body), body)
            )
            assert entered.wait(20)
            assert not left.is_set()
        assert left.wait(20)  # long before the token that comes after 30 s
        assert call(port, "GET", "/_/health")[0] == 200


def test_client_that_leaves_in_the_middle_of_its_stream() -> None:
    left = threading.Event()

    class Watched(HashEngine):
        async def generate(self, request: Any) -> Any:
            try:
                async for ids in super().generate(request):
                    yield ids
            finally:
                left.set()

    engine = Watched(LIMITS, delay_s=0.01, answer=lambda _request: [65] * 200)
    with (
        served(engine, PIPELINE) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as client,
    ):
        body = b'{"prompt":"a","max_tokens":200,"stream":true}'
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        received = b""
        while received.count(b"data:") < 3:
            received += client.recv(4096)
        client.close()
        assert left.wait(20)
    assert engine.open == 0
    assert b"[DONE]" not in received


def test_single_pass() -> None:
    limits = Limits(looping=False, context_length=0, vocab_size=256, max_body_bytes=1000)
    with served(HashEngine(limits), emulated("pass", 2, execution="single-pass")) as port:
        status, headers, body = call(port, "POST", "/", b"\x00\x01\xff" * 100)
        assert (status, headers["content-type"], body) == (
            200,
            "application/octet-stream",
            b"\xff\x01\x00" * 100,
        )
        assert call(port, "POST", "/", b"x" * 1001)[0] == 413
        status, _, body = call(port, "POST", "/v1/completions", {"prompt": "a"})
        assert (status, "single-pass" in body.decode()) == (400, True)


def test_body_bound(port: int) -> None:
    for headers in ({}, {"transfer-encoding": "chunked"}):
        body = b" " * 20_001 if not headers else b"4e21\r\n" + b" " * 20_001 + b"\r\n0\r\n\r\n"
        status, _, answer = call(port, "POST", "/", body, headers)
        assert status == 413
        assert "20000" in json.loads(answer)["error"]["message"]
    assert call(port, "POST", "/", {"prompt": "a"})[0] == 200


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
def test_bad_deadline_header(port: int, value: str) -> None:
    status, _, body = call(port, "POST", "/", {"prompt": "a"}, {"x-keystage-deadline-s": value})
    assert (status, json.loads(body)["error"]["param"]) == (400, "x-keystage-deadline-s")


def test_deadline_header_reaches_the_engine() -> None:
    seen: list[float | None] = []

    def answer(request: Generation) -> list[int]:
        seen.append(request.deadline_s)
        return [1]

    engine = HashEngine(LIMITS, answer=answer)
    with served(engine, PIPELINE) as port:
        assert call(port, "POST", "/", {"prompt": "a"}, {"X-Keystage-Deadline-S": "2.5"})[0] == 200
        assert call(port, "POST", "/", {"prompt": "a"})[0] == 200
    assert seen == [2.5, None]


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/", 405, "POST"),
        ("PUT", "/v1/completions", 405, "POST"),
        ("POST", "/v1/models", 405, "GET, HEAD"),
        ("DELETE", "/v1/models/tiny", 405, "GET, HEAD"),
        ("POST", "/_/health", 405, "GET, HEAD"),
        ("GET", "/nowhere", 404, None),
        ("POST", "/v1/images/generations", 404, None),
        ("GET", "/v1/models/other", 404, None),
    ],
)
def test_wrong_paths_and_methods(port: int, method: str, path: str, status: int, allow: str | None) -> None:
    got, headers, body = call(port, method, path)
    assert (got, headers.get("allow")) == (status, allow)
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_models(port: int) -> None:
    listed = json.loads(call(port, "GET", "/v1/models")[2])
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert json.loads(call(port, "GET", "/v1/models/tiny")[2]) == listed["data"][0]
    assert listed["data"][0]["max_model_len"] == 256


def test_health_ready_stats_and_metrics() -> None:
    state = {"well": True}
    with served(HashEngine(LIMITS), PIPELINE, well=lambda: state["well"]) as port:
        assert call(port, "GET", "/_/health")[0] == 200
        assert call(port, "GET", "/_/ready")[0] == 200
        state["well"] = False
        assert call(port, "GET", "/_/health")[0] == 503
        assert call(port, "GET", "/_/ready")[0] == 503
        assert call(port, "HEAD", "/_/ready")[::2] == (503, b"")
        assert call(port, "GET", "/_/stats")[2] == b'{"pipeline":"tiny"}'
        status, headers, body = call(port, "GET", "/metrics")
        assert (status, headers["content-type"][:10]) == (200, "text/plain")
        assert b"# TYPE python_info gauge" in body


def test_connection_serves_again_after_a_refusal(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for body, status in (
        (b"{", 400),
        (b'{"prompt":"a"}', 200),
        (b'{"prompt":5}', 400),
        (b'{"prompt":"a"}', 200),
    ):
        connection.request("POST", "/", body)
        answer = connection.getresponse()
        assert answer.status == status
        answer.read()
    connection.close()
