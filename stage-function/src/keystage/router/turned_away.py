"""Workers that this router refused, and for how long it does not listen to them. Pure.

Used by `node`. A worker that is asked who it is answers with all it has to say: one that will never fit (its
bundle was made anew while an older one is served) would be asked again for each of those messages.
"""

from __future__ import annotations

import logging

log = logging.getLogger("keystage.router")

PAUSE_S = 5.0
"""How long a refused worker is not asked again; it may have been started anew at the same address."""
MOST = 4096
"""Addresses that are remembered; one forgotten is asked again."""


class TurnedAway:
    """Refused workers by address."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._reasons: dict[str, str] = {}

    def add(self, address: str, reason: str, now_s: float) -> None:
        """One is refused; said in the log where it is news."""
        self._until_s[address] = now_s + PAUSE_S
        if self._reasons.pop(address, "") != reason:
            log.error("refused a worker: %s", reason)
        self._reasons[address] = reason
        if len(self._reasons) > MOST:
            oldest = next(iter(self._reasons))
            del self._reasons[oldest], self._until_s[oldest]

    def is_silenced(self, address: str, now_s: float) -> bool:
        """Whether it was refused a moment ago."""
        return now_s < self._until_s.get(address, 0.0)
