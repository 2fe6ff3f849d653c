"""The engine: a heap of events in order of (time, priority, sequence).

Before it: parts of the world push events. After it: `run_until` hands each to its function in order.
It knows neither stages nor replicas. Events of one moment are handled by priority (what ends comes
before what begins), then in the order they were pushed. An event handled is one pop of the heap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from heapq import heappop
from typing import Any

from keystage.simulator.eventlog import EventLog

Event = tuple[float, int, int, Callable[[float, Any], None], Any]

DONE, COMES, OUTSIDE = range(3)
"""Priorities: a batch is done, items come, the world changes (failures)."""


class Engine:
    """Clock and heap.

    Attributes:
        heap: events; parts push to it directly, for speed.
        order: gives each event its sequence number.
        now_s: time of the last event, or up to which it ran.
        events: events handled.
        log: event log, None for none.
    """

    __slots__ = ("_until_s", "events", "heap", "log", "now_s", "order")

    def __init__(self, log: EventLog | None = None) -> None:
        self.heap: list[Event] = []
        self.order = itertools.count()
        self.now_s = 0.0
        self.events = 0
        self.log = log
        self._until_s = 0.0

    def run_until(self, until_s: float) -> None:
        """Handles every event up to and including a time; stops earlier after `stop`."""
        heap, handled = self.heap, 0
        self._until_s = until_s
        while heap and heap[0][0] <= self._until_s:
            at_s, _, _, handle, what = heappop(heap)
            self.now_s = at_s
            handled += 1
            handle(at_s, what)
        self.events += handled
        if self._until_s == until_s:
            self.now_s = until_s

    def stop(self) -> None:
        """Makes `run_until` return after the event at hand."""
        self._until_s = -math.inf
