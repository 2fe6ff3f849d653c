"""What the router tells others: counters for the controller, and its HTTP paths.

`GET /_/stats` answers `RouterStats` as JSON. Counters only ever grow within one `incarnation`;
readers take differences and start anew when the incarnation changes.
"""

from __future__ import annotations

import msgspec

STATS_PATH = "/_/stats"


class ReplicaStats(msgspec.Struct, frozen=True):
    """One worker as the router sees it.

    Attributes:
        replica: worker name.
        stages: hosted stage indices.
        state: `starting` (Hello, not Ready), `ready`, `draining`.
        ready_at_s: seconds on the router's monotonic clock when it became ready, 0 before.
        slots: granted slots.
        held_slots: slots in use by this router.
        busy_s: cumulative compute seconds by hosted stage.
        batches: cumulative batches by hosted stage.
        rows: cumulative rows by hosted stage.
    """

    replica: str
    stages: tuple[int, ...]
    state: str
    ready_at_s: float
    slots: int
    held_slots: int
    busy_s: list[float]
    batches: list[int]
    rows: list[int]


class StageCounters(msgspec.Struct, frozen=True):
    """Cumulative statistics of one stage. Sums allow means and second moments over any window.

    Attributes:
        stage: stage index.
        arrivals: items that arrived at the stage's queue.
        gap_sum_s: sum of inter-arrival times.
        gap_sq_sum_s2: sum of squared inter-arrival times.
        queue: items waiting now.
        in_flight: items being served now.
        waits: items that left the queue.
        wait_sum_s: sum of their waiting times.
        services: items served.
        service_sum_s: sum of service times: compute of the batch an item was in (single-pass),
            residence of the session from bound to finished (looping).
        service_sq_sum_s2: sum of squared service times.
        sojourn_sum_s: sum of wait + service of served items.
    """

    stage: int
    arrivals: int
    gap_sum_s: float
    gap_sq_sum_s2: float
    queue: int
    in_flight: int
    waits: int
    wait_sum_s: float
    services: int
    service_sum_s: float
    service_sq_sum_s2: float
    sojourn_sum_s: float


class RouterStats(msgspec.Struct, frozen=True):
    """Answer of `GET /_/stats`.

    Attributes:
        pipeline: pipeline name.
        incarnation: changes whenever the router restarts.
        at_s: router's monotonic clock in seconds.
        wall_s: the same moment in Unix seconds.
        execution: `looping` or `single-pass`. In a looping pipeline arrivals and queue are counted
            at entry only (stage 0); servers are replicas x slots.
        requests: requests accepted.
        completed: requests answered completely.
        refused: requests refused, by reason.
        replayed_tokens: tokens computed again after a worker's death, drain or a move.
        moves: sessions moved.
        stages: counters per stage.
        replicas: the workers.
    """

    pipeline: str
    incarnation: str
    at_s: float
    wall_s: float
    execution: str
    requests: int
    completed: int
    refused: dict[str, int]
    replayed_tokens: int
    moves: int
    stages: list[StageCounters]
    replicas: list[ReplicaStats]
