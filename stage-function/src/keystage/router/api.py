"""What the router tells others: counters for the controller, and its HTTP paths.

`GET /_/stats` answers `RouterStats` as JSON. Counters only ever grow within one `incarnation`;
readers take differences and start anew when the incarnation changes.
"""

from __future__ import annotations

import msgspec

STATS_PATH = "/_/stats"

BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the buckets in which batches are counted by size; the last bucket has none."""


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
        kv_blocks: its KV blocks, 0 for single-pass.
        kv_blocks_free: KV blocks that nobody holds.
        preemptions: cumulative preemptions on the paths it owns.
        served_s: seconds since it became ready.
        idle_s: seconds of these in which this router had given it nothing (single-pass).
        resting: whether it is slow beside its like and is given nothing for a while.
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
    kv_blocks: int = 0
    kv_blocks_free: int = 0
    preemptions: int = 0
    served_s: float = 0.0
    idle_s: float = 0.0
    resting: bool = False


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
        due: items with a stage deadline that left the stage or were given up there (single-pass).
        late: those of `due` that left it after that deadline.
        dropped: those of `due` that were refused there because they could not meet it.
        batch_sizes: batches by size: bucket i up to `BATCH_BOUNDS[i]`, and one for larger ones.
        batch_items: items of all of them together; one that is sent again counts again.
        handoff_sum_s: sum of seconds from sent to answered that were not compute (not looping).
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
    due: int = 0
    late: int = 0
    dropped: int = 0
    batch_sizes: list[int] = []
    batch_items: int = 0
    handoff_sum_s: float = 0.0


class TenantCounters(msgspec.Struct, frozen=True):
    """What became of one tenant's requests.

    Attributes:
        begun: requests whose turn came.
        work: of these, in tokens (looping) or requests.
        refused: requests refused for what waits, or for their deadline before their turn.
        waiting: requests that wait now; those under way too, where they keep their place until the answer.
    """

    begun: int
    work: float
    refused: int
    waiting: int


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
        late_copies: moves that waited for a copy of KV state in vain, and went on by replay.
        overdue_drains: workers that left with something of this router still in hand.
        set_apart: requests that ran apart from others because a worker had died with them.
        convicted: requests that were failed because workers died of them.
        rested: how often a worker that was slow beside its like was given nothing for a while.
        due: requests with an objective (their own deadline, or the pipeline's) that ended.
        in_time: those of `due` that met it; both are 0 where answers are not counted (`KEYSTAGE_METRICS=0`).
        stages: counters per stage.
        replicas: the workers.
        tenants: counters of those behind API keys.
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
    late_copies: int = 0
    overdue_drains: int = 0
    due: int = 0
    in_time: int = 0
    tenants: dict[str, TenantCounters] = {}
    set_apart: int = 0
    convicted: int = 0
    rested: int = 0
