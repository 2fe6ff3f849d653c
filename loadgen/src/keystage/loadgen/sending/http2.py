"""One HTTP/2 connection: many requests at once, framed by the library h2 (RFC 9113).

Made and given work by `connections`; tells `client` how each exchange went. Prior knowledge over cleartext,
ALPN over TLS (`connections` checks it). A request that the server did not process by its own word (GOAWAY
with a lower last stream, or REFUSED_STREAM: RFC 9113, 6.8 and 8.7) goes to another connection, uncounted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from keystage.loadgen.sending.exchange import Exchange, Outcomes

WINDOW_BYTES = 1 << 24
"""Receive window of the connection and of each stream: answers never wait for our word."""

_SETTINGS = {
    h2.settings.SettingCodes.ENABLE_PUSH: 0,
    h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
    h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: 64 << 10,
}

_CONFIG = h2.config.H2Configuration(client_side=True, header_encoding=None, validate_outbound_headers=False)


class _Connection(h2.connection.H2Connection):
    """h2's connection, but open after GOAWAY: the requests that the server has taken are still answered."""

    def _receive_goaway_frame(self, frame: Any) -> Any:
        received = super()._receive_goaway_frame(frame)
        self.state_machine.state = h2.connection.ConnectionState.CLIENT_OPEN
        return received


class Http2Connection(asyncio.Protocol):
    """A connection that carries as many exchanges at once as the server allows.

    Args:
        outcomes: told how exchanges went.
        free: called with the connection when it can carry another exchange and is not offered.
        gone: called when it never will again.

    Attributes:
        idle_since_s: `time.monotonic()` since when it carries nothing.
        is_offered: whether the pool has it among those that can carry more; kept by the pool.
        ready: done when the server has told its settings and takes a request, or why it never will; before,
            nothing is carried, for the server may take fewer requests at once than there are.
    """

    def __init__(
        self,
        outcomes: Outcomes,
        free: Callable[[Http2Connection], None],
        gone: Callable[[Http2Connection], None],
    ) -> None:
        self._outcomes = outcomes
        self._free = free
        self._gone = gone
        self._h2 = _Connection(_CONFIG)
        self._streams: dict[int, Exchange] = {}
        self._ids: dict[Exchange, int] = {}
        self._unsent: dict[int, int] = {}
        self._bound = 0
        self._takes_more = True
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.idle_since_s = 0.0
        self.is_offered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Says what kind of client this is."""
        self._transport = cast("asyncio.Transport", transport)
        self._h2.local_settings = h2.settings.Settings(client=True, initial_values=_SETTINGS)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW_BYTES - 65_535)
        self._flush()

    @property
    def is_closing(self) -> bool:
        """Whether it takes no more work."""
        return not self._takes_more or self._transport.is_closing()

    @property
    def is_busy(self) -> bool:
        """Whether it carries anything."""
        return bool(self._streams)

    @property
    def has_room(self) -> bool:
        """Whether it can carry another exchange now."""
        return not self.is_closing and len(self._streams) < self._bound

    def carry(self, exchange: Exchange) -> bool:
        """Sends a request; False, with nothing sent, where the connection takes no more."""
        if not self.has_room:
            return False
        try:
            stream = self._h2.get_next_available_stream_id()
            length = (b"content-length", b"%d" % len(exchange.body))
            self._h2.send_headers(stream, (*exchange.route.fields, length), end_stream=not exchange.body)
        except h2.exceptions.ProtocolError:
            self._takes_more = False
            return False
        self._streams[stream] = exchange
        self._ids[exchange] = stream
        exchange.carrier = self
        if exchange.body:
            self._unsent[stream] = 0
            self._write_body(stream)
        self._flush()
        return True

    def drop(self, exchange: Exchange) -> None:
        """Resets the exchange's stream."""
        stream = self._ids.get(exchange)
        if stream is not None:
            self._reset(stream)
            self._forget(stream)

    def close(self) -> None:
        """Ends the connection, whatever it carries."""
        self._streams.clear()
        self._ids.clear()
        self._takes_more = False
        self._settle("disconnected: the connection was ended")
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Takes frames."""
        now_s = time.monotonic() - self._outcomes.start_s
        try:
            events = self._h2.receive_data(data)
        except h2.exceptions.ProtocolError as error:
            self._flush()
            self._end_all(f"bad_answer: {type(error).__name__}: {error}")
            return
        for event in events:
            self._see(event, now_s)
        self._flush()

    def eof_received(self) -> None:
        """The peer has ended its side."""
        self._end_all("disconnected: the server ended the connection within the answer")

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is no more."""
        self._gone(self)
        self._end_all(f"disconnected: {error or 'the connection was ended'}")

    def _see(self, event: h2.events.Event, now_s: float) -> None:
        match event:
            case h2.events.DataReceived():
                self._take(event, now_s)
            case h2.events.StreamEnded():
                self._see_end(event, now_s)
            case h2.events.ResponseReceived():
                exchange = self._streams.get(event.stream_id or 0)
                if exchange is not None:
                    exchange.answer.status = _status(event)
            case h2.events.StreamReset():
                self._see_reset(event)
            case h2.events.WindowUpdated():
                for stream in [event.stream_id] if event.stream_id else list(self._unsent):
                    self._write_body(stream)
            case h2.events.RemoteSettingsChanged():
                self._bound = self._h2.remote_settings.max_concurrent_streams
                if self._bound > 0:
                    self._settle("")
                self._offer()
                for stream in list(self._unsent):
                    self._write_body(stream)
            case h2.events.ConnectionTerminated():
                self._see_goaway(event)
            case _:
                pass  # pings, acknowledgements, interim answers: nothing to be done

    def _take(self, event: h2.events.DataReceived, now_s: float) -> None:
        stream = event.stream_id
        assert stream is not None
        if event.flow_controlled_length:
            self._h2.acknowledge_received_data(event.flow_controlled_length, stream)
        exchange = self._streams.get(stream)
        if exchange is None:
            return
        exchange.answer.feed(event.data or b"", now_s)
        if exchange.answer.refused:
            self._reset(stream)
            self._forget(stream)
            self._outcomes.failed(exchange, exchange.answer.refused)

    def _see_end(self, event: h2.events.StreamEnded, now_s: float) -> None:
        stream = event.stream_id
        assert stream is not None
        if stream in self._unsent:  # answered unread: the rest of the body is not wanted
            self._reset(stream)
        exchange = self._forget(stream)
        if exchange is not None:
            self._outcomes.answered(exchange, now_s)

    def _see_reset(self, event: h2.events.StreamReset) -> None:
        exchange = self._forget(event.stream_id or 0)
        if exchange is None:
            return
        code = event.error_code
        name = code.name if isinstance(code, h2.errors.ErrorCodes) else str(code)
        refused = code == h2.errors.ErrorCodes.REFUSED_STREAM
        self._outcomes.failed(
            exchange, f"disconnected: the server reset the stream ({name})", processed=not refused
        )

    def _see_goaway(self, event: h2.events.ConnectionTerminated) -> None:
        """No more requests here; those above the last stream were not processed, the others go on."""
        self._takes_more = False
        last = event.last_stream_id or 0
        for stream in [stream for stream in self._streams if stream > last]:
            exchange = self._forget(stream)
            if exchange is not None:
                error = f"disconnected: the server ended the connection (GOAWAY {event.error_code})"
                self._outcomes.failed(exchange, error, processed=False)
        if not self._streams:
            self._transport.close()

    def _forget(self, stream: int) -> Exchange | None:
        exchange = self._streams.pop(stream, None)
        if exchange is None:
            return None
        del self._ids[exchange]
        self._unsent.pop(stream, None)
        if not self._streams:
            self.idle_since_s = time.monotonic()
            if not self._takes_more:
                self._transport.close()
        self._offer()
        return exchange

    def _offer(self) -> None:
        if self.has_room and not self.is_offered and self.ready.done():
            self._free(self)

    def _reset(self, stream: int) -> None:
        try:
            self._h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        except h2.exceptions.ProtocolError:
            return  # it has ended by itself
        self._flush()

    def _write_body(self, stream: int) -> None:
        """Sends as much of a body as the windows allow."""
        begin = self._unsent.pop(stream, None)
        if begin is None:
            return
        body = self._streams[stream].body
        try:
            while begin < len(body):
                window = self._h2.local_flow_control_window(stream)
                end = min(begin + min(window, self._h2.max_outbound_frame_size), len(body))
                if end <= begin:
                    self._unsent[stream] = begin
                    return
                self._h2.send_data(stream, body[begin:end], end_stream=end == len(body))
                begin = end
        except h2.exceptions.ProtocolError:
            pass  # the server has ended the stream: its answer or its reset tells

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def _settle(self, error: str) -> None:
        if not self.ready.done():
            self.ready.set_result(error)

    def _end_all(self, error: str) -> None:
        self._takes_more = False
        self._settle(error)
        streams, self._streams, self._ids = self._streams, {}, {}
        self._unsent.clear()
        if not self._transport.is_closing():
            self._transport.close()
        for exchange in streams.values():
            self._outcomes.failed(exchange, error)


def _status(event: h2.events.ResponseReceived) -> int:
    for name, value in event.headers or ():
        if name == b":status":
            return int(value)
    return 0
