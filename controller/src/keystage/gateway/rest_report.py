"""The report over HTTP: as it is now, and each new one as a server-sent event.

Between `gateway.rest` and the backend, which holds the newest report that the controller told. Read by the
live page and the command line. A stream ends when its client goes or the gateway leaves: a page that is open
must not hold up a restart. It must not read a report beyond which one it is, nor keep any.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from keystage.gateway.backend import Backend, BackendUnavailable
from keystage.gateway.routes import EVENTS, JSON
from keystage.observability.board import Since, Stamp, stamp_of

KEEP_ALIVE_S = 15.0
"""A comment after so long without a report: proxies between close what is silent for a minute."""
LOOK_S = 0.5
"""How often a stream looks whether the gateway leaves."""
AGAIN_S = 1.0
_FRESH = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_STREAM = {**_FRESH, "X-Accel-Buffering": "no"}
"""The last one tells nginx to pass events on as they come."""


class Reports:
    """Handlers over one backend; names are those of the route table.

    Args:
        backend: holds the newest report.

    Attributes:
        is_leaving: whether the gateway was told to stop: streams end then.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.is_leaving: Callable[[], bool] = _stays

    async def report(self, _: Request) -> Response:
        """The newest report."""
        return Response(await self._newest(), media_type=JSON, headers=_FRESH)

    async def events(self, _: Request) -> Response:
        """Reports as they come, the newest at once."""
        return ReportEvents(self._backend, await self._newest(), lambda: self.is_leaving())

    async def _newest(self) -> bytes:
        body = await self._backend.report(None, 0.0)
        if body is None:
            raise BackendUnavailable(
                "no controller has reported since this gateway started: it starts, or is gone"
            )
        return body


class ReportEvents(Response):
    """Reports, one event each, and a comment where there is none for a while.

    Args:
        backend: has them.
        first: the newest one.
        is_leaving: see `Reports`.
    """

    media_type = EVENTS

    def __init__(self, backend: Backend, first: bytes, is_leaving: Callable[[], bool]) -> None:
        super().__init__(headers=_STREAM)
        del self.headers["content-length"]
        self._backend = backend
        self._first = first
        self._is_leaving = is_leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] != "HEAD":
            gone = asyncio.create_task(_gone(receive))
            try:
                await self._follow(gone, send)
            finally:
                gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(self, gone: asyncio.Task[None], send: Send) -> None:
        # The gateway's clock, by which a page tells how old a report is: its own may be wrong.
        text = b'retry: 1000\nevent: clock\ndata: {"now_s":%.3f}\n\n' % time.time()
        body: bytes | None = self._first
        since: Since = None
        while not gone.done() and not self._is_leaving():
            if body is not None:
                stamp = stamp_of(body)
                since = stamp.since
                text += _event(stamp, body)
            await send({"type": "http.response.body", "body": text, "more_body": True})
            text = b""
            body = None
            asked = asyncio.create_task(self._backend.report(since, KEEP_ALIVE_S))
            try:
                while not asked.done() and not gone.done() and not self._is_leaving():
                    await asyncio.wait({asked, gone}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    body = asked.result()
                    text = b"" if body is not None else b": nothing new\n\n"
            except BackendUnavailable as error:
                text = b": %b\n\n" % str(error).replace("\n", " ").replace("\r", " ").encode()
                await asyncio.wait({gone}, timeout=AGAIN_S)
            finally:
                asked.cancel()


def _event(stamp: Stamp, body: bytes) -> bytes:
    """One event; a JSON text as it is written here has no line breaks."""
    name = stamp.controller.replace("\n", " ").replace("\r", " ").replace("\0", "")
    return b"event: report\nid: %b/%d\ndata: %b\n\n" % (name.encode(), stamp.number, body)


def _stays() -> bool:
    return False


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
