"""The answer of `GET /system/logs`: lines as they are, then new ones for as long as somebody reads.

Between `gateway.rest_functions` and the backend. The first lines are there before the answer
begins, so that what cannot be answered has a status of its own. A client that goes away ends it,
also while nothing is printed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from keystage.gateway import types
from keystage.gateway.backend import Backend, BackendUnavailable, LogLine, UnknownFunction
from keystage.gateway.queries import LogQuery
from keystage.gateway.routes import LINES

FOLLOW_EVERY_S = 0.25
_LATER_S = 5e-7
"""Times are kept to the microsecond; half of one more skips exactly the line that had this one."""


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
        self._since_s = query.since_s
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
        while not gone.done():
            await asyncio.wait({gone}, timeout=FOLLOW_EVERY_S)
            try:
                lines = await self._read(None)
            except UnknownFunction:
                return  # removed meanwhile: its output ends here
            except BackendUnavailable:
                continue  # it comes back, and so do the lines
            await _send(send, self._encode(lines))

    async def _read(self, tail: int | None) -> list[LogLine]:
        lines = await self._backend.logs(self._name, tail=tail, since_s=self._since_s)
        if lines:
            self._since_s = max(self._since_s, lines[-1].at_s + _LATER_S)
        return [line for line in lines if self._query.instance in ("", line.replica)]

    def _encode(self, lines: Sequence[LogLine]) -> bytes:
        return msgspec.json.Encoder().encode_lines([types.log_message(self._name, line) for line in lines])


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
