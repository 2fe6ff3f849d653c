"""A client that does not give up: it sends a request again, under its key, until it has all of the answer.

Before it: `requests` drew what is asked. After it: an `Answer`, which `checker` judges. It reconnects when a
connection breaks or the way to the router answers for it (502, 503, 429, a gateway's 504), says by
`Last-Event-ID` what it has of a stream, waits as `Retry-After` says, and stops at its bound. It must not
judge.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import aiohttp

from chaos.checker import Answer
from chaos.requests import Request

BEYOND_S = 60.0
"""After its deadline a request is waited for so long, then it is lost."""
SILENCE_S = 45.0
"""A connection without a byte for so long is given up: a lost token must not hold a client for ever."""
FIRST_S, MOST_S = 0.05, 2.0
"""Waits between tries double from the first to the last."""
AGAIN = frozenset({429, 502, 503})
UNREACHABLE = "deadline_unreachable"
"""Refused at once, it would be late: tried again like every 429, and the verdict if nothing else came."""


class Broken(Exception):
    """The connection ended before the answer did; says how.

    Attributes:
        retry_after_s: what the server asked for.
        code: of its refusal, empty: there was none.
    """

    def __init__(self, why: str, retry_after_s: float = 0.0, code: str = "") -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s
        self.code = code


class Client:
    """Sends requests to one pipeline through a gateway.

    Args:
        session: with no time-out of its own.
        url: of the pipeline's function.
        model: its name.
        beyond_s: seconds after its deadline that a request is waited for.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, beyond_s: float = BEYOND_S
    ) -> None:
        self._beyond_s = beyond_s
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model

    async def ask(self, request: Request, answer: Answer) -> None:
        """Asks until the answer is whole, refused for good, or its bound has passed."""
        rng = random.Random(request.number)
        bound_s = answer.begun_s + request.deadline_s + self._beyond_s
        wait_s = FIRST_S
        codes: set[str] = set()
        while (left_s := bound_s - time.time()) > 0:
            have = len(answer.tokens)
            try:
                async with asyncio.timeout(left_s):
                    await self._try(request, answer)
            except (Broken, aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                codes.add(error.code if isinstance(error, Broken) else "")
                if time.time() >= bound_s:  # else the connection was silent for too long
                    break
                answer.breaks_s.append(time.time())
                answer.said = f"{type(error).__name__}: {error}"[:300]
                if len(answer.tokens) > have:
                    wait_s = FIRST_S
                asked_s = error.retry_after_s if isinstance(error, Broken) else 0.0
                await asyncio.sleep(max(asked_s, wait_s * rng.uniform(0.5, 1.0)))
                wait_s = min(MOST_S, 2 * wait_s)
            else:
                answer.ended_s = time.time()
                return
        answer.said = f"{answer.said}; its bound passed".removeprefix("; ")
        if codes == {UNREACHABLE}:  # no try was ever accepted
            answer.refused = UNREACHABLE

    async def _try(self, request: Request, answer: Answer) -> None:
        headers = {"Idempotency-Key": request.key, "X-Keystage-Deadline-S": f"{request.deadline_s:g}"}
        if request.is_streamed and answer.tokens:
            headers["Last-Event-ID"] = str(len(answer.tokens))
        body = request.body(self._model)
        silence = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE_S)
        async with self._session.post(self._url, json=body, headers=headers, timeout=silence) as reply:
            if reply.status != 200:
                _refused(reply, await reply.read(), answer)
            elif request.is_streamed:
                await Events(answer).read(reply)
            else:
                _whole(await reply.read(), answer)


def _refused(reply: aiohttp.ClientResponse, body: bytes, answer: Answer) -> None:
    """Notes a refusal.

    Raises:
        Broken: it is none of the request itself: another try may be served.
    """
    text = body.decode(errors="replace")[:300]
    code = _code(body)
    if reply.status in AGAIN or (reply.status == 504 and not code):
        raise Broken(f"{reply.status}: {text}", _seconds(reply.headers.get("Retry-After", "")), code)
    answer.refused, answer.said = code or f"status_{reply.status}", text


def _code(body: bytes) -> str:
    """The code of OpenAI's error object, empty: it is none."""
    try:
        found = json.loads(body)["error"]
        return str(found.get("code") or found.get("type") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _whole(body: bytes, answer: Answer) -> None:
    """Takes an answer that is not streamed."""
    try:
        found = json.loads(body)
    except ValueError as error:
        raise Broken(f"an answer of {len(body)} bytes is no JSON") from error
    (choice,) = found["choices"]
    answer.tokens = list(choice["token_ids"])
    answer.finish = choice["finish_reason"]
    answer.billed = found["usage"]["completion_tokens"]


class Events:
    """Reads one connection's events into an answer.

    With numbers (`id: N`, tokens of the answer up to this event) every event is held against what the client
    has. Without, the connection begins at the first token, and what comes must repeat what the client has.

    Args:
        answer: what is known so far.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._had = len(answer.tokens)
        self._at: int | None = None
        """Position behind the newest token of this connection, None: none came yet."""

    async def read(self, reply: aiohttp.ClientResponse) -> None:
        """Reads to the end.

        Raises:
            Broken: it ended early.
        """
        number: int | None = None
        async for raw in reply.content:
            line = raw.rstrip(b"\r\n")
            if line.startswith(b"id:"):
                number = int(line[3:])
            elif line.startswith(b"data:"):
                if self.take(line[5:].strip(), number):
                    return
            elif not line:
                number = None
        raise Broken(f"the stream ended after {len(self._answer.tokens)} tokens")

    def take(self, data: bytes, number: int | None) -> bool:
        """Takes one event; True: it was the last."""
        answer = self._answer
        if data == b"[DONE]":
            if not answer.finish:
                raise Broken("the stream was done without a finish reason")
            return True
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            answer.refused = str(event["error"].get("code") or event["error"].get("type") or "unnamed")
            answer.said = str(event["error"].get("message", ""))[:300]
            return True
        if event.get("usage"):
            answer.billed = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            ids = choice.get("token_ids") or []
            if ids:
                self._tokens(ids, number)
            answer.finish = choice.get("finish_reason") or answer.finish
        return False

    def _tokens(self, ids: list[int], number: int | None) -> None:
        answer = self._answer
        is_numbered = number is not None
        before = self._at if self._at is not None else (self._had if is_numbered else 0)
        start = number - len(ids) if number is not None else before
        if is_numbered and self._had and self._at is None:
            answer.resumed += 1
        self._at = start + len(ids)
        if not is_numbered:
            again = answer.tokens[start : min(self._at, self._had)]
            answer.changed += again != ids[: len(again)]
            ids = ids[len(again) :]
        elif start < before:
            answer.repeated += before - start
            ids = ids[before - start :]
        else:
            answer.skipped += start - before
        now_s = time.time()
        answer.tokens += ids
        answer.times_s += [now_s] * len(ids)
