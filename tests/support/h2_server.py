"""An HTTP/2 server over cleartext that behaves as a script says, stream by stream (library h2)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import cast

import h2.config
import h2.connection
import h2.events
import h2.settings

Answer = Callable[["Connection", int], None]
"""Called with the connection and the stream of each request that has wholly come."""


class Connection(asyncio.Protocol):
    """One connection.

    Attributes:
        h2: its state.
        bodies: bytes of each request's body, by stream.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.bodies: dict[int, int] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.server.connections.append(self)
        if self.server.most_streams is not None:
            bound = {h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: self.server.most_streams}
            self.h2.local_settings = h2.settings.Settings(client=False, initial_values=bound)
        self.h2.initiate_connection()
        self.flush()

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            match event:
                case h2.events.RequestReceived():
                    assert event.stream_id is not None
                    self.bodies[event.stream_id] = 0
                    if self.server.early is not None:
                        self.server.early(self, event.stream_id)
                case h2.events.DataReceived() if self.server.early is None:
                    assert event.stream_id is not None
                    self.bodies[event.stream_id] += len(event.data or b"")
                    self.h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
                case h2.events.StreamEnded() if self.server.early is None:
                    assert event.stream_id is not None
                    self.server.requests += 1
                    self.server.answer(self, event.stream_id)
                case _:
                    pass
        self.flush()

    def head(self, stream: int, status: int = 200) -> None:
        """Sends an answer's head."""
        self.h2.send_headers(stream, [(":status", str(status))])

    def ok(self, stream: int, body: bytes = b"ok", status: int = 200) -> None:
        """Sends a whole answer."""
        self.head(stream, status)
        self.h2.send_data(stream, body, end_stream=True)

    def flush(self) -> None:
        """Writes what there is to be written."""
        if data := self.h2.data_to_send():
            self.transport.write(data)


class Server:
    """Listens on a free port.

    Args:
        answer: see `Answer`.
        most_streams: bound on streams of a connection, None for none.

    Attributes:
        connections: all there were.
        requests: how many came wholly.
        early: where set, called at each request's head, and bodies are not read.
    """

    def __init__(self, answer: Answer, most_streams: int | None = None) -> None:
        self.answer = answer
        self.most_streams = most_streams
        self.connections: list[Connection] = []
        self.requests = 0
        self.early: Answer | None = None

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[str]:
        """Yields its URL."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(self), "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        finally:
            for connection in self.connections:
                connection.transport.abort()
            server.close()
