"""The chaos suite's client against a server that breaks connections, sends it away, and lies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from chaos.checker import Answer, judge
from chaos.client import Client
from chaos.requests import Case, Request

TOKENS = (5, 9, 9, 4, 7, 8)
CASE = Case((3, 4), len(TOKENS), 0.0, 1.0, 0, TOKENS)
Handler = Callable[[web.Request, int], Awaitable[web.StreamResponse]]


def event(have: int, count: int = 1, *, is_last: bool = False) -> bytes:
    """The event after which a client has `have` tokens, the newest `count` of them in it."""
    choice = {"token_ids": TOKENS[have - count : have], "finish_reason": "length" if is_last else None}
    return f"id: {have}\ndata: {json.dumps({'choices': [choice]})}\n\n".encode()


async def stream(request: web.Request, *events: bytes, breaks: bool = False) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for data in events:
        await response.write(data)
    if breaks:
        assert request.transport is not None
        await asyncio.sleep(0.05)  # what was written arrives
        request.transport.abort()
    else:
        await response.write(b"data: [DONE]\n\n")
    return response


def rest(have: int) -> list[bytes]:
    return [event(n, is_last=n == len(TOKENS)) for n in range(have + 1, len(TOKENS) + 1)]


def ask(
    handler: Handler, *, is_streamed: bool = True, beyond_s: float = 20.0
) -> tuple[Request, Answer, list[str]]:
    """Asks a server once; also what it was told by `Last-Event-ID`, try by try."""
    told: list[str] = []
    keys: set[str] = set()

    async def handle(request: web.Request) -> web.StreamResponse:
        keys.add(request.headers["Idempotency-Key"])
        told.append(request.headers.get("Last-Event-ID", ""))
        return await handler(request, len(told))

    async def run() -> Answer:
        app = web.Application()
        app.router.add_post("/f/v1/completions", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        answer = Answer(time.time())
        async with aiohttp.ClientSession() as session:
            await Client(session, f"http://127.0.0.1:{port}/f", "m", beyond_s).ask(asked, answer)
        await runner.cleanup()
        return answer

    asked = Request(0, "key-0", CASE, is_streamed, 0.5)
    answer = asyncio.run(run())
    assert keys == {"key-0"}
    return asked, answer, told


def test_a_stream_that_breaks_is_gone_on_with_behind_its_position() -> None:
    async def handler(request: web.Request, number: int) -> web.StreamResponse:
        if number == 1:
            return await stream(request, event(1), event(3, 2), breaks=True)
        if number == 2:
            return await stream(request, event(4), breaks=True)
        return await stream(request, *rest(4))

    asked, answer, told = ask(handler)
    assert told == ["", "3", "4"]
    assert (answer.resumed, len(answer.breaks_s)) == (2, 2)
    assert judge(asked, answer).verdict in ("right", "late")
    assert answer.tokens == list(TOKENS)


@pytest.mark.parametrize(
    ("resumed_at", "verdict"), [(2, "duplicated"), (0, "duplicated"), (4, "wrong")], ids=["one", "all", "gap"]
)
def test_a_server_that_resumes_elsewhere_is_found_out(resumed_at: int, verdict: str) -> None:
    async def handler(request: web.Request, number: int) -> web.StreamResponse:
        if number == 1:
            return await stream(request, event(1), event(3, 2), breaks=True)
        return await stream(request, *rest(resumed_at))

    asked, answer, _ = ask(handler)
    assert judge(asked, answer).verdict == verdict


def test_a_stream_that_ends_early_is_no_answer() -> None:
    async def handler(request: web.Request, number: int) -> web.StreamResponse:
        if number == 1:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(event(2, 2))
            return response  # a clean end, but for what is missing
        return await stream(request, *rest(2))

    _, answer, told = ask(handler)
    assert told == ["", "2"]
    assert answer.tokens == list(TOKENS)


def test_it_comes_back_when_it_was_told_to() -> None:
    async def handler(request: web.Request, number: int) -> web.StreamResponse:
        if number == 1:
            return web.Response(status=503, headers={"Retry-After": "1"}, text="none is ready")
        if number == 2:
            return web.Response(status=504, text="the replica was silent")
        choice = {"token_ids": TOKENS, "finish_reason": "length"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": len(TOKENS)}})

    _, answer, told = ask(handler, is_streamed=False)
    assert told == ["", "", ""]
    assert answer.tokens == list(TOKENS)
    assert answer.breaks_s[1] - answer.breaks_s[0] >= 1.0


@pytest.mark.parametrize(
    ("code", "verdict"), [("deadline_exceeded", "refused"), ("stage_failed", "lost"), ("", "lost")]
)
def test_a_refusal_is_final_and_allowed_for_a_deadline_alone(code: str, verdict: str) -> None:
    async def handler(_: web.Request, __: int) -> web.StreamResponse:
        status = 504 if code == "deadline_exceeded" else 500
        return web.json_response({"error": {"code": code, "message": "no"}}, status=status)

    asked, answer, told = ask(handler)
    assert len(told) == 1
    assert judge(asked, answer).verdict == verdict


@pytest.mark.parametrize(
    ("codes", "verdict"),
    [
        (["deadline_unreachable"], "refused"),
        (["queue_full"], "lost"),
        (["queue_full", "deadline_unreachable"], "lost"),
        (["deadline_unreachable", "breaks", "deadline_unreachable"], "lost"),
        (["deadline_unreachable", "hangs"], "lost"),
    ],
)
def test_who_was_refused_at_every_try_for_a_deadline_out_of_reach_was_not_lost(
    codes: list[str], verdict: str
) -> None:
    async def handler(request: web.Request, number: int) -> web.StreamResponse:
        code = codes[min(number, len(codes)) - 1]
        if code == "breaks":
            return await stream(request, breaks=True)
        if code == "hangs":
            await asyncio.Event().wait()
        return web.json_response({"error": {"code": code, "message": "no"}}, status=429)

    asked, answer, told = ask(handler, beyond_s=0.5)
    assert len(told) >= len(codes)
    assert judge(asked, answer).verdict == verdict


def test_silence_is_given_up_at_its_bound_and_lost() -> None:
    async def handler(request: web.Request, _: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event(2, 2))
        await asyncio.Event().wait()
        return response

    asked, answer, _ = ask(handler, beyond_s=0.5)
    found = judge(asked, answer)
    assert (found.verdict, found.reason) == ("lost", "2 of 6 tokens came, its bound passed")
