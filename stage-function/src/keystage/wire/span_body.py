"""The body that carries spans to a collector, written into memory that is kept. Pure.

Before it: `wire.spans` and `wire.span_tables` write spans. After it: `wire.tracing` posts it. A body of some
thousand spans is a megabyte or more; allocated anew each time, its pages would cost more than what is written
there.
"""

from __future__ import annotations

LEAST_BYTES = 1 << 18


class Body:
    """One body at a time.

    Args:
        room: bytes kept free for what comes before the spans.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._used = room
        self._memory = bytearray(room + LEAST_BYTES)

    def clear(self) -> None:
        """Begins another one; what was given out of the last is written over."""
        self._used = self._room

    def take(self, count: int) -> memoryview:
        """So many bytes behind the last ones, to be written before the next are taken."""
        begun, end = self._used, self._used + count
        if end > len(self._memory):
            grown = bytearray(max(end, 2 * len(self._memory)))
            grown[:begun] = memoryview(self._memory)[:begun]
            self._memory = grown
        self._used = end
        return memoryview(self._memory)[begun:end]

    def add(self, data: bytes) -> None:
        """Appends bytes."""
        self.take(len(data))[:] = data

    def __len__(self) -> int:
        return self._used - self._room

    def whole(self, head: bytes) -> memoryview:
        """What was written, behind a head of at most `room` bytes."""
        begun = self._room - len(head)
        if begun < 0:
            raise ValueError(f"a head of {len(head)} bytes, and room for {self._room}")
        self._memory[begun : self._room] = head
        return memoryview(self._memory)[begun : self._used]
