"""The headers of requests with a key, and answers in bytes that are made once.

Before it: `router.face` has routed the request. A handler that answers in one piece runs in a task of its
own, on the body as it came; whoever asks with the same key gets its bytes. What makes tokens is in
`router.idempotency_text`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from keystage.router.api_keys import caller_of
from keystage.router.classes import SAFETENSORS
from keystage.router.engine import Failure, TooLate
from keystage.router.face_http import (
    DEADLINE_HEADER,
    JSON,
    Receive,
    Scope,
    Send,
    deadline_s,
    header,
    read_body,
    send_whole,
    tenant_of,
    watched,
)
from keystage.router.idempotency import Record, Stamp, Whole, fingerprint_of, name_of
from keystage.router.idempotency_runs import Emit, KeyedRequests
from keystage.router.openai_errors import FieldRefused

KEY = "Idempotency-Key"
POSITION = "Last-Event-ID"
LONGEST_KEY = 255
LONGEST_POSITION = 10
"""Digits of a token's number."""

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


def key_of(scope: Scope) -> str | None:
    """The request's `Idempotency-Key`, None: it has none.

    Raises:
        FieldRefused: it is no such key, or comes twice.
    """
    given = [bytes(value) for name, value in scope["headers"] if name == b"idempotency-key"]
    if not given:
        return None
    key = given[0]
    if len(given) > 1 or not 1 <= len(key) <= LONGEST_KEY or not all(0x21 <= byte <= 0x7E for byte in key):
        what = f"{len(given)} of them" if len(given) > 1 else f"{len(key)} bytes {key[:40]!r}"
        raise FieldRefused(
            "invalid_value",
            f"{KEY} must be one of 1 to {LONGEST_KEY} visible ASCII characters, not {what}",
            param=KEY,
        )
    return key.decode()


def position_of(scope: Scope, *, goes_on: bool) -> int | None:
    """Tokens that the client has of the answer (`Last-Event-ID`), None: it asks for all of it.

    Args:
        scope: the request.
        goes_on: whether its answer is one that can be gone on with: a stream, and it has a key.

    Raises:
        FieldRefused: it is no number, or the answer is none that can be gone on with.
    """
    raw = header(scope, POSITION.lower().encode())
    if raw is None:
        return None
    if not goes_on:
        raise FieldRefused(
            "invalid_value",
            f"{POSITION} is served only with {KEY} and for a stream of tokens",
            param=POSITION,
        )
    if not (raw.isdigit() and len(raw) <= LONGEST_POSITION):
        raise FieldRefused(
            "invalid_value",
            f"{POSITION} must be the number of tokens received, not {raw[:40]!r}",
            param=POSITION,
        )
    return int(raw)


def fingerprint(scope: Scope, body: bytes) -> str:
    """Digest of what decides the answer of a request."""
    wants_tensor = SAFETENSORS.encode() in (header(scope, b"accept") or b"")
    parts = (
        scope["path"].encode(),
        scope.get("query_string", b""),
        header(scope, b"content-type") or b"",
        b"tensor" if wants_tensor else b"",
        body,
    )
    return fingerprint_of(parts)


class Once:
    """Makes handlers answer each key once.

    Args:
        keyed: requests with a key.
        max_body_bytes: largest body that is taken.
    """

    def __init__(self, keyed: KeyedRequests, max_body_bytes: int) -> None:
        self._keyed = keyed
        self._max_body_bytes = max_body_bytes

    def __call__(self, handler: Handler) -> Handler:
        """A handler that answers like this one, and the same again where a request brings its key again."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            key = key_of(scope)
            position_of(scope, goes_on=False)
            if key is None:
                await handler(scope, receive, send)
                return
            body = await read_body(scope, receive, self._max_body_bytes)
            limit_s = deadline_s(scope)
            caller_of(scope)  # what is bad about the request is refused where an answer is kept, too

            async def work(record: Record, _emit: Emit) -> Whole:
                return await _captured(handler, scope, body, record.deadline_unix_s)

            stamp = Stamp(0, "", int(time.time()))
            with watched(receive):
                async with self._keyed.joined(
                    name_of(tenant_of(scope), key), fingerprint(scope, body), stamp, work, limit_s
                ) as record:
                    answer = await self._keyed.whole(record)
            await send_whole(send, answer.body, answer.content_type)

        return serve


async def _captured(handler: Handler, scope: Scope, body: bytes, deadline_unix_s: float | None) -> Whole:
    """What a handler answers to a body; nobody can interrupt it but by ending its task."""
    parts: list[bytes] = []
    content_type = JSON
    is_given = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal is_given
        if is_given:
            await asyncio.get_running_loop().create_future()  # this client never goes away
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal content_type
        if message["type"] == "http.response.start":
            content_type = dict(message["headers"]).get(b"content-type", JSON)
        else:
            parts.append(message.get("body", b""))

    await handler(_within(scope, deadline_unix_s), receive, send)
    if not parts:
        raise Failure("the pipeline ended the request without an answer")
    return Whole(b"".join(parts), content_type)


def _within(scope: Scope, deadline_unix_s: float | None) -> Scope:
    """The request with what is left of its time."""
    if deadline_unix_s is None:
        return scope
    left_s = seconds_left(deadline_unix_s)
    headers = [pair for pair in scope["headers"] if pair[0] != DEADLINE_HEADER]
    return {**scope, "headers": [*headers, (DEADLINE_HEADER, repr(left_s).encode())]}


def seconds_left(deadline_unix_s: float) -> float:
    """Seconds until a time of the clock.

    Raises:
        TooLate: none.
    """
    left_s = deadline_unix_s - time.time()
    if left_s <= 0:
        raise TooLate(f"the deadline of the request passed {-left_s:.3g} s ago")
    return left_s
