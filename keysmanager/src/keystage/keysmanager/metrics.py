"""What the daemon counts, and the samples `GET /metrics` makes of it.

Filled by `daemon` as outcomes come in; names and kinds are in `keystage.wire.metrics`. This module
must not decide what a number means for anybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from keystage.keysmanager.api import NodeStatus
from keystage.wire.metrics import Sample, expose
from keystage.wire.start_counts import StartCounts


class Counts(StartCounts):
    """Everything that only grows."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: Counter[int] = Counter()
        self.gives: Counter[str] = Counter()
        self.loads: Counter[str] = Counter()
        self.load_bytes: Counter[str] = Counter()
        self.load_s: dict[str, float] = {}
        self.load_failures = 0
        self.evictions = 0
        self.deaths = 0

    def loaded(self, source: str, nbytes: int, seconds: float) -> None:
        """Parameters were loaded."""
        self.loads[source] += 1
        self.load_bytes[source] += nbytes
        self.load_s[source] = self.load_s.get(source, 0.0) + seconds

    def samples(self, node: str) -> Iterator[Sample]:
        """One sample a label set."""
        yield from super().samples(node)
        for status, number in self.refusals.items():
            yield Sample("keystage_start_refusals", {"node": node, "reason": str(status)}, number)
        for source, number in self.gives.items():
            yield Sample("keystage_parameter_gives", {"node": node, "source": source}, number)
        for source, number in self.loads.items():
            labels = {"node": node, "source": source}
            yield Sample("keystage_loads", labels, number)
            yield Sample("keystage_load_bytes", labels, self.load_bytes[source])
            yield Sample("keystage_load_seconds", labels, self.load_s[source])
        own = {"node": node}
        yield Sample("keystage_load_failures", own, self.load_failures)
        yield Sample("keystage_holder_evictions", own, self.evictions)
        yield Sample("keystage_holder_deaths", own, self.deaths)


def text(status: NodeStatus, counts: Counts, restarts: int) -> bytes:
    """Prometheus text of a node.

    Args:
        status: what is where.
        counts: what has happened.
        restarts: of the fork server.
    """
    return expose([*counts.samples(status.node), *_present(status, restarts)])


def _present(status: NodeStatus, restarts: int) -> Iterator[Sample]:
    own = {"node": status.node}
    yield Sample("keystage_holders", own, sum(h.state == "ready" for h in status.holders))
    held: dict[tuple[str, str], tuple[int, int]] = {}
    for holder in status.holders:
        key = (holder.pipeline, str(holder.stage))
        nbytes, claims = held.get(key, (0, 0))
        held[key] = (nbytes + holder.nbytes, claims + holder.claims)
    for (pipeline, stage), (nbytes, claims) in held.items():
        labels = {"node": status.node, "pipeline": pipeline, "stage": stage}
        yield Sample("keystage_holder_bytes", labels, nbytes)
        yield Sample("keystage_holder_claims", labels, claims)
    memory = status.memory
    yield Sample("keystage_memory_limit_bytes", own, memory.limit_bytes)
    yield Sample("keystage_memory_used_bytes", own, memory.used_bytes)
    yield Sample("keystage_memory_budget_bytes", own, memory.budget_bytes)
    yield Sample("keystage_segment_bytes", own, memory.segment_bytes)
    yield Sample("keystage_standbys", own, len(status.standbys))
    yield Sample("keystage_fork_server_restarts", own, restarts)
    for gpu in status.gpus:
        yield Sample("keystage_gpu_free_bytes", {"node": status.node, "gpu": gpu.uuid}, gpu.free_bytes)
