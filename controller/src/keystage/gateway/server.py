"""The HTTP server under the gateway: uvicorn with httptools, set up for proxying.

Before `gateway.app`'s dispatch. What differs from a plain uvicorn: everything a client owes, or is
owed, is bounded in time; a client that still sends reads why it was refused; HTTP/1.0 is spoken to
those who ask in it. And, both measured by `keystage bench gateway`: the head of an answer and what of
its body is there leave in one system call (`gateway.joined_writes`), and garbage collection neither
visits what lives for ever nor runs every few requests. It must not know what is served.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from keystage.gateway.joined_writes import JoinedWrites
from keystage.gateway.unframed import Unframed, reset
from keystage.wire.crowd import Crowd, CrowdedProtocol

COLLECT_AFTER = (20_000, 20, 20)
"""Container objects made and not freed before the youngest are looked at (Python's 700 is every few
requests under load); what is unreachable without a cycle is freed at once as ever."""

HEAD_S = 60.0
"""Long for any head, short enough that connections which send none do not pile up."""
AGE_SPREAD = 0.1
"""Part of the age by which it differs at random: connections that came together do not all end together."""
LINGER_S = 5.0
LINGER_BYTES = 64 << 20
_NO_HANDSHAKE = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 24\r\n"
    b"connection: close\r\n\r\nno WebSocket handshake.\n"
)


class ClientProtocol(CrowdedProtocol):
    """Uvicorn's, over `JoinedWrites`, with bounds on how long a client may keep the gateway waiting.

    Uvicorn bounds only the time between an answer and the next request. What else a client owes is looked
    after by one timer of the connection, which is set again only when it has run out or a nearer bound
    comes: a request that is there at once costs no timer.

    Attributes:
        stall_s: seconds for which a full socket, or the next part of a request's body, is waited for.
        head_s: seconds that a request's head may take, and what is left of a request that is answered.
        age_s: seconds after which an answer says that it is the connection's last. A client that takes its
            connections in turn (aiohttp's does) would never let one go that a burst once needed, nor one on
            Kubernetes ever come to a gateway that was added.
        linger_s: seconds for which a client that still sends is heard out, see `_linger`.
        old_s: moment of the loop's clock from which on it is that old.
        leaving: whether each answer from now on is its connection's last; see `gateway.leaving`.
    """

    stall_s = math.inf
    head_s = HEAD_S
    age_s = math.inf
    linger_s = LINGER_S
    leaving = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stalled: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._heard_s = 0.0
        self.old_s = math.inf
        self._head_from_s: float | None = None
        """Since when a head, or the rest of an answered request, is waited for; None: it is not."""
        self._in_message = False
        self._is_excused = False
        """The client waits for `100 Continue`."""
        self._is_refused = False
        self._discarded_bytes = -1
        """Since the connection lingers; negative: it does not."""

    # What the client takes

    def pause_writing(self) -> None:
        """The client takes no more for now."""
        super().pause_writing()
        if self._stalled is None and self.stall_s < math.inf:
            self._stalled = self.loop.call_later(self.stall_s, self._break_off)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._go_on()

    def _go_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    # What the client sends

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected, and owes a request."""
        joined = JoinedWrites(transport)
        joined.lingers = self._linger
        super().connection_made(cast("asyncio.Transport", joined))
        self._heard_s = self._head_from_s = self.loop.time()
        self.old_s = self._heard_s + self.age_s * random.uniform(1 - AGE_SPREAD, 1 + AGE_SPREAD)
        self._look_at(self._heard_s + self.head_s)

    def data_received(self, data: bytes) -> None:
        """Part of a request came."""
        if self._discarded_bytes >= 0:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > LINGER_BYTES:
                self.transport.close()
            return
        self._heard_s = self.loop.time()
        if self._head_from_s is None and not self._in_message:
            self._head_from_s = self._heard_s
        super().data_received(data)
        if (self._in_message or self._head_from_s is not None) and self._discarded_bytes < 0:
            self._look_at(self._due_s())

    def on_headers_complete(self) -> None:
        """A head is there, and its body follows."""
        if self._discarded_bytes >= 0:
            return
        self._head_from_s = None
        self._in_message = True
        self._is_excused = self.expect_100_continue
        super().on_headers_complete()
        if self.leaving or self._heard_s >= self.old_s:
            self.end_after_answer()

    def end_after_answer(self) -> None:
        """Has the answer that is under way, if one is, say and be the connection's last."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """A request is there."""
        self._in_message = False
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self._head_from_s = (
                self._heard_s
            )  # uvicorn's own timer ended with the first byte after the answer

    def on_response_complete(self) -> None:
        """An answer is complete; its request may not be."""
        super().on_response_complete()
        if self._in_message and self.cycle.response_complete and not self.transport.is_closing():
            self._head_from_s = self.loop.time()
            self._look_at(self._due_s())

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: whoever answers it is told; uvicorn tells only the request read last."""
        self._go_on()
        self._stop_timer()
        self._tell_gone()
        super().connection_lost(exc)
        cast("JoinedWrites", self.transport).lingers = None  # it is freed at once: no cycle is left

    def _tell_gone(self) -> None:
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = Unframed(app, cycle)
        super()._start_asgi_task(cycle, app)

    # The bounds

    def _due_s(self) -> float:
        """When the client will be late."""
        if self._head_from_s is not None:
            return self._head_from_s + self.head_s
        return max(self._heard_s, cast("JoinedWrites", self.transport).resumed_s) + self.stall_s

    def _look_at(self, due_s: float) -> None:
        if self._timer is not None:
            if self._timer_s <= due_s:
                return
            self._timer.cancel()
        self._timer_s = due_s
        self._timer = self.loop.call_at(due_s, self._look) if due_s < math.inf else None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self.transport.is_closing() or not (self._in_message or self._head_from_s is not None):
            return
        now_s = self.loop.time()
        running = self._running
        is_answering = running is not None and not running.response_complete
        if self._head_from_s is not None:
            if is_answering:
                self._head_from_s = now_s  # the client's next request; it is in no hurry
        elif running is not self.cycle or self.flow.read_paused or self.cycle.waiting_for_100_continue:
            self._heard_s = now_s  # it is we who do not read
        elif self._is_excused:
            self._is_excused = False
            self._heard_s = now_s
        due_s = self._due_s()
        if due_s > now_s:
            self._look_at(due_s)
        elif self._head_from_s is None:
            self._give_up_body()
        elif self.unread_bytes and not self._in_message:
            self._answer_late(f"a request's head did not come within {self.head_s:g} s")
        else:
            self.transport.abort()

    def _give_up_body(self) -> None:
        if self.cycle.response_started:
            self._break_off()
            return
        self._tell_gone()
        self._answer_late(f"no part of the request's body came for {self.stall_s:g} s")

    def _break_off(self) -> None:
        running = self._running
        if running is not None and running.scope["http_version"] == "1.0":
            reset(self.transport)
        else:
            self.transport.abort()

    def _answer_late(self, why: str) -> None:
        self._answer_now(b"408 Request Timeout", why)

    def _answer_now(self, status: bytes, why: str, more: bytes = b"") -> None:
        body = f"{why}\n".encode()
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\n%b"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (status, more, len(body), body)
        )
        self.transport.close()

    # Endings

    def send_400_response(self, msg: str) -> None:
        """Answers what cannot be served."""
        self._is_refused = True
        super().send_400_response(msg)
        self._tell_gone()

    def _linger(self) -> bool:
        """Called when the connection is to be closed; true if it lingers instead.

        A socket that is closed with unread input resets the connection, and the client loses the answer
        (RFC 9112, 9.6). So a client that still sends gets the end of the answer, and what it sends is thrown
        away for a while.
        """
        is_answered = self.cycle is None or self.cycle.response_complete
        if self._discarded_bytes >= 0 or not (self._is_refused or (self._in_message and is_answered)):
            return False
        transport = cast("JoinedWrites", self.transport)
        if transport.transport.is_closing():
            return False
        self._discarded_bytes = 0
        self._stop_timer()
        self._timer = self.loop.call_later(self.linger_s, self.transport.close)
        transport.transport.write_eof()
        self.flow.resume_reading()
        return True

    def handle_websocket_upgrade(self) -> None:
        """From here on another protocol has the transport, if it takes the handshake."""
        if self.is_over and self.crowd is not None:
            self._answer_now(b"503 Service Unavailable", self.crowd.why(), b"retry-after: 1\r\n")
            return
        self._stop_timer()
        self._in_message = False
        if isinstance(self.transport, JoinedWrites):
            self.transport.lingers = None
            self.transport = self.transport.transport
        super().handle_websocket_upgrade()
        taken = cast("WebSocketsSansIOProtocol", self.transport.get_protocol())
        if not taken.handshake_initiated:
            # Uvicorn passes on no refusal of the parser's (414, 431), and leaves the connection open.
            refusal = b"".join(taken.conn.data_to_send())
            self.transport.write(refusal or _NO_HANDSHAKE)
            self.transport.close()


def client_crowd(most: int, reserve: int) -> Crowd:
    """How many clients are taken; beyond that they are told so in plain words."""
    return Crowd(most, reserve, b"text/plain; charset=utf-8", lambda why: f"{why}\n".encode())


def client_protocol(
    stall_s: float, head_s: float = HEAD_S, crowd: Crowd | None = None, age_s: float = math.inf
) -> type[ClientProtocol]:
    """The protocol with its bounds.

    Args:
        stall_s: seconds for which a client may take nothing of its answer, or send nothing of a body.
        head_s: seconds that a request's head may take.
        crowd: how many there may be, None: as many as come.
        age_s: seconds after which a connection ends with its next answer.
    """
    bounds = {"stall_s": stall_s, "head_s": head_s, "crowd": crowd, "age_s": age_s}
    return type("BoundedClientProtocol", (ClientProtocol,), bounds)


def settle_memory() -> None:
    """Called once everything is loaded: exempts it from garbage collection, and makes that rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
