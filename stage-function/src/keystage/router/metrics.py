"""The router's counters as Prometheus samples; names and meanings are in `wire.metrics`. Pure."""

from __future__ import annotations

from itertools import accumulate

from keystage.router.api import RouterStats
from keystage.wire.metrics import Sample


def samples(stats: RouterStats) -> list[Sample]:
    """Everything `GET /metrics` shows of one router."""
    own = {"pipeline": stats.pipeline}
    gathered = [
        Sample("keystage_requests", own, stats.requests),
        Sample("keystage_requests_completed", own, stats.completed),
        Sample("keystage_replayed_tokens", own, stats.replayed_tokens),
        Sample("keystage_session_moves", own, stats.moves),
    ]
    gathered += [
        Sample("keystage_requests_refused", {**own, "reason": reason}, count)
        for reason, count in stats.refused.items()
    ]
    for counters in stats.stages:
        labels = {**own, "stage": str(counters.stage)}
        ready = sum(r.state == "ready" and counters.stage in r.stages for r in stats.replicas)
        gathered += [
            Sample("keystage_stage_arrivals", labels, counters.arrivals),
            Sample("keystage_stage_queue_items", labels, counters.queue),
            Sample("keystage_stage_in_flight_items", labels, counters.in_flight),
            Sample("keystage_stage_wait_seconds", labels, counters.wait_sum_s),
            Sample("keystage_stage_service_seconds", labels, counters.service_sum_s),
            Sample("keystage_stage_ready_replicas", labels, ready),
            Sample("keystage_stage_due_items", labels, counters.due),
            Sample("keystage_stage_late_items", labels, counters.late),
            Sample("keystage_stage_dropped_items", labels, counters.dropped),
            Sample(
                "keystage_stage_batch_items", labels, counters.waits, tuple(accumulate(counters.batch_sizes))
            ),
        ]
    for replica in stats.replicas:
        labels = {**own, "replica": replica.replica}
        gathered += [
            Sample("keystage_replica_served_seconds", labels, replica.served_s),
            Sample("keystage_replica_idle_seconds", labels, replica.idle_s),
        ]
    return gathered
