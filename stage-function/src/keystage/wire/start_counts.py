"""How replicas started, and how long each phase of their start took. Pure; callers keep threads apart.

Before it: a KeysManager that forks replicas, or the controller that makes parked pods workers. After it:
their metrics. It must not decide what a start is.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from keystage.wire.metric_spec import START_BOUNDS_S
from keystage.wire.metrics import Sample

MOST_SERIES = 1024
"""Histograms that are kept of a node: of some fifty pipelines, in every way they start."""


class StartCounts:
    """Starts on one node.

    Attributes:
        starts: replicas by how they were started.
    """

    def __init__(self) -> None:
        self.starts: Counter[str] = Counter()
        self._phases: dict[tuple[str, str, str], tuple[list[int], float]] = {}

    def reached(self, pipeline: str, via: str, phase: str, seconds: float) -> None:
        """A replica reached a phase of its start, `seconds` after it was wanted."""
        # This one goes to the end; pipelines come and go, and the oldest of too many are forgotten.
        none: tuple[list[int], float] = ([0] * (len(START_BOUNDS_S) + 1), 0.0)
        counts, total_s = self._phases.pop((pipeline, via, phase), none)
        counts[bisect.bisect_left(START_BOUNDS_S, seconds)] += 1
        self._phases[pipeline, via, phase] = (counts, total_s + seconds)
        if len(self._phases) > MOST_SERIES:
            del self._phases[next(iter(self._phases))]

    def samples(self, node: str) -> Iterator[Sample]:
        """One sample a label set."""
        for via, number in self.starts.items():
            yield Sample("keystage_starts", {"node": node, "via": via}, number)
        for (pipeline, via, phase), (counts, total_s) in self._phases.items():
            labels = {"node": node, "pipeline": pipeline, "via": via, "phase": phase}
            yield Sample("keystage_start_seconds", labels, total_s, tuple(accumulate(counts)))
