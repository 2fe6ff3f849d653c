"""What the daemon counts, and the samples `GET /metrics` makes of it.

Filled by `daemon` as outcomes come in; names and kinds are in `keystage.wire.metrics`. This module
must not decide what a number means for anybody.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator

from keystage.keysmanager.api import NodeStatus
from keystage.wire.metrics import START_BOUNDS_S, Sample, expose

MOST_SERIES = 1024
"""Histograms of starts that are kept: of some fifty pipelines, in every way they start."""


class Counts:
    """Everything that only grows."""

    def __init__(self) -> None:
        self.starts: Counter[str] = Counter()
        self.refusals: Counter[int] = Counter()
        self.loads: Counter[str] = Counter()
        self.load_bytes: Counter[str] = Counter()
        self.load_s: dict[str, float] = {}
        self.load_failures = 0
        self.evictions = 0
        self.deaths = 0
        self._phases: dict[tuple[str, str, str], tuple[list[int], float]] = {}

    def loaded(self, source: str, nbytes: int, seconds: float) -> None:
        """Parameters were loaded."""
        self.loads[source] += 1
        self.load_bytes[source] += nbytes
        self.load_s[source] = self.load_s.get(source, 0.0) + seconds

    def reached(self, pipeline: str, via: str, phase: str, seconds: float) -> None:
        """A replica reached a phase of its start, `seconds` after it was wanted."""
        counts, total_s = self._phases.get((pipeline, via, phase), ([0] * (len(START_BOUNDS_S) + 1), 0.0))
        counts[bisect.bisect_left(START_BOUNDS_S, seconds)] += 1
        # This one goes to the end; pipelines come and go, and the oldest of too many are forgotten.
        self._phases.pop((pipeline, via, phase), None)
        self._phases[pipeline, via, phase] = (counts, total_s + seconds)
        if len(self._phases) > MOST_SERIES:
            del self._phases[next(iter(self._phases))]

    def samples(self, node: str) -> Iterator[Sample]:
        """One sample a label set."""
        for via, number in self.starts.items():
            yield Sample("keystage_starts", {"node": node, "via": via}, number)
        for status, number in self.refusals.items():
            yield Sample("keystage_start_refusals", {"node": node, "reason": str(status)}, number)
        for source, number in self.loads.items():
            labels = {"node": node, "source": source}
            yield Sample("keystage_loads", labels, number)
            yield Sample("keystage_load_bytes", labels, self.load_bytes[source])
            yield Sample("keystage_load_seconds", labels, self.load_s[source])
        for (pipeline, via, phase), (counts, total_s) in self._phases.items():
            labels = {"node": node, "pipeline": pipeline, "via": via, "phase": phase}
            sums = tuple(sum(counts[: end + 1]) for end in range(len(counts)))
            yield Sample("keystage_start_seconds", labels, total_s, sums)
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
