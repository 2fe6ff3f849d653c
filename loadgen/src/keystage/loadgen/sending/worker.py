"""One sending process: reads its part of a plan, sends it from the shared start, and tells its rows.

Started by `processes`, as many as wanted. The garbage collector never looks at the plan, for its pauses grow
with what it looks at; what requests leave behind it looks at seldom. The process ends when its input does, so
that it never outlives the one that asked for it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import gc
import os
import signal
import sys
import time

import uvloop

from keystage.loadgen.sending import messages, pace
from keystage.loadgen.sending.client import Client
from keystage.loadgen.sending.connections import tls_context
from keystage.loadgen.sending.route import route
from keystage.loadgen.sending.row import Row
from keystage.wire.descriptors import raise_descriptors

GC_THRESHOLDS = (20_000, 50, 100)
"""Exceptions of failed connections are in cycles, so that without any collection a long run would grow."""

TELL_S = 0.1
MOST_ROWS = 256
"""In a message: encoding them takes less than the tenth of a millisecond."""


def main() -> None:
    """Does what the input says, once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; who started us ends our input
    raise_descriptors()
    given = messages.part(_read())
    work = _Work(given)
    del given
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    os.write(1, messages.framed(messages.Ready()))
    uvloop.run(work.run(messages.start(_read()).start_s))


def _read() -> bytes:
    """The next message; the process ends if there is none."""
    source = sys.stdin.buffer
    head = source.read(messages.LENGTH.size)
    if len(head) < messages.LENGTH.size:
        raise SystemExit(0)
    (size,) = messages.LENGTH.unpack(head)
    content = source.read(size)
    if len(content) < size:
        raise SystemExit(0)
    return content


class _Written(asyncio.BaseProtocol):
    """Knows when all that was written has gone, or can go nowhere any more."""

    def __init__(self) -> None:
        self.all: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.all.done():
            self.all.set_result(None)


class _Work:
    """A part, unpacked."""

    def __init__(self, part: messages.Part) -> None:
        self._times_s = array.array("d", part.times_s)
        indices, targets = array.array("q", part.indices), array.array("i", part.targets)
        self._rows = [
            Row(index, at_s, target=target)
            for index, at_s, target in zip(indices, self._times_s, targets, strict=True)
        ]
        self._bodies = [part.contents[place] for place in array.array("i", part.bodies)]
        self._routes = [route(url, part.headers, part.reading) for url in part.urls]
        if any(one.peer.is_tls for one in self._routes):
            tls_context(part.http)  # reading the authorities takes milliseconds that a schedule has not
        self._part = part
        self._ended: list[messages.RowFields] = []

    async def run(self, start_s: float) -> None:
        """Sends everything and tells how it went."""
        loop = asyncio.get_running_loop()
        output, written = await loop.connect_write_pipe(_Written, os.fdopen(os.dup(1), "wb"))
        sending = asyncio.current_task()
        assert sending is not None

        def orphaned() -> None:
            loop.remove_reader(0)  # it stays readable
            sending.cancel()

        loop.add_reader(0, orphaned)  # its input ended: nobody waits for this
        with contextlib.suppress(asyncio.CancelledError):
            await self._send(start_s, output)
            output.close()
            await written.all  # a pipe takes 64 KiB at a time, as fast as they are read
        loop.remove_reader(0)

    async def _send(self, start_s: float, output: asyncio.WriteTransport) -> None:
        part, loop = self._part, asyncio.get_running_loop()
        client = Client(
            self._routes,
            timeout_s=part.timeout_s,
            http=part.http,
            retries=part.retries,
            start_s=start_s,
            ended=lambda row: self._ended.append(messages.fields(row)),
        )
        rows, bodies, send = self._rows, self._bodies, client.send
        self._telling: asyncio.Handle = loop.call_soon(self._tell, output)
        cpu_s = time.process_time()

        def hand_over(place: int) -> None:
            send(rows[place], bodies[place])

        try:
            await pace.keep(self._times_s, start_s, hand_over)
            await client.finish()
        finally:
            self._telling.cancel()
            await client.close()
        while self._ended:
            self._tell_some(output)
        cpu_s = time.process_time() - cpu_s
        output.write(messages.framed(messages.Ended(cpu_s, client.opened, client.moved)))

    def _tell(self, output: asyncio.WriteTransport) -> None:
        """Tells what has ended, a bounded number at a time so that no request waits for it."""
        self._tell_some(output)
        wait_s = 0.001 if self._ended else TELL_S
        self._telling = asyncio.get_running_loop().call_later(wait_s, self._tell, output)

    def _tell_some(self, output: asyncio.WriteTransport) -> None:
        if self._ended:
            some, self._ended = self._ended[:MOST_ROWS], self._ended[MOST_ROWS:]
            output.write(messages.framed(messages.Rows(some)))


if __name__ == "__main__":
    main()
