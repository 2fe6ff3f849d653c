"""The answer of `GET /system/logs`: lines as they are, then new ones for as long as somebody reads.

Between `gateway.rest_functions` and the backend. The first lines are there before the answer
begins, so that what cannot be answered has a status of its own. A client that goes away ends it,
also while nothing is printed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from keystage.gateway import types
from keystage.gateway.backend import Backend, BackendUnavailable, LogLine, UnknownFunction
from keystage.gateway.queries import LogQuery
from keystage.gateway.routes import LINES

FOLLOW_EVERY_S = 0.25
FOLLOW_SHARE = 0.2
"""Of the time, at most, in which new lines are asked for: of many replicas each answer takes a while."""
OVERLAP_S = 1.0
"""Replicas are read one after the other and on clocks of their own: a line may come that is older than one of
another replica which was sent already."""


class LogLines(Response):
    """Lines of one function, one JSON object each.

    Args:
        backend: has them.
        name: function.
        query: which lines.
    """

    media_type = LINES

    def __init__(self, backend: Backend, name: str, query: LogQuery) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._backend = backend
        self._name = name
        self._query = query
        self._newest_s = -math.inf
        self._floor_s = query.since_s
        """Lines of replicas that sent none so far are later than this."""
        self._sent_s: dict[str, float] = {}
        """Time of the newest line of each replica."""
        self._first: Sequence[LogLine] = ()

    async def begin(self) -> None:
        """Reads the lines that are there.

        Raises:
            UnknownFunction: it is not deployed.
            BackendUnavailable: the backend cannot be reached.
        """
        # Where one replica's lines are wanted, the newest ones of all are not its newest ones.
        tail = None if self._query.instance else self._query.tail
        lines = await self._read(tail)
        self._first = lines if self._query.tail is None else lines[-self._query.tail :]
        if self._query.tail is not None and self._sent_s:
            self._floor_s = self._newest_s  # what was cut off is not made up for

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the lines."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] != "HEAD":
            gone = asyncio.create_task(_gone(receive))
            try:
                await _send(send, self._encode(self._first))
                if self._query.follow:
                    await self._follow(gone, send)
            finally:
                gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(self, gone: asyncio.Task[None], send: Send) -> None:
        pause_s = FOLLOW_EVERY_S
        while not gone.done():
            await asyncio.wait({gone}, timeout=pause_s)
            began_s = time.monotonic()
            try:
                lines = await self._read(None)
                pause_s = max(FOLLOW_EVERY_S, (time.monotonic() - began_s) / FOLLOW_SHARE)
            except UnknownFunction:
                return  # removed meanwhile: its output ends here
            except BackendUnavailable:
                continue  # it comes back, and so do the lines
            await _send(send, self._encode(lines))

    async def _read(self, tail: int | None) -> list[LogLine]:
        since_s = max(self._query.since_s, self._newest_s - OVERLAP_S)
        found = await self._backend.logs(self._name, tail=tail, since_s=since_s)
        lines = [line for line in found if line.at_s > self._sent_s.get(line.replica, self._floor_s)]
        for line in lines:
            self._sent_s[line.replica] = line.at_s
            self._newest_s = max(self._newest_s, line.at_s)
        return [line for line in lines if self._query.instance in ("", line.replica)]

    def _encode(self, lines: Sequence[LogLine]) -> bytes:
        return msgspec.json.Encoder().encode_lines([types.log_message(self._name, line) for line in lines])


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
