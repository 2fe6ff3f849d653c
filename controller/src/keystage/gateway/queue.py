"""The port between accepting asynchronous calls and running them.

`gateway.queue_calls` puts calls in, `gateway.queue_runner` takes them out; `gateway.queue_memory`
and `gateway.queue_redis` implement it, and one contract suite runs over both. A call is delivered
at least once: it leaves the queue only when the runner settles its lease. Pure; must not know HTTP
beyond the status an error stands for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from keystage.gateway.backend import GatewayError
from keystage.wire.unreadable import UNREADABLE


class QueueFull(GatewayError):
    """The queue holds what it may for now; names the bound."""

    status = 429


class QueueUnavailable(GatewayError):
    """The store behind the queue does not answer, so nothing can be accepted durably."""

    status = 503


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted call, as it is stored.

    Attributes:
        key: unique for every accepted call, also where two callers choose the same `id`.
        id: `X-Call-Id`, given by the caller or made.
        function: name without namespace.
        path: path and query for the function, starting with `/`.
        headers: what the function gets, lower-case names.
        body: the request's body.
        callback: where the answer goes, empty for nowhere.
        start_ns: `X-Start-Time`, Unix nanoseconds.
        attempts: how often it was tried without success.
    """

    key: str
    id: str
    function: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    callback: str = ""
    start_ns: int = 0
    attempts: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """The right and duty to run a call.

    Attributes:
        function: whose queue it came from.
        entry: the queue's own name for it.
        call: the call, None if it cannot be decoded.
        trouble: why `call` is None.
        losses: how often a runner took it before and was never heard of again.
    """

    function: str
    entry: str
    call: Call | None
    trouble: str = ""
    losses: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Depth:
    """What waits for one function.

    Attributes:
        calls: calls held: waiting, running, or waiting for their next attempt.
        oldest_s: seconds since the oldest one was queued, or became due again; those that wait for their next
            attempt do not count.
    """

    calls: int
    oldest_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What a queue holds at most.

    Attributes:
        entries: calls of one function.
        size_bytes: encoded calls in all. One function may hold as much as is free at that moment (dynamic
            thresholds: Choudhury and Hahne, 1998, alpha = 1): alone it gets half, and others find room.
    """

    entries: int
    size_bytes: int

    def check(self, function: str, *, calls: int, own_bytes: int, all_bytes: int, size_bytes: int) -> None:
        """Refuses a call that does not fit.

        Args:
            function: name.
            calls: calls it has in the queue.
            own_bytes: their bytes.
            all_bytes: bytes of every function's calls.
            size_bytes: the new call's bytes.

        Raises:
            QueueFull: names the bound.
        """
        if calls >= self.entries:
            raise QueueFull(
                f"the asynchronous queue of function {function} is full: {calls} calls wait or run, "
                f"at most {self.entries} are taken (KEYSTAGE_ASYNC_ENTRIES)"
            )
        free = self.size_bytes - all_bytes
        if own_bytes + size_bytes > free:
            raise QueueFull(
                f"the asynchronous queue is full: {all_bytes} of {self.size_bytes} bytes are held "
                f"(KEYSTAGE_ASYNC_BYTES), {own_bytes} of them by function {function}; one function may hold "
                f"as much as is free, and this call has {size_bytes}"
            )


class CallQueue(Protocol):
    """Where accepted calls wait. Every method may raise `QueueUnavailable`, but `start` and `stop`."""

    async def start(self, stir: Callable[[], None]) -> None:
        """Begins to work; a store that is not there yet is waited for in the background.

        Args:
            stir: called when there may be something to take.
        """

    async def stop(self) -> None:
        """Lets go of the store. Leases that were not settled are for others, if the store outlives us."""

    async def put(self, call: Call) -> None:
        """Accepts a call; when this returns it is as safe as the store is.

        Raises:
            QueueFull: a bound is reached.
        """

    async def functions(self) -> Sequence[str]:
        """Names of functions that have calls here."""

    async def take(self, room: Mapping[str, int]) -> list[Lease]:
        """Takes what may be run now, in order of arrival for each function.

        Args:
            room: calls to take at most, by function.
        """

    async def done(self, lease: Lease) -> None:
        """The call needs no more attempt. Settling twice does nothing."""

    async def again(self, lease: Lease, call: Call, delay_s: float) -> None:
        """The call is to be tried once more.

        Args:
            lease: what was taken.
            call: what to store instead.
            delay_s: not before so many seconds.
        """

    async def bury(self, lease: Lease, reason: str) -> None:
        """The call is given up; the store keeps it aside with the reason if it can."""

    async def depth(self) -> Mapping[str, Depth]:
        """What is held, by function."""

    def next_due_s(self) -> float:
        """Seconds until a call's next attempt is due, infinity when none waits for one."""


def encode(call: Call) -> bytes:
    """A call as it is stored."""
    return msgspec.msgpack.encode(call)


def decode(payload: bytes) -> Call:
    """A stored call.

    Raises:
        ValueError: it is none; says why.
    """
    try:
        return msgspec.msgpack.decode(payload, type=Call)
    except UNREADABLE as error:
        raise ValueError(f"{len(payload)} bytes are no call: {error}") from error
