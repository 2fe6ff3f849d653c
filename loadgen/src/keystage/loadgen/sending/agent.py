"""`keystage load-agent`: a machine that sends a part of a plan for someone else's `keystage load --agent`.

One WebSocket a run, behind a shared secret: the part comes in, the clock is asked, the start is told, rows go
back; when the connection ends, so does the sending. One run at a time. It sends wherever it is told to, so
the secret is all that stands between its network and whoever knows the address.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import socket
import time

import numpy as np
from aiohttp import WSMsgType, web

from keystage.loadgen.sending import messages
from keystage.loadgen.sending.parts import count_of, cut
from keystage.loadgen.sending.processes import Processes, SenderError
from keystage.loadgen.sending.row import Row
from keystage.wire.bad_requests import tell_in_one_line
from keystage.wire.unreadable import UNREADABLE

PATH = "/run"
TELL_S = 0.2
MOST_ROWS = 4096
IDLE_S = 600.0
"""Without a word before the start a run is given up, so that one whose asker vanished blocks no other."""

LOST_S = 30.0
"""What is told stays unacknowledged for so long: whoever asked is lost, and the sending ends."""

MIN_SECRET_BYTES = 16


class Agent:
    """Answers on `PATH`.

    Args:
        secret: shared with whoever may send from here.
    """

    def __init__(self, secret: str) -> None:
        self._login = f"Bearer {secret}".encode()
        self._busy = asyncio.Lock()

    def app(self) -> web.Application:
        """The server's application; it must be run with `handler_cancellation`."""
        made = web.Application()
        made.router.add_get(PATH, self._run)
        return made

    async def _run(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self._login):
            return web.Response(status=401, text="the secret is another\n")
        if self._busy.locked():
            return web.Response(status=409, text="a run is under way\n")
        async with self._busy:
            answer = web.WebSocketResponse(max_msg_size=0, compress=False)
            await answer.prepare(request)
            _bound_silence(request)
            run = _Run(answer)
            try:
                await run.follow()
            finally:
                await run.close()
            return answer


class _Run:
    """One run as told over its connection."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self._processes: Processes | None = None
        self._sending: asyncio.Task[None] | None = None
        self._ended: list[messages.RowFields] = []

    async def follow(self) -> None:
        """Does what is asked until the connection ends."""
        while True:
            try:
                message = await self._socket.receive(timeout=None if self._sending else IDLE_S)
            except TimeoutError:
                return
            if message.type != WSMsgType.BINARY:
                return
            try:
                asked = messages.agent_asked(message.data)
            except UNREADABLE as error:
                await self._tell(messages.Refused(f"not understood: {error}"))
                return
            match asked:
                case messages.WhatTime():
                    await self._tell(messages.Clock(time.monotonic()))
                case messages.Prepare():
                    await self._prepare(asked)
                case messages.Begin() if self._processes is None or self._sending is not None:
                    await self._tell(messages.Refused("no part is here, or it is being sent"))
                    return
                case messages.Begin():
                    self._sending = asyncio.create_task(self._send(asked))

    async def close(self) -> None:
        """Ends the sending."""
        if self._sending is not None:
            self._sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await self._sending
        if self._processes is not None:
            await self._processes.close()

    async def _tell(self, message: messages.AgentTold) -> None:
        await self._socket.send_bytes(messages.encoded(message))

    async def _prepare(self, asked: messages.Prepare) -> None:
        if self._processes is not None:
            await self._tell(messages.Refused("a part is here already"))
            return
        try:
            part = asked.part
            times_s = np.frombuffer(part.times_s, np.float64)
            rows = [Row(index, at_s) for index, at_s in enumerate(times_s.tolist())]
            part.indices = np.arange(len(rows), dtype=np.int64).tobytes()
            count = count_of(part, asked.processes)
            cuts = [functools.partial(cut, part, first, count) for first in range(count)]
            self._processes = Processes(cuts, rows)
            await self._processes.start()
        except (SenderError, OSError, ValueError, IndexError) as error:
            await self._tell(messages.Refused(str(error)))
            return
        await self._tell(messages.Ready())

    async def _send(self, asked: messages.Begin) -> None:
        assert self._processes is not None
        telling = asyncio.create_task(self._tell_often())
        try:
            told, _ = await self._processes.send(asked.start_s, asked.bound_s, self._keep)
        finally:
            telling.cancel()
        while self._ended:
            await self._tell_some()
        count = len(self._processes.pids)
        await self._tell(messages.Finished(count, told.cpu_s, told.connections, told.moved, told.faults))

    def _keep(self, row: Row) -> None:
        self._ended.append(messages.fields(row))

    async def _tell_often(self) -> None:
        """Rows as they end, and none where none has: whoever asked knows by it that this machine lives."""
        while True:
            await asyncio.sleep(TELL_S)
            await self._tell_some()
            while self._ended:
                await self._tell_some()

    async def _tell_some(self) -> None:
        some, self._ended = self._ended[:MOST_ROWS], self._ended[MOST_ROWS:]
        await self._tell(messages.Rows(some))


def _bound_silence(request: web.Request) -> None:
    """Ends a connection whose other machine acknowledges nothing: a part goes on being told, or is idle."""
    connection = None if request.transport is None else request.transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LOST_S * 1000))


async def serve(host: str, port: int, secret: str, ready: asyncio.Future[int] | None = None) -> None:
    """Serves until cancelled.

    Args:
        host: address to listen on.
        port: 0 for a free one.
        secret: at least `MIN_SECRET_BYTES` long.
        ready: gets the port when it listens.

    Raises:
        ValueError: the secret is too short.
        OSError: the address cannot be listened on.
    """
    if len(secret.encode()) < MIN_SECRET_BYTES:
        raise ValueError(
            f"the secret must have at least {MIN_SECRET_BYTES} bytes, got {len(secret.encode())}"
        )
    tell_in_one_line()
    runner = web.AppRunner(Agent(secret).app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, shutdown_timeout=1.0)
        await site.start()
        if ready is not None:
            ready.set_result(int(runner.addresses[0][1]))
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
