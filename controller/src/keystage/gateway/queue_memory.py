"""A queue of asynchronous calls in the gateway's own memory: the default, lost with the gateway.

Between `gateway.queue_calls` and `gateway.queue_runner`; see `gateway.queue` for the port. Given-up
calls are not kept: the runner logs and counts them.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from keystage.gateway.queue import Bounds, Call, Depth, Lease, encode

_log = logging.getLogger(__name__)


class _Entry(msgspec.Struct):
    call: Call
    size_bytes: int
    queued_at_s: float


class _Line:
    """Calls of one function, in order."""

    def __init__(self) -> None:
        self.waiting: collections.deque[str] = collections.deque()
        self.later: list[tuple[float, str]] = []
        self.entries: dict[str, _Entry] = {}
        self.size_bytes = 0


class MemoryQueue:
    """See `gateway.queue.CallQueue`.

    Args:
        bounds: what it holds at most.
        now: clock in seconds, never falling.
    """

    def __init__(self, bounds: Bounds, now: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._now = now
        self._lines: dict[str, _Line] = {}
        self._size_bytes = 0
        self._number = itertools.count(1)
        self._stir: Callable[[], None] = _nothing

    async def start(self, stir: Callable[[], None]) -> None:
        """Begins to work."""
        self._stir = stir

    async def stop(self) -> None:
        """Forgets everything, and says so."""
        if len(self):
            _log.warning("%d asynchronous calls in memory are lost with this gateway", len(self))
        self._lines.clear()
        self._size_bytes = 0

    def __len__(self) -> int:
        """Calls held in all."""
        return sum(len(line.entries) for line in self._lines.values())

    async def put(self, call: Call) -> None:
        """Accepts a call."""
        size_bytes = len(encode(call))
        line = self._lines.get(call.function) or _Line()
        self._bounds.check(
            call.function,
            calls=len(line.entries),
            own_bytes=line.size_bytes,
            all_bytes=self._size_bytes,
            size_bytes=size_bytes,
        )
        self._lines[call.function] = line
        self._resize(line, size_bytes)
        name = str(next(self._number))
        line.entries[name] = _Entry(call, size_bytes, self._now())
        line.waiting.append(name)
        self._stir()

    async def functions(self) -> Sequence[str]:
        """Names of functions that have calls here."""
        return sorted(self._lines)

    async def take(self, room: Mapping[str, int]) -> list[Lease]:
        """Takes what may be run now."""
        taken = []
        for function, most in room.items():
            line = self._lines.get(function)
            if line is None:
                continue
            while line.later and line.later[0][0] <= self._now():
                name = heapq.heappop(line.later)[1]
                entry = line.entries[name] = line.entries.pop(name)
                entry.queued_at_s = self._now()
                line.waiting.append(name)
            for _ in range(min(most, len(line.waiting))):
                name = line.waiting.popleft()
                taken.append(Lease(function, name, line.entries[name].call))
        return taken

    async def done(self, lease: Lease) -> None:
        """The call needs no more attempt."""
        line = self._lines.get(lease.function)
        entry = line.entries.pop(lease.entry, None) if line is not None else None
        if line is None or entry is None:
            return
        self._resize(line, -entry.size_bytes)
        if not line.entries:
            del self._lines[lease.function]

    async def again(self, lease: Lease, call: Call, delay_s: float) -> None:
        """The call is to be tried once more."""
        line = self._lines.get(lease.function)
        if line is None or lease.entry not in line.entries:
            return
        entry = line.entries.pop(lease.entry)
        name = str(next(self._number))
        line.entries[name] = _Entry(call, entry.size_bytes, self._now())
        heapq.heappush(line.later, (self._now() + delay_s, name))
        self._stir()

    async def bury(self, lease: Lease, reason: str) -> None:
        """The call is given up."""
        del reason  # told by the runner's log; nothing is kept here
        await self.done(lease)

    async def depth(self) -> Mapping[str, Depth]:
        """What is held, by function."""
        return {name: self._depth_of(line) for name, line in self._lines.items()}

    def next_due_s(self) -> float:
        """Seconds until a call's next attempt is due."""
        due = min((line.later[0][0] for line in self._lines.values() if line.later), default=math.inf)
        return max(0.0, due - self._now())

    def _depth_of(self, line: _Line) -> Depth:
        later = {name for _, name in line.later}
        # Entries lie in the order in which they were queued.
        oldest = next((entry for name, entry in line.entries.items() if name not in later), None)
        return Depth(len(line.entries), 0.0 if oldest is None else self._now() - oldest.queued_at_s)

    def _resize(self, line: _Line, by_bytes: int) -> None:
        line.size_bytes += by_bytes
        self._size_bytes += by_bytes


def _nothing() -> None:
    """Before `start`."""
