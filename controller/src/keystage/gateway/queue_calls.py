"""`POST /async-function/{name}[/...]`: accepts a call, to be run later.

A bare ASGI handler beside `gateway.proxy`. It answers 202 only when the queue has the call as safe as it
keeps anything; from there `gateway.queue_runner` goes on. It must not wait for replicas.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator

from keystage.gateway.backend import BadRequest, GatewayError, TooLarge
from keystage.gateway.call_headers import identity, of_refusal
from keystage.gateway.headers import SERVED_BY, for_replica
from keystage.gateway.incoming import Receive
from keystage.gateway.names import NAMESPACE, function_name
from keystage.gateway.proxy import Scope, Send
from keystage.gateway.queue import Call, CallQueue
from keystage.gateway.queue_address import CallbackRules
from keystage.gateway.queue_runner import Runner
from keystage.gateway.replicas import Replicas
from keystage.wire.metrics import Sample

PREFIX = b"/async-function/"
MOST_COUNTED = 8192
"""Counters of functions that are kept: four for each of two thousand."""
READ_S = 60.0
"""For the whole body: it is small, and nobody computes while it comes."""
_CALL_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_NOT_STORED = frozenset({b"content-length", b"x-call-id", b"x-callback-url", b"x-start-time"})


class NotPosted(GatewayError):
    """Another method than POST."""

    status = 405


class TooSlow(GatewayError):
    """The body did not come in time."""

    status = 408


class _ClientGone(Exception):
    """The client went away before its request was complete: nobody is there to be answered."""


class AsyncCalls:
    """ASGI application for paths under `/async-function/`, and the worker behind it.

    Args:
        queue: takes calls.
        runner: runs them.
        replicas: knows which functions are deployed.
        rules: which callbacks are taken.
        body_bytes: largest body taken.
    """

    def __init__(
        self, queue: CallQueue, runner: Runner, replicas: Replicas, rules: CallbackRules, body_bytes: int
    ) -> None:
        self._queue = queue
        self._runner = runner
        self._replicas = replicas
        self._rules = rules
        self._body_bytes = body_bytes
        self._counts: Counter[tuple[str, str]] = Counter()

    async def start(self) -> None:
        """Begins to run what waits."""
        await self._runner.start()

    async def stop(self) -> None:
        """Lets running calls end in time and puts back the rest."""
        await self._runner.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accepts or refuses one call."""
        headers = [*identity(()), SERVED_BY]
        name = ""
        try:
            if scope["method"] != "POST":
                raise NotPosted(f"{scope['method']} is not taken here: asynchronous calls are POST")
            raw, slash, rest = scope["raw_path"][len(PREFIX) :].partition(b"/")
            function = function_name(raw.decode("latin-1"))
            self._replicas.check(function)
            name = function
            headers[0] = (b"x-call-id", _call_id(scope["headers"]) or headers[0][1])
            callback = _callback(scope["headers"])
            if callback:
                self._rules.check(callback)
            path = (slash + rest).decode("latin-1") or "/"
            if scope["query_string"]:
                path += "?" + scope["query_string"].decode("latin-1")
            call = Call(
                key=uuid.uuid4().hex,
                id=headers[0][1].decode(),
                function=function,
                path=path,
                headers=_stored(scope, headers),
                body=await _body(scope, receive, self._body_bytes),
                callback=callback,
                start_ns=int(headers[1][1]),
            )
            await self._queue.put(call)
        except GatewayError as error:
            if name:
                self._counts["refused", str(error.status)] += 1
            await _answer(send, error.status, headers, f"{error}\n".encode())
        except _ClientGone:
            return
        else:
            self._counts["accepted", name] += 1
            await _answer(send, 202, headers, b"")

    def samples(self) -> Iterator[Sample]:
        """The queue's metrics; names are in `wire.metrics`."""
        for counts in (self._counts, self._runner.counts):
            while len(counts) > MOST_COUNTED:  # the oldest begin anew if they come back
                del counts[next(iter(counts))]
        for (what, of), count in self._counts.items():
            if what == "refused":
                yield Sample("keystage_async_refused", {"reason": of}, count)
            else:
                yield Sample("keystage_async_accepted", _named(of), count)
        for (event, function), count in self._runner.counts.items():
            if event in ("callbacks", "callback_failures"):
                reason = "delivered" if event == "callbacks" else "failed"
                yield Sample("keystage_async_callbacks", {**_named(function), "reason": reason}, count)
            else:
                yield Sample(f"keystage_async_{event}", _named(function), count)
        known = {of for what, of in self._counts if what == "accepted"} | self._runner.depths.keys()
        for function in known:  # a rate does not see a series' first value: this one begins at zero
            if ("dead_letters", function) not in self._runner.counts:
                yield Sample("keystage_async_dead_letters", _named(function), 0)
        for function, depth in self._runner.depths.items():
            yield Sample("keystage_async_queue_calls", _named(function), depth.calls)
            yield Sample("keystage_async_oldest_seconds", _named(function), depth.oldest_s)
        for function, running in self._runner.running().items():
            yield Sample("keystage_async_in_flight_calls", _named(function), running)


def _named(function: str) -> dict[str, str]:
    return {"function_name": f"{function}.{NAMESPACE}"}


def _call_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    given = [value for key, value in headers if key == b"x-call-id"]
    if not given or not given[-1]:
        return b""
    if not _CALL_ID.fullmatch(given[-1]):
        raise BadRequest("X-Call-Id must have 1 to 128 visible ASCII characters")
    return given[-1]


def _callback(headers: Iterable[tuple[bytes, bytes]]) -> str:
    given = [value for key, value in headers if key == b"x-callback-url"]
    return given[-1].decode("latin-1").strip() if given else ""


def _stored(scope: Scope, own: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    client = scope.get("client") or ("", 0)
    passed = for_replica(
        scope["headers"], client=client[0], scheme=scope["scheme"], version=scope["http_version"]
    )
    kept = [pair for pair in passed if pair[0] not in _NOT_STORED]
    kept += [pair for pair in own if pair[0] in (b"x-call-id", b"x-start-time")]
    return [(key.decode("latin-1"), value.decode("latin-1")) for key, value in kept]


async def _body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    declared = [int(value) for key, value in scope["headers"] if key == b"content-length"]
    size = declared[0] if declared else 0
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(READ_S):
            while size <= limit_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _ClientGone
                parts.append(message.get("body", b""))
                if not declared:
                    size += len(parts[-1])
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise TooSlow(f"the request's body did not come within {READ_S:g} s") from None
    if size > limit_bytes:
        raise TooLarge(
            f"request body has {size} bytes or more, at most {limit_bytes} are taken for an "
            "asynchronous call (KEYSTAGE_ASYNC_BODY_BYTES)"
        )
    return b"".join(parts)


async def _answer(send: Send, status: int, own: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*own, (b"content-length", b"%d" % len(body))]
    if body:
        headers += of_refusal(status)
    if status == 405:
        headers.append((b"allow", b"POST"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
