"""What is said of a metric, and the bounds of histograms; used by `metrics`, which names them all."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric.

    Attributes:
        kind: `counter`, `gauge` or `histogram`.
        labels: label names in order.
        meaning: what it says, with its unit.
        bounds: upper bounds of a histogram's buckets, ascending, without infinity.
    """

    kind: str
    labels: tuple[str, ...]
    meaning: str
    bounds: tuple[float, ...] = ()


ANSWER_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
"""From a small batch to the longest that a request may take by default."""


START_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.9, 1.5, 3.0, 8.0, 20.0, 60.0, 180.0, 600.0)
"""From a fork that shares everything to the longest that a start may take by default."""


BATCH_BOUNDS_ITEMS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
"""As the router counts them (`router.api.BATCH_BOUNDS`)."""
