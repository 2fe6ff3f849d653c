"""The router's counters as Prometheus samples; names and meanings are in `wire.metrics`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from keystage.router.api import RouterStats, StageCounters
from keystage.router.engine import Failure, QueueFull, TooLate
from keystage.router.idempotency import KeyStats
from keystage.router.served import Histogram, Served
from keystage.wire.metrics import Sample

_NONE_REFUSED = dict.fromkeys((QueueFull.code, TooLate.code, Failure.code), 0)
"""Refusals that people are called for are there from the start: a rate does not see a series' first value."""


def samples(stats: RouterStats, served: Served | None = None) -> list[Sample]:
    """Everything `GET /metrics` shows of one router.

    Args:
        stats: what the controller is told, too.
        served: what clients got, None: it is not counted.
    """
    own = {"pipeline": stats.pipeline}
    gathered = [
        Sample("keystage_requests", own, stats.requests),
        Sample("keystage_requests_completed", own, stats.completed),
        Sample("keystage_replayed_tokens", own, stats.replayed_tokens),
        Sample("keystage_session_moves", own, stats.moves),
        Sample("keystage_late_copies", own, stats.late_copies),
        Sample("keystage_overdue_drains", own, stats.overdue_drains),
        Sample("keystage_requests_set_apart", own, stats.set_apart),
        Sample("keystage_requests_convicted", own, stats.convicted),
        Sample("keystage_replica_rests", own, stats.rested),
    ]
    gathered += [
        Sample("keystage_requests_refused", {**own, "reason": reason}, count)
        for reason, count in {**_NONE_REFUSED, **stats.refused}.items()
    ]
    for tenant, counts in stats.tenants.items():
        labels = {**own, "tenant": tenant}
        gathered += [
            Sample("keystage_tenant_requests", labels, counts.begun),
            Sample("keystage_tenant_work", labels, counts.work),
            Sample("keystage_tenant_refused", labels, counts.refused),
            Sample("keystage_tenant_waiting_requests", labels, counts.waiting),
        ]
    is_looping = stats.execution == "looping"
    if served is not None:
        gathered += _of_clients(own, served, is_looping=is_looping)
    for counters in stats.stages:
        ready = sum(r.state == "ready" and counters.stage in r.stages for r in stats.replicas)
        labels = {**own, "stage": str(counters.stage)}
        gathered += _of_stage(labels, counters, ready)
        if not is_looping:
            gathered += _of_batches(labels, counters)
    for replica in stats.replicas:
        labels = {**own, "replica": replica.replica}
        gathered.append(Sample("keystage_replica_served_seconds", labels, replica.served_s))
        gathered.append(Sample("keystage_replica_is_resting", labels, replica.resting))
        if not is_looping:
            gathered.append(Sample("keystage_replica_idle_seconds", labels, replica.idle_s))
    return gathered


def of_keys(pipeline: str, keys: KeyStats) -> Iterator[Sample]:
    """Requests with an `Idempotency-Key`, and what of them is journaled."""
    own = {"pipeline": pipeline}
    for found, count in keys.asked.items():
        yield Sample("keystage_keyed_requests", {**own, "found": found}, count)
    yield Sample("keystage_keyed_records", own, keys.records)
    yield Sample("keystage_keyed_bytes", own, keys.nbytes)
    if keys.journal is not None:
        yield Sample("keystage_journal_is_away", own, keys.journal.is_away)
        yield Sample("keystage_journal_losses", own, keys.journal.losses)
        yield Sample("keystage_journal_round_trips", own, keys.journal.round_trips)
        yield Sample("keystage_journal_tokens", own, keys.journal.tokens)
        yield Sample("keystage_journal_taken_over", own, keys.journal.taken_over)
        yield Sample("keystage_journal_fenced", own, keys.journal.fenced)


def of_traces(sent: int, dropped: int) -> list[Sample]:
    """What became of the spans of a process that traces."""
    return [Sample("keystage_spans_sent", {}, sent), Sample("keystage_spans_dropped", {}, dropped)]


def _of_clients(own: dict[str, str], served: Served, *, is_looping: bool) -> Iterator[Sample]:
    yield Sample("keystage_requests_due", own, served.due)
    yield Sample("keystage_requests_in_time", own, served.in_time)
    yield _histogram("keystage_request_seconds", own, served.answer)
    if is_looping:
        yield _histogram("keystage_first_token_seconds", own, served.first_token)


def _histogram(name: str, labels: dict[str, str], of: Histogram) -> Sample:
    return Sample(name, labels, of.total, tuple(accumulate(of.counts)), tuple(of.exemplars))


def _of_stage(labels: dict[str, str], counters: StageCounters, ready: int) -> list[Sample]:
    return [
        Sample("keystage_stage_arrivals", labels, counters.arrivals),
        Sample("keystage_stage_arrival_gap_seconds", labels, counters.gap_sum_s),
        Sample("keystage_stage_arrival_gap_seconds_squared", labels, counters.gap_sq_sum_s2),
        Sample("keystage_stage_queue_items", labels, counters.queue),
        Sample("keystage_stage_in_flight_items", labels, counters.in_flight),
        Sample("keystage_stage_waits", labels, counters.waits),
        Sample("keystage_stage_wait_seconds", labels, counters.wait_sum_s),
        Sample("keystage_stage_services", labels, counters.services),
        Sample("keystage_stage_service_seconds", labels, counters.service_sum_s),
        Sample("keystage_stage_sojourn_seconds", labels, counters.sojourn_sum_s),
        Sample("keystage_stage_ready_replicas", labels, ready),
        Sample("keystage_stage_due_items", labels, counters.due),
        Sample("keystage_stage_late_items", labels, counters.late),
        Sample("keystage_stage_dropped_items", labels, counters.dropped),
    ]


def _of_batches(labels: dict[str, str], counters: StageCounters) -> Iterator[Sample]:
    """What is counted where the router makes batches: a path's owner makes the waves of looping pipelines."""
    sizes = tuple(accumulate(counters.batch_sizes))
    yield Sample("keystage_stage_handoff_seconds", labels, counters.handoff_sum_s)
    yield Sample("keystage_stage_batch_items", labels, counters.batch_items, sizes)
