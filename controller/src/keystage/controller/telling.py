"""Tells an audience what the loop saw and decided, on a thread of its own.

Before it: `loop` hands every tick on and goes on at once. After it: `observability.reporting` makes
a report of it, once a second at most, and an `Audience` delivers it. Whatever happens here, steering
goes on as if nobody listened: an audience that is slow, or away, costs reports and nothing else;
a fault is logged and the next tick tried again. It must not decide.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import threading
import time
from collections import deque

import msgspec

from keystage.controller.audience import Audience, Unheard
from keystage.controller.decisions import Record
from keystage.observability.reporting import Reporter

EVERY_S = 1.0
MOST_TICKS = 64
"""Ticks that wait to be told; beyond, the oldest are forgotten: what they changed is missing in the log."""
JOIN_S = 3.0
QUIET_S = 60.0
"""Between two log lines about faults."""
logger = logging.getLogger(__name__)


def version() -> str:
    """Keystage's, empty where it is not installed as a package."""
    try:
        return importlib.metadata.version("keystage")
    except importlib.metadata.PackageNotFoundError:
        return ""


class Telling:
    """The thread between a loop and its audience.

    Args:
        controller: name of this controller, new with each of its starts.
        audience: who is told.
        every_s: seconds from one report to the next, at least.
    """

    def __init__(self, controller: str, audience: Audience, *, every_s: float = EVERY_S) -> None:
        self._reporter = Reporter(controller, version())
        self._audience = audience
        self._every_s = every_s
        self._ticks: deque[tuple[Record | None, str]] = deque(maxlen=MOST_TICKS)
        self._heard = threading.Event()
        self._stop = threading.Event()
        self._newest: Record | None = None
        self._trouble = ""
        self._failures = 0
        self._said_at_s = -math.inf
        self._thread = threading.Thread(target=self._run, name="telling", daemon=True)

    def start(self) -> None:
        """Begins to tell."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the report in progress, within a bound."""
        self._stop.set()
        self._heard.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        self._audience.close()

    def hear(self, record: Record | None, trouble: str = "") -> None:
        """Takes in a tick; returns at once.

        Args:
            record: what was seen and decided, None where nothing could be seen.
            trouble: why it could not be seen or carried out, in words, empty where it was.
        """
        self._ticks.append((record, trouble))
        self._heard.set()

    def _run(self) -> None:
        told_at_s = -math.inf
        while True:
            self._heard.wait()
            if self._stop.wait(max(0.0, told_at_s + self._every_s - time.monotonic())):
                return
            self._heard.clear()
            told_at_s = time.monotonic()
            try:
                self._tell()
            except Unheard as error:
                self._fail("%s", error)
            except Exception:  # noqa: BLE001
                # Whatever it is: were this thread to end, nobody would see anything from then on.
                self._fail("a report could not be made", None)
            else:
                if self._failures:
                    logger.info("reports arrive again, after %d that did not", self._failures)
                self._failures = 0

    def _tell(self) -> None:
        while self._ticks:
            record, self._trouble = self._ticks.popleft()
            if record is not None:
                self._newest = record
                self._reporter.note(record)
        newest = self._newest
        at_s = newest.snapshot.at_s if newest is not None and not self._trouble else time.time()
        if not math.isfinite(at_s):
            at_s = time.time()
        self._audience.tell(msgspec.json.encode(self._reporter.report(newest, self._trouble, at_s)))

    def _fail(self, text: str, error: Unheard | None) -> None:
        self._failures += 1
        if time.monotonic() - self._said_at_s < QUIET_S:
            return
        self._said_at_s = time.monotonic()
        if error is not None:
            logger.warning("a report is not heard, and the steering goes on: %s", error)
        else:
            logger.exception("%s, and the steering goes on", text)
