"""Carries out what `ejection` decides: tells the core, the log and the event log. Used by `node`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from keystage.router.ejection import Ejection
from keystage.wire.events import EventLog

log = logging.getLogger("keystage.router")


class Core(Protocol):
    """What is asked of the core of a pipeline."""

    def worker_ready(self, address: str, now_s: float) -> None:
        """A worker takes work."""

    def worker_draining(self, address: str, now_s: float) -> None:
        """A worker takes nothing new."""


def rest(
    ejection: Ejection, core: Core, events: EventLog, name_of: Callable[[str], str], now_s: float
) -> None:
    """Workers that are slow beside their like are given nothing for a while, then are tried again."""
    out, back = ejection.judge(now_s)
    for address, why in out:
        log.warning("%s rests: %s", name_of(address), why)
        events.write("rests", replica=name_of(address), why=why)
        core.worker_draining(address, now_s)
    for address in back:
        log.info("%s is tried again", name_of(address))
        events.write("tried_again", replica=name_of(address))
        core.worker_ready(address, now_s)
