"""Workers that this router refused or has not met yet, and for how long it bothers with them. Pure.

Used by `node`. A worker that is asked who it is answers with all it has to say: one that will never fit (its
bundle was made anew while an older one is served) would be asked again for each of those messages.
"""

from __future__ import annotations

import logging
from collections.abc import Container

log = logging.getLogger("keystage.router")

PAUSE_S = 5.0
"""How long a refused worker is not asked again; it may have been started anew at the same address."""
MOST = 4096
"""Addresses that are remembered; one forgotten is asked again."""
MOST_GIVEN_UP = 1024
"""Addresses whose deaths are counted; one forgotten counts from 0 again, and is introduced anew."""


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


class Strangers:
    """Addresses that were asked who they are and are no worker of ours (yet).

    What a worker sent before its end may be read after it: whoever is asked then never answers, and the
    connection to it would stay for good.
    """

    def __init__(self) -> None:
        self._asked_s: dict[str, float] = {}

    def asked(self, address: str, now_s: float) -> None:
        """One was asked just now."""
        self._asked_s[address] = now_s

    def leave(self, workers: Container[str], now_s: float) -> list[str]:
        """Those whose time is over and that did not become workers; they are strangers no longer."""
        over = [address for address, at_s in self._asked_s.items() if now_s - at_s >= PAUSE_S]
        for address in over:
            del self._asked_s[address]
        return [address for address in over if address not in workers]


class GivenUp:
    """How often each address was given up as a worker: what it says from before then is void."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}

    def times(self, address: str) -> int:
        """How often, as far as it is remembered."""
        return self._times.get(address, 0)

    def add(self, address: str) -> None:
        """Once more."""
        self._times[address] = self._times.pop(address, 0) + 1
        if len(self._times) > MOST_GIVEN_UP:
            del self._times[next(iter(self._times))]
