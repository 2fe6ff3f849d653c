"""A transport that joins writes, and may outlive its closing so that the client reads the answer.

Between `gateway.server` and the event loop's own transport. It must not know HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class JoinedWrites:
    """A transport that writes once per turn of the event loop.

    A system call on a socket costs more than making the answer, and wakes the client for each piece.

    Args:
        transport: the one underneath; everything but writing and closing is its own.

    Attributes:
        lingers: asked when it is to be closed; it is not if that says true.
        resumed_s: when reading was resumed last, in the event loop's time.
    """

    __slots__ = ("_has_ended", "_loop", "_pending", "lingers", "resumed_s", "transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.resumed_s = 0.0
        self.lingers: Callable[[], bool] | None = None
        self._has_ended = False
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
        """Writes what is left, and closes, or lingers."""
        self._flush()
        if self.lingers is not None and self.lingers():
            self._has_ended = True
        else:
            self.transport.close()

    def is_closing(self) -> bool:
        """Nothing more can be written."""
        return self._has_ended or self.transport.is_closing()

    def resume_reading(self) -> None:
        """Reads again."""
        self.resumed_s = self._loop.time()
        self.transport.resume_reading()

    def _flush(self) -> None:
        pending = self._pending
        if pending:
            data = pending[0] if len(pending) == 1 else b"".join(pending)
            pending.clear()
            if not self.is_closing():
                self.transport.write(data)
