"""The newest report of the controller, kept as it came, and whoever waits for the next one.

Before it: the controller's `Audience` brings reports to the supervisor, or to every gateway on
Kubernetes. After it: the gateway serves them. Reports are kept in memory only, encoded, and of each
no more is read than which one it is. It belongs to one event loop. It must not interpret a report.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec

from keystage.observability.api import STALE_S
from keystage.wire.unreadable import UNREADABLE

MAX_REPORT_BYTES = 32 << 20
"""A report of a thousand stages with 64 replicas each takes some 6 MB."""
Since = tuple[str, int] | None
"""Controller and number of a report, None for none."""


class NoReport(ValueError):
    """What came is no report."""


class Stamp(msgspec.Struct, frozen=True):
    """Which report it is: its controller, its number, and when the controller looked (Unix seconds)."""

    controller: str
    number: int
    at_s: float

    @property
    def since(self) -> tuple[str, int]:
        """As readers name the report that they have."""
        return self.controller, self.number


def stamp_of(body: bytes) -> Stamp:
    """Which report it is.

    Raises:
        NoReport: it does not say.
    """
    try:
        return msgspec.json.decode(body, type=Stamp)
    except UNREADABLE as error:
        raise NoReport(f"no report: {error}") from error


class Board:
    """Keeps one report.

    Of one controller the one with the highest number counts. Of two controllers the one that looked
    last: while one takes over from another, what the other sent late must not come back. One that is
    silent for `STALE_S` gives way to any other, so that clocks that differ do no harm for longer.
    """

    def __init__(self) -> None:
        self._body: bytes | None = None
        self._stamp: Stamp | None = None
        self._taken_at_s = 0.0
        self._changed = asyncio.Event()

    def put(self, body: bytes) -> bool:
        """Takes a report.

        Args:
            body: JSON of a `Report`.

        Returns:
            Whether it is the newest: it is kept then.

        Raises:
            NoReport: it does not say whose report it is and which one; or it is too large.
        """
        if len(body) > MAX_REPORT_BYTES:
            raise NoReport(f"a report of {len(body)} bytes, at most {MAX_REPORT_BYTES} are taken")
        stamp = stamp_of(body)
        if not self._is_newer(stamp):
            return False
        self._body, self._stamp, self._taken_at_s = body, stamp, time.monotonic()
        self._changed.set()
        self._changed = asyncio.Event()
        return True

    def newest(self, since: Since) -> bytes | None:
        """The report there is, None where there is none or it is the one named."""
        if self._stamp is None or self._stamp.since == since:
            return None
        return self._body

    async def wait(self, since: Since, wait_s: float) -> bytes | None:
        """Waits until there is a report other than the one named.

        Args:
            since: the one that the reader has, None: any will do.
            wait_s: seconds at most.

        Returns:
            None where there was none in time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, wait_s)):
                while self.newest(since) is None:
                    await self._changed.wait()
        return self.newest(since)

    def _is_newer(self, stamp: Stamp) -> bool:
        known = self._stamp
        if known is None:
            return True
        if stamp.controller == known.controller:
            return stamp.number > known.number
        return stamp.at_s > known.at_s or time.monotonic() - self._taken_at_s > STALE_S
