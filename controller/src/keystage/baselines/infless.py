"""INFless as a steering: batch-aware instances and LSTH keep-alive for functions that are whole models.

Before it: a snapshot. After it: `SetReplicas`. Sources: Yang and others, "INFless: a native serverless
system for low-latency, high-throughput inference", ASPLOS 2022; QUART section 8.1 and 8.4: it does not
use pipeline parallelism, so the experiments give it pipelines of one stage that is the whole model, with
the start time of the whole model; a model larger than one GPU takes several of one node. Each stage of a
longer pipeline would be taken for a function of its own.

What follows the paper: `dispatch` (bounds r_low, r_up, alpha = 0.8, scaling out for what the instances
cannot take, releasing below the line) and `keepalive` (LSTH). The paper's text was not at hand beyond its
abstract, and its repository publishes names only; rules and constants are as commonly cited.

Gaps filled:
- Non-uniform instances (different batches, cores and GPU shares at once) need instances of several sizes;
  here an instance holds whole GPUs and a function has one size, so the batch alone is chosen.
- The rate is what came within `window_s`; requests that wait count as `queue / drain_s` a second, in
  favour of INFless: the paper's dispatcher admits no more than r_up and does not say what becomes of the
  rest.
- `effort` multiplies the rate. Cluster bounds: see `bounds`.
"""

from __future__ import annotations

import msgspec

from keystage.baselines.bounds import actions, bounded
from keystage.baselines.dispatch import instances, rate_bounds
from keystage.baselines.envelope import ArrivalLog
from keystage.baselines.keepalive import KeepAliveSettings, LongShortHistogram
from keystage.baselines.seen import Seen, Watch, shares_s
from keystage.baselines.tunable import Range, Ranges
from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.snapshot import Snapshot


class InflessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How INFless is set up.

    Attributes:
        window_s: the rate is measured over this.
        drain_s: what waits shall be gone in this time.
        alpha_ratio: weight of the lower bound in the release test, 0.8 in the paper.
        keep: windows of LSTH.
        slo_service_ratio: objective in service times where the pipeline states none.
        start_s: start time until one is known.
        effort: factor on the rate; 1 is the published policy.
    """

    window_s: float = 2.0
    drain_s: float = 15.0
    alpha_ratio: float = 0.8
    keep: KeepAliveSettings = KeepAliveSettings()
    slo_service_ratio: float = 10.0
    start_s: float = 5.0
    effort: float = 1.0


RANGES: Ranges = {
    "window_s": Range(0.5, 10.0, is_log=True),
    "drain_s": Range(2.0, 120.0, is_log=True),
    "alpha_ratio": Range(0.0, 1.0),
    "keep.keep_s": Range(5.0, 300.0, is_log=True),
    "keep.most_s": Range(10.0, 600.0, is_log=True),
    "keep.tail_ratio": Range(0.5, 0.99),
    "keep.gamma_ratio": Range(0.3, 0.7),
}


class Infless:
    """The steering.

    Args:
        settings: how it is set up.
    """

    def __init__(self, settings: InflessSettings | None = None) -> None:
        self._settings = settings or InflessSettings()
        self._watch = Watch()
        self._logs: dict[str, ArrivalLog] = {}
        self._histograms: dict[str, LongShortHistogram] = {}

    def steer(self, snapshot: Snapshot) -> list[SetReplicas]:
        """See `Steering.steer`."""
        wishes: list[tuple[Seen, int]] = []
        for view, seen in self._watch.pipelines(snapshot):
            parts_s = shares_s(view, seen, self._settings.slo_service_ratio)
            for stage, share_s in zip(seen, parts_s, strict=True):
                wishes.append((stage, self._wanted(stage, share_s, snapshot.at_s)))
        return actions(snapshot, wishes)

    def _wanted(self, stage: Seen, slo_s: float, at_s: float) -> int:
        settings = self._settings
        if stage.function not in self._logs:
            self._logs[stage.function] = ArrivalLog(settings.window_s * 2)
            self._histograms[stage.function] = LongShortHistogram(settings.keep)
        log, histogram = self._logs[stage.function], self._histograms[stage.function]
        log.add(at_s, stage.arrivals)
        came_rps = log.count(at_s - settings.window_s, at_s) / settings.window_s
        rate_rps = settings.effort * (came_rps + stage.queue / settings.drain_s)
        present = max(1, stage.scale.current)
        needed = instances(rate_rps, present, rate_bounds(stage.batch, slo_s), settings.alpha_ratio)
        needed = bounded(stage.scale, needed)
        start_s = settings.start_s if stage.start_s is None else stage.start_s
        return bounded(stage.scale, histogram.warm(needed, present, at_s, start_s))
