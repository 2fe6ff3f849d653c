"""`Idempotency-Key` and `Last-Event-ID` over real HTTP: one answer a key, gone on with where a client was."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.face_server import byte_level_tokenizer, served
from support.keyed_http import LIMITS, PATHS, PIPELINE, Answer, call, error, events, request, texts, until

from keystage.bundle.api import emulated
from keystage.router.engine import Failure, InvalidRequest, Limits, QueueFull, Refusal, TooLate
from keystage.router.face_probe import HashEngine
from keystage.router.idempotency import KeyBounds
from keystage.router.idempotency_runs import KeyedRequests
from keystage.router.text import HfText


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_same_key_gets_the_same_bytes(path: str, stream: bool) -> None:
    engine = HashEngine(LIMITS)
    with served(engine, PIPELINE) as port:
        first = call(port, path, request(path, stream=stream))
        again = call(port, path, request(path, stream=stream))
        other = call(port, path, request(path, stream=stream), "another")
    assert first[0] == again[0] == 200
    if stream:  # events may be joined otherwise; their text, numbers and names are the same
        assert texts(first[2], path) == texts(again[2], path)
        assert events(first[2])[-2:] == events(again[2])[-2:]
    else:
        assert first[2] == again[2]
    assert other[2] != first[2]
    assert engine.begun == 2


def test_the_same_key_for_another_request_is_refused() -> None:
    engine = HashEngine(LIMITS)
    with served(engine, PIPELINE) as port:
        assert call(port, "/", request("/"))[0] == 200
        for path, body, headers in (
            ("/", request("/", max_tokens=13), {}),
            ("/v1/completions", request("/"), {}),
            ("/?top_k=2", request("/"), {}),
            ("/", request("/"), {"Content_Type": "text/plain"}),
        ):
            status, _, answer = call(port, path, body, **headers)
            assert (status, error(answer)["code"]) == (422, "idempotency_key_reused")
            assert error(answer)["param"] == "Idempotency-Key"
        assert call(port, "/", request("/", max_tokens=13), "k2")[0] == 200
    assert engine.begun == 2


@pytest.mark.parametrize("key", ["", "two words", "x" * 256, "é"], ids=["empty", "space", "long", "latin"])
def test_keys_that_are_none(key: str) -> None:
    with served(HashEngine(LIMITS), PIPELINE) as port:
        status, _, answer = call(port, "/", request("/"), key)
        assert (status, error(answer)["param"]) == (400, "Idempotency-Key")
        assert call(port, "/", request("/"), "x" * 255)[0] == 200


@pytest.mark.parametrize("path", PATHS)
def test_events_are_numbered_and_a_stream_goes_on_behind_each_number(path: str) -> None:
    options = {} if path == "/" else {"stream_options": {"include_usage": True}}
    asked = request(path, stream=True, **options)
    with served(HashEngine(LIMITS, together=3), PIPELINE) as port:
        whole = call(port, path, asked)[2]
        seen = ""
        for position in range(13):
            status, headers, rest = call(port, path, asked, Last_Event_ID=str(position))
            assert (status, headers["content-type"][:17]) == (200, "text/event-stream")
            numbered = [number for number, data in events(rest) if data != "[DONE]"]
            assert all(number is not None and number >= position for number in numbered)
            assert numbered == sorted(numbered)
            assert numbered[-1] == 12
            ids: list[int] = []
            for _, data in events(rest):
                if data != "[DONE]" and data.get("choices") != []:
                    part = data if path == "/" else data["choices"][0]
                    ids += (part["delta"] if "chat" in path else part).get("token_ids", [])
            assert len(ids) == 12 - position
            assert texts(whole, path).endswith(texts(rest, path))
            seen = texts(rest, path)
            assert len(seen) == 12 - position  # bytes are characters here
            assert events(rest)[-1] == (None, "[DONE]")
            assert events(rest)[-2] == events(whole)[-2]
    first = events(whole)[0]
    assert first[0] == (0 if "chat" in path else 3)


def test_streams_without_a_key_have_no_numbers() -> None:
    with served(HashEngine(LIMITS), PIPELINE) as port:
        body = call(port, "/v1/completions", request("/", stream=True), None)[2]
        assert all(number is None for number, _ in events(body))
        for key, stream in ((None, True), ("k", False)):
            status, _, answer = call(port, "/", request("/", stream=stream), key, Last_Event_ID="1")
            assert (status, error(answer)["param"]) == (400, "Last-Event-ID")


@pytest.mark.parametrize("position", ["", "-1", "1.5", "x", "12345678901"])
def test_positions_that_are_no_numbers(position: str) -> None:
    with served(HashEngine(LIMITS), PIPELINE) as port:
        assert call(port, "/", request("/", stream=True))[0] == 200
        status, _, answer = call(port, "/", request("/", stream=True), Last_Event_ID=position)
        assert (status, error(answer)["param"]) == (400, "Last-Event-ID")


def test_a_position_beyond_what_was_sent_is_refused() -> None:
    with served(HashEngine(LIMITS), PIPELINE) as port:
        assert call(port, "/", request("/", stream=True))[0] == 200
        status, _, answer = call(port, "/", request("/", stream=True), Last_Event_ID="13")
        assert (status, error(answer)["param"]) == (400, "Last-Event-ID")
        assert "13 is beyond the 12 tokens" in error(answer)["message"]


def test_an_unknown_key_with_a_position() -> None:
    """Made again where that gives the same; refused by name where the seed was drawn."""
    engine = HashEngine(LIMITS)
    asked = request("/", stream=True, seed=9)
    with served(engine, PIPELINE) as port:
        whole = call(port, "/", asked, "first")[2]
        rest = call(port, "/", asked, "second", Last_Event_ID="5")[2]
        assert texts(rest) == texts(whole)[5:]
        status, _, answer = call(port, "/", request("/", stream=True), "third", Last_Event_ID="5")
        assert (status, error(answer)["code"]) == (409, "answer_lost")
        assert call(port, "/", request("/", stream=True), "third")[0] == 200  # the key is free
        greedy = request("/", stream=True, temperature=0)
        assert call(port, "/", greedy, "fourth", Last_Event_ID="5")[0] == 200
        # More than the whole answer has: known when it is made.
        status, _, answer = call(port, "/", asked, "fifth", Last_Event_ID="13")
        assert (status, error(answer)["param"]) == (400, "Last-Event-ID")


TEXT = "héé wörld 𝄞 and ünïcode ÉND of it"


@pytest.mark.parametrize("stops", [None, ["ÉND", "zzz"], ["d ü"]])
@pytest.mark.parametrize("together", [1, 5])
def test_text_goes_on_exactly_across_cut_characters_and_stop_strings(
    stops: list[str] | None, together: int
) -> None:
    tokenizer = byte_level_tokenizer(["plain ascii only"], [])
    text = HfText(tokenizer.to_str().encode())
    ids = text.encode(TEXT)  # every character beyond ASCII is several tokens
    assert len(ids) > len(TEXT)
    pipeline = msgspec.structs.replace(PIPELINE, vocab_size=400)
    engine = HashEngine(LIMITS, together=together, answer=lambda _request: ids)
    asked: dict[str, Any] = {"prompt": [1], "max_tokens": 200, "stream": True} | (
        {"stop": stops} if stops else {}
    )
    with served(engine, pipeline, text) as port:
        whole = call(port, "/", asked)[2]
        expected = TEXT.split(stops[0])[0] if stops else TEXT
        assert texts(whole) == expected
        total = events(whole)[-2][1]["tokens"]
        assert events(whole)[-2][1]["finish_reason"] == ("stop" if stops else "length")
        shown = {0: ""}
        for number, data in events(whole)[:-2]:
            shown[number or 0] = shown[max(shown)] + data["text"]
        for position, before in shown.items():
            rest = call(port, "/", asked, Last_Event_ID=str(position))[2]
            assert before + texts(rest) == expected, position
            assert events(rest)[-2] == events(whole)[-2]
        for position in range(total + 1):
            assert expected.endswith(texts(call(port, "/", asked, Last_Event_ID=str(position))[2]))
        assert engine.begun == 1
        assert engine.closed_early == (1 if stops else 0)


class Held(HashEngine):
    """Tokens come when they are let; sessions that are closed before their end are seen."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.room = threading.Semaphore(0)

    async def generate(self, request: Any) -> Any:
        with self._session():
            for token in self._tokens(request)[len(request.resumed) :]:
                while not self.room.acquire(blocking=False):
                    await asyncio.sleep(0.005)
                yield [token]

    def let(self, tokens: int) -> None:
        self.room.release(tokens)


@contextlib.contextmanager
def streaming(
    port: int, body: dict[str, Any], key: str, position: int | None = None
) -> Iterator[socket.socket]:
    """A client that reads a stream by hand."""
    raw = json.dumps(body).encode()
    head = f"POST / HTTP/1.1\r\nhost: x\r\nidempotency-key: {key}\r\ncontent-length: {len(raw)}\r\n"
    if position is not None:
        head += f"last-event-id: {position}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(head.encode() + b"\r\n" + raw)
        yield client


def received(client: socket.socket, tokens: int) -> bytes:
    """What came up to the event of that number."""
    got = b""
    while b"id: %d\n" % tokens not in got:
        part = client.recv(4096)
        assert part, got
        got += part
    return got


def test_a_client_that_leaves_finds_the_stream_where_it_was() -> None:
    engine = Held()
    asked = request("/", stream=True)
    with served(engine, PIPELINE) as port:
        with streaming(port, asked, "k") as client:
            engine.let(4)
            before = received(client, 4)
        engine.let(8)
        until(lambda: engine.open == 0, "the request went on without its client")
        rest = call(port, "/", asked, Last_Event_ID="4")[2]
        whole = call(port, "/", asked)[2]
    assert b"id: 4\n" in before
    assert len(texts(rest)) == 8
    assert texts(whole).endswith(texts(rest))
    assert (engine.begun, engine.closed_early) == (1, 0)


def test_readers_of_one_key_get_the_whole_answer_each() -> None:
    engine = Held()
    asked = request("/", stream=True)
    with served(engine, PIPELINE) as port:
        answers: list[bytes] = []
        with streaming(port, asked, "k") as first:
            engine.let(3)
            received(first, 3)
            readers = [
                threading.Thread(target=lambda: answers.append(call(port, "/", asked)[2])) for _ in range(3)
            ]
            for reader in readers:
                reader.start()
            engine.let(9)
            for reader in readers:
                reader.join(30)
    assert len({texts(answer) for answer in answers}) == 1
    assert len(texts(answers[0])) == 12
    assert engine.begun == 1


def test_without_a_reader_it_ends_after_the_grace_and_goes_on_when_asked_again() -> None:
    engine = Held()
    keyed = KeyedRequests(KeyBounds(grace_s=0.1))
    asked = request("/", stream=True)
    with served(engine, PIPELINE, keyed=keyed) as port:
        with streaming(port, asked, "k") as client:
            engine.let(5)
            received(client, 5)
        until(lambda: engine.closed_early == 1, "the grace ends the session")
        assert engine.open == 0
        engine.let(7)
        rest = call(port, "/", asked, Last_Event_ID="5")[2]
        whole = call(port, "/", asked)[2]
        assert keyed.counts == {"new": 1, "running": 0, "kept": 1, "resumed": 1, "reused": 0}
    assert len(texts(rest)) == 7
    assert len(texts(whole)) == 12
    assert engine.begun == 2


def test_a_reader_that_comes_back_within_the_grace_keeps_it_running() -> None:
    engine = Held()
    keyed = KeyedRequests(KeyBounds(grace_s=1.0))
    asked = request("/", stream=True)
    with served(engine, PIPELINE, keyed=keyed) as port:
        with streaming(port, asked, "k") as client:
            engine.let(2)
            received(client, 2)
        with streaming(port, asked, "k", 2) as client:
            time.sleep(1.3)  # longer than the grace of the first reader
            engine.let(10)
            assert b"id: 2\n" not in received(client, 12)
    assert (engine.begun, engine.closed_early) == (1, 0)


@pytest.mark.parametrize(
    ("refusal", "status", "again"),
    [
        (QueueFull("queue holds 64 of 64", retry_after_s=1), 429, 200),
        (TooLate("deadline of 2 s passed"), 504, 200),
        (InvalidRequest("no room for so many"), 400, 200),
        (Failure("stage 1 failed: boom"), 500, 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_which_refusals_are_kept(refusal: Refusal, status: int, again: int, stream: bool) -> None:
    refusing = [True]
    engine = HashEngine(LIMITS, refuse=lambda _position: refusal if refusing[0] else None)
    with served(engine, PIPELINE) as port:
        got = call(port, "/", request("/", stream=stream))
        assert (got[0], error(got[2])["code"]) == (status, refusal.code)
        refusing[0] = False
        then = call(port, "/", request("/", stream=stream))
        assert then[0] == again
        if again == 500:
            assert then[2] == got[2]


def test_a_deadline_in_the_middle_is_gone_on_from() -> None:
    """Tokens that a client has never change, even where the first try came to no end."""
    refusing = [True]
    engine = HashEngine(
        LIMITS, refuse=lambda position: TooLate("late") if position == 5 and refusing[0] else None
    )
    asked = request("/", stream=True)
    with served(engine, PIPELINE) as port:
        first = call(port, "/", asked)[2]
        assert events(first)[-1][1]["error"]["code"] == "deadline_exceeded"
        before = "".join(data["text"] for _, data in events(first)[:-1])
        refusing[0] = False
        rest = call(port, "/", asked, Last_Event_ID="5")[2]
        whole = call(port, "/", asked)[2]
    assert len(before) == 5
    assert before + texts(rest) == texts(whole)
    assert engine.begun == 2


def test_answers_in_bytes_are_made_once() -> None:
    limits = Limits(looping=False, context_length=0, vocab_size=256, max_body_bytes=1000)
    engine = HashEngine(limits, delay_s=0.05)
    with served(engine, emulated("pass", 2, execution="single-pass")) as port:
        answers: list[Answer] = []
        clients = [threading.Thread(target=lambda: answers.append(call(port, "/", b"abc"))) for _ in range(4)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(30)
        assert {answer[2] for answer in answers} == {b"cba"}
        assert {answer[1]["content-type"] for answer in answers} == {"application/octet-stream"}
        assert engine.begun == 1
        assert call(port, "/", b"abx")[0] == 422
        assert call(port, "/", b"x" * 1001, "k2")[0] == 413
        assert call(port, "/", b"abc", "k3", Last_Event_ID="1")[0] == 400
        assert call(port, "/", b"abc", X_Keystage_Priority="urgent")[0] == 400
        assert call(port, "/", b"abc", X_Keystage_Priority="high")[0] == 200


def test_an_answer_in_bytes_goes_on_without_its_client_and_ends_after_the_grace() -> None:
    limits = Limits(looping=False, context_length=0, vocab_size=256, max_body_bytes=1000)
    engine = HashEngine(limits, delay_s=60)
    keyed = KeyedRequests(KeyBounds(grace_s=0.1))
    with served(engine, emulated("pass", 2, execution="single-pass"), keyed=keyed) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\nidempotency-key: k\r\ncontent-length: 1\r\n\r\na")
            until(lambda: engine.open == 1, "it runs")
        until(lambda: engine.closed_early == 1, "the grace ends it")


def test_a_full_table_forgets_and_refuses_nothing() -> None:
    engine = HashEngine(LIMITS)
    keyed = KeyedRequests(KeyBounds(entries=2))
    with served(engine, PIPELINE, keyed=keyed) as port:
        first = {key: call(port, "/", request("/"), key)[2] for key in "abc"}
        again = {key: call(port, "/", request("/"), key)[2] for key in "cba"}
        assert len(keyed.table) == 2
    assert again["c"] == first["c"]
    assert again["b"] == first["b"]
    assert again["a"] != first["a"]
