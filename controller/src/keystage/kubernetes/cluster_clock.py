"""The API server's clock, by which objects carry their times, on a machine whose own clock may be set.

Before it: `client.Cluster` hands over the `Date` of every answer. After it: whoever compares times of
objects, or waits. Between two answers it runs with the monotonic clock: setting the machine's clock, by hours
in either direction, moves it not at all. Thread-safe.

With D the whole seconds an answer tells, it was made in D .. D + 1 by the server's clock, and between sending
(s) and reading (r) by ours: so the offset lies in D - r .. D + 1 - s, and is moved into that, no further.
"""

from __future__ import annotations

import email.utils
import threading
import time


class ClusterClock:
    """One server's clock.

    Args:
        wall_s: Unix seconds now, as long as no answer has told better; None: this machine's.
    """

    def __init__(self, wall_s: float | None = None) -> None:
        self._lock = threading.Lock()
        self._offset_s = (time.time() if wall_s is None else wall_s) - time.monotonic()

    def now_s(self) -> float:
        """Unix seconds."""
        return time.monotonic() + self._offset_s

    def hear(self, date: str | None, sent_s: float, read_s: float) -> None:
        """Takes in an answer; one without a date that can be read says nothing.

        Args:
            date: its `Date` (RFC 9110).
            sent_s: `time.monotonic` when the request was sent.
            read_s: the same when the answer's head was read.
        """
        told = email.utils.parsedate_tz(date) if date else None
        if told is None:
            return
        try:
            told_s = float(email.utils.mktime_tz(told))
        except (ValueError, OverflowError):
            return
        with self._lock:
            self._offset_s = max(told_s - read_s, min(told_s + 1 - sent_s, self._offset_s))
