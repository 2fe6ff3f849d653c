"""The HTTP server under the gateway: uvicorn with httptools, set up for proxying.

Before `gateway.app`'s dispatch. Two things differ from a plain uvicorn, both measured by `keystage
bench gateway`: the head of an answer and what of its body is there leave in one system call, and
garbage collection neither visits what lives for ever nor runs every few requests. It must not know
what is served.
"""

from __future__ import annotations

import asyncio
import gc
import math
from typing import Any, cast

from keystage.wire.http_protocol import PassingProtocol

COLLECT_AFTER = (20_000, 20, 20)
"""Container objects made and not freed before the youngest are looked at (Python's 700 is every few
requests under load); what is unreachable without a cycle is freed at once as ever."""


class JoinedWrites:
    """A transport that writes once per turn of the event loop.

    A system call on a socket costs more than making the answer, and wakes the client for each piece.

    Args:
        transport: the one underneath; everything but writing and closing is its own.
    """

    __slots__ = ("_loop", "_pending", "transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._loop = asyncio.get_running_loop()
        self._pending: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        """Everything else."""
        return getattr(self.transport, name)

    def write(self, data: bytes) -> None:
        """Writes, at the end of this turn."""
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def close(self) -> None:
        """Writes what is left, and closes."""
        self._flush()
        self.transport.close()

    def _flush(self) -> None:
        pending = self._pending
        if pending:
            data = pending[0] if len(pending) == 1 else b"".join(pending)
            pending.clear()
            if not self.transport.is_closing():
                self.transport.write(data)


class ClientProtocol(PassingProtocol):
    """Uvicorn's, over `JoinedWrites`; a client that takes nothing of its answer is given up in time.

    Attributes:
        stall_s: seconds for which a full socket is waited for.
    """

    stall_s = math.inf
    _stalled: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The client takes no more for now."""
        super().pause_writing()
        if self._stalled is None and self.stall_s < math.inf:
            self._stalled = self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._go_on()
        super().connection_lost(exc)

    def _go_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(cast("asyncio.Transport", JoinedWrites(transport)))

    def handle_websocket_upgrade(self) -> None:
        """From here on another protocol has the transport."""
        if isinstance(self.transport, JoinedWrites):
            self.transport = self.transport.transport
        super().handle_websocket_upgrade()


def client_protocol(stall_s: float) -> type[ClientProtocol]:
    """The protocol with a bound.

    Args:
        stall_s: seconds for which a client may take nothing of its answer.
    """
    return type("BoundedClientProtocol", (ClientProtocol,), {"stall_s": stall_s})


def settle_memory() -> None:
    """Called once everything is loaded: exempts it from garbage collection, and makes that rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
