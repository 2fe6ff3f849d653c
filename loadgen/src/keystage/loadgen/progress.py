"""Tells how a replay is going: a panel on a terminal, a plain line now and then elsewhere.

Fed with every request that has ended. A request that is due and has not ended is in flight, whether it
was sent in time or not: what a late generator holds back is not hidden. Percentiles so far come from
histograms (`histogram`), failed requests count as infinitely late. What is shown is made by a thread once
a second, a line or two, so that the event loop that keeps the schedule loses less than a millisecond to it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from keystage.loadgen import measures
from keystage.loadgen.histogram import Histogram
from keystage.loadgen.sender import Progress, Row
from keystage.loadgen.sheets import duration

LINE_EVERY_S = 10.0
PANEL_EVERY_S = 1.0
RATE_WINDOW_S = 10.0

Times: TypeAlias = Sequence[float] | np.typing.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        at_s: since its start.
        total: requests in the schedule, 0 where there is none.
        sent: due so far (ended ones, where the schedule is not known).
        rate_rps: sent over the last `RATE_WINDOW_S`, None before anything was due.
        in_flight: due and not ended.
        served: complete answers.
        failed: the rest of what ended.
        p50_s: latency from the scheduled time, of what ended; None where it falls on a failure.
        p99_s: likewise.
        lag_p99_s: send lag of what ended, None before.
    """

    at_s: float
    total: int
    sent: int
    rate_rps: float | None
    in_flight: int
    served: int
    failed: int
    p50_s: float | None
    p99_s: float | None
    lag_p99_s: float | None


class Tally:
    """Counts what ended; pure, the time is given.

    Args:
        total: requests in the schedule.
        times_s: scheduled times, ascending; empty where they are not known.
    """

    def __init__(self, total: int, times_s: Times = ()) -> None:
        self._total = total
        self._times_s = np.asarray(times_s, dtype=np.float64)
        self._latency, self._lag = Histogram(), Histogram()
        self._served = self._failed = 0
        self._seen: collections.deque[tuple[float, int]] = collections.deque([(0.0, 0)])

    def ended(self, row: Row) -> None:
        """Takes a request that has ended."""
        self._lag.record(row.sent_s - row.scheduled_s)
        if row.is_served:
            self._served += 1
            self._latency.record(measures.latency_s(row))
        else:
            self._failed += 1
            self._latency.fail()

    def snapshot(self, at_s: float) -> Snapshot:
        """How things stand; moments ascend from call to call."""
        ended = self._served + self._failed
        sent = max(int(np.searchsorted(self._times_s, at_s, side="right")), ended)
        seen = self._seen
        seen.append((at_s, sent))
        while len(seen) > 2 and seen[1][0] <= at_s - RATE_WINDOW_S:
            seen.popleft()
        span_s = at_s - seen[0][0]
        return Snapshot(
            at_s=at_s,
            total=self._total,
            sent=sent,
            rate_rps=(sent - seen[0][1]) / span_s if span_s > 0 else None,
            in_flight=sent - ended,
            served=self._served,
            failed=self._failed,
            p50_s=self._latency.quantile(0.5),
            p99_s=self._latency.quantile(0.99),
            lag_p99_s=self._lag.quantile(0.99),
        )


def line(what: str, now: Snapshot) -> str:
    """A snapshot in one line."""
    rate = "-" if now.rate_rps is None else f"{now.rate_rps:.1f}/s"
    of = f" of {now.total}" if now.total else ""
    ended = now.served + now.failed

    def late(value: float | None) -> str:
        return duration(value) if value is not None or not ended else "failed"

    return (
        f"{what}: {now.at_s:.0f} s, sent {now.sent}{of} ({rate}), in flight {now.in_flight}, "
        f"served {now.served}, failed {now.failed}, p50 {late(now.p50_s)}, p99 {late(now.p99_s)}, "
        f"lag p99 {duration(now.lag_p99_s)}"
    )


@contextlib.contextmanager
def following(
    console: Console,
    total: int,
    what: str,
    *,
    times_s: Times = (),
    start_s: float | None = None,
) -> Iterator[Progress]:
    """Yields a function to call with every request that has ended.

    Args:
        console: where it is shown.
        total: requests in the schedule.
        what: name of the run.
        times_s: scheduled times, for what is in flight.
        start_s: `time.monotonic()` of the start of the run; now, if None.
    """
    begun_s = time.monotonic() if start_s is None else start_s
    tally = Tally(total, times_s)
    end = threading.Event()

    def told() -> str:
        return line(what, tally.snapshot(max(time.monotonic() - begun_s, 0.0)))

    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as panel:

            def show() -> None:
                panel.update(Text(told()), refresh=True)

            with _every(PANEL_EVERY_S, show, end):
                yield tally.ended
            show()
    else:

        def show() -> None:
            console.print(told())

        with _every(LINE_EVERY_S, show, end):
            yield tally.ended
        show()


@contextlib.contextmanager
def _every(seconds: float, act: Callable[[], None], end: threading.Event) -> Iterator[None]:
    def run() -> None:
        while not end.wait(seconds):
            act()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
