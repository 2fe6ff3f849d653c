"""The control loop: observe, decide, log, apply, again.

Before it: `app` puts platform, settings and log together. After it: the decisions log, and `telling`, which
is handed every tick. It is synchronous and does one thing at a time. A `PlatformError` is the only failure it
knows: the world keeps the numbers stated last, and the loop tries again later and later. Everything else is a
bug, ends the process, and the supervisor starts a new one, which continues without a bump.
"""

from __future__ import annotations

import logging
import threading
import time

import msgspec

from keystage.controller.decisions import DecisionLog, Record
from keystage.controller.domain.decision import Decision
from keystage.controller.domain.platform import Platform, PlatformError
from keystage.controller.domain.state import PolicyState
from keystage.controller.metrics import Counts
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.telling import Telling
from keystage.wire.upkeep import Upkeep

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 5.0

logger = logging.getLogger(__name__)


class Loop:
    """One controller at work.

    Args:
        platform: the world.
        settings: the policy's settings.
        log: where every decision goes.
        tick_s: seconds from one observation to the next; nothing depends on its value.
        telling: is handed every tick for those who look on, None: nobody does.
        counts: counts every tick for Prometheus, None: nobody does.
    """

    def __init__(
        self,
        platform: Platform,
        settings: PolicySettings,
        log: DecisionLog,
        *,
        tick_s: float,
        telling: Telling | None = None,
        counts: Counts | None = None,
    ) -> None:
        self._platform = platform
        self._settings = settings
        self._log = log
        self._tick_s = tick_s
        self._telling = telling
        self._counts = counts
        self._state = PolicyState()
        self._failures = 0

    def run(self, stop: threading.Event) -> None:
        """Ticks until `stop` is set."""
        upkeep = Upkeep()
        while not stop.is_set():
            began_s = time.monotonic()
            wait_s = self._tick_s if self.tick() is not None else self.backoff_s
            upkeep.now_and_then()
            stop.wait(max(0.0, began_s + wait_s - time.monotonic()))

    @property
    def backoff_s(self) -> float:
        """Seconds to wait after the failures so far."""
        return min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(10, max(0, self._failures - 1)))

    def tick(self) -> Decision | None:
        """One cycle; None when the platform failed."""
        before = self._state
        try:
            snapshot = self._platform.observe()
        except PlatformError as error:
            self._tell(None, self._fail("cannot observe", error))
            return None
        decision = decide(self._settings, snapshot, before)
        self._state = decision.state
        record = Record(settings=self._settings, before=before, snapshot=snapshot, decision=decision)
        self._write(record)
        for action in decision.actions:
            logger.info("%s", action)
        try:
            self._platform.apply(decision.actions)
        except PlatformError as error:
            self._state = msgspec.structs.replace(decision.state, published=before.published)
            self._tell(record, self._fail("cannot apply", error))
            return None
        if self._failures:
            logger.info("the platform answers again after %d failures", self._failures)
        self._failures = 0
        self._tell(record, "")
        return decision

    def _fail(self, what: str, error: PlatformError) -> str:
        """Counts a failure; returns it in words."""
        self._failures += 1
        logger.warning("%s, holding the last decision for %.1f s: %s", what, self.backoff_s, error)
        return f"{what}: {error}"

    def _tell(self, record: Record | None, trouble: str) -> None:
        if self._counts is not None:
            self._counts.hear(record, trouble)
        if self._telling is not None:
            self._telling.hear(record, trouble)

    def _write(self, record: Record) -> None:
        try:
            self._log.append(record)
        except OSError as error:  # a full disk must not stop the steering
            logger.warning("decision not logged: %s", error)
