"""Whether a run measured the target, or the generator. Pure; `report` asks it of every run.

Latencies count from the scheduled time, so a generator that is late makes the target look slower and
never faster. But a run whose generator was late did not offer the load that was asked, and its
latencies hold the generator's. Such a run is marked invalid, with the reasons in words.

Bound on the send lag (sent minus scheduled), on its p99: 10 % of the median time to the first token
(whole answer, where answers are not streamed), at least 5 ms, at most 1 s:

    bound = min(max(0.1 * p50, 0.005), 1)

The median, since p99 over p99 would let an overloaded target excuse a late generator. 5 ms is what the
event loop of a machine with other work keeps; 1 s moves arrivals so far that bursts are others.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from keystage.loadgen import measures
from keystage.loadgen.sender import Row

LAG_SHARE = 0.1
LAG_FLOOR_S = 0.005
LAG_CEILING_S = 1.0

_OWN_FAULTS = ("Too many open files", "Cannot assign requested address", "Cannot allocate memory")
"""Failures before any answer that are the generator's machine's, not the target's."""


def lag_bound_s(rows: Sequence[Row], *, streaming: bool) -> float:
    """Largest p99 of the send lag at which the run stands; 5 ms where nothing was served."""
    of = measures.ttft_s if streaming else measures.latency_s
    values = [value for row in rows if row.is_served and (value := of(row)) is not None]
    median_s = measures.percentiles(values).p50 or 0.0
    return min(max(LAG_SHARE * median_s, LAG_FLOOR_S), LAG_CEILING_S)


def faults(rows: Sequence[Row], planned: int, bound_s: float) -> list[str]:
    """Why the run is no measurement of the target, in words; empty if it is one.

    Args:
        rows: what was sent.
        planned: requests in the schedule.
        bound_s: of `lag_bound_s`.
    """
    found = []
    if len(rows) != planned:
        found.append(f"{len(rows)} of the schedule's {planned} requests were sent")
    lag = measures.lags(rows)
    if lag.p99 is not None and lag.p99 > bound_s:
        found.append(
            f"send lag p99 is {1000 * lag.p99:.1f} ms, above {1000 * bound_s:.1f} ms (10 % of the median "
            "answer, at least 5 ms, at most 1 s): the machine was too busy, or the rate too high for it"
        )
    lost = [row.error for row in rows if row.error_class == "generator"]
    if lost:
        found.append(f"of {len(lost)} requests it is not known what became of them: {lost[0]}")
    own = collections.Counter(fault for row in rows if row.error and (fault := _own_fault(row)))
    found += [f"{count} requests failed at the generator itself: {told}" for told, count in own.items()]
    return found


def _own_fault(row: Row) -> str:
    """What failed on the generator's side, empty if nothing did; what a server says of itself is no such."""
    if row.status or row.error_class == "generator":
        return ""
    return next((fault for fault in _OWN_FAULTS if fault in row.error), "")


def stall_note(rows: Sequence[Row]) -> str:
    """Tells of a single long stall of the generator, which a p99 over many requests does not show."""
    most_s = measures.lags(rows).max or 0.0
    if most_s <= LAG_CEILING_S:
        return ""
    return f"a request was sent {most_s:.1f} s late: the generator stood still for a while"
