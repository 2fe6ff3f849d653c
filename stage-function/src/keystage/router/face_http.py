"""ASGI in small: read a bounded body, send an answer, notice a client that has gone.

Under `router.face`; the HTTP itself is the server's (uvicorn). Nothing here knows what is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from keystage.router.engine import InvalidRequest, Refusal
from keystage.router.openai_errors import BodyTooLarge, error_body, error_headers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
BYTES = b"application/octet-stream"
EVENTS = b"text/event-stream; charset=utf-8"

DEADLINE_HEADER = b"x-keystage-deadline-s"
"""Seconds from now within which the answer must be complete."""

TENANT = "keystage.tenant"
"""Where the scope of a request has the name behind its API key."""


class ClientGone(Exception):
    """The client closed its connection; nobody waits for the answer."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """First header of that (lower case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def tenant_of(scope: Scope) -> str:
    """Name behind the API key of a request, empty without one; whoever checked the key has noted it."""
    return str(scope.get(TENANT, ""))


def deadline_s(scope: Scope) -> float | None:
    """Value of the deadline header.

    Raises:
        InvalidRequest: it is no positive finite number.
    """
    raw = header(scope, DEADLINE_HEADER)
    if raw is None:
        return None
    try:
        seconds = float(raw)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise InvalidRequest(
            f"header {DEADLINE_HEADER.decode()} must be a positive number of seconds, not {raw!r}",
            param=DEADLINE_HEADER.decode(),
        )
    return seconds


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole request body.

    Raises:
        BodyTooLarge: it is longer than `max_bytes`, by its header or as read.
        ClientGone: the client left before it was complete.
    """
    length = header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length) > max_bytes:
        raise BodyTooLarge(f"the body has {int(length)} bytes; at most {max_bytes} are taken")
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        if len(body) <= max_bytes:
            return body
    parts, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise BodyTooLarge(f"the body has more than {max_bytes} bytes, the most that are taken")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
        message = await receive()


async def send_whole(
    send: Send,
    body: bytes,
    content_type: bytes = JSON,
    status: int = 200,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    """A complete answer."""
    all_headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def send_refusal(send: Send, refusal: Refusal) -> None:
    """A complete answer that says what was refused and why."""
    headers = error_headers(refusal)
    if isinstance(refusal, BodyTooLarge):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send_whole(send, error_body(refusal), JSON, refusal.status, headers)


async def start_events(send: Send) -> None:
    """Begins a stream of server-sent events that no proxy should buffer."""
    headers = [(b"content-type", EVENTS), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


@contextmanager
def watched(receive: Receive) -> Iterator[None]:
    """While inside, a client that disconnects interrupts this task at whatever it awaits.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.current_task()
    assert task is not None  # ASGI applications run in tasks
    gone = False

    def interrupt(watch: asyncio.Future[MutableMapping[str, Any]]) -> None:
        nonlocal gone
        if not watch.cancelled():
            gone = True
            task.cancel()

    watch = asyncio.ensure_future(receive())
    watch.add_done_callback(interrupt)
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watch.remove_done_callback(interrupt)
        watch.cancel()
