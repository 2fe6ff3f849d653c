"""Cocktail as a steering: forecasts size the pools, violations of the objective add to them.

Before it: a snapshot. After it: `SetReplicas` per stage. Sources: Gunasekaran and others, "Cocktail: a
multidimensional optimization for model serving in cloud", NSDI 2022, section on resource management; its
public repository (jashwantraj92/cocktail: modules scheduler, constants, reactive controller), read for its
constants; QUART section 8.1: "we integrate it with the pipeline", and 8.4: it lacks "optimization for
overall pipeline performance". Model selection for ensembles, its other half, has no place here.

What follows it:
- the rate is sampled in windows of 5 s; every interval it is forecast ahead and the pools are resized;
- the forecast is raised by a safety factor (1.2 in the repository);
- an instance is given back only when the largest of the last 6 plans would do without it;
- weighted autoscaling: a pool's part of the new instances is its weight;
- a reactive controller looks every 5 s and adds 10 % where the objective is violated.

Gaps filled, readings chosen:
- Integration: one forecast per pipeline, since every request passes every stage; a stage's weight is its
  service time, so each gets what the forecast needs there. Equal numbers for all stages would be the naive
  reading, and worse for the rival; nothing connects the stages beyond this, which is what QUART reports.
- The original replans every 60 s, for virtual machines that boot in about that time; replicas here start
  in seconds, so the interval is 10 s unless the search chooses otherwise. The horizon is the interval plus
  the start time of the slowest stage.
- DeepAR is replaced, see `forecast`. The first plan is made after the first window; the numbers
  stay as given until then.
- A stage violates the objective when the mean sojourn of the last 5 s, or its queue over its capacity,
  exceeds its part of the deadline (by service time). What the reactive controller added lasts until plans
  have done without it, as above.
- Queues do not enter the forecast. `effort` multiplies the forecast. Cluster bounds: see `bounds`.
"""

from __future__ import annotations

import collections
import math

import msgspec

from keystage.baselines.bounds import actions, bounded
from keystage.baselines.envelope import ArrivalLog
from keystage.baselines.forecast import forecast
from keystage.baselines.seen import Seen, Watch, batch_within, rate_rps, shares_s
from keystage.baselines.tunable import Range, Ranges
from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.snapshot import PipelineView, Snapshot


class CocktailSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How Cocktail is set up.

    Attributes:
        sample_s: width of a rate window, 5 s in the repository.
        interval_s: seconds between plans, see the module.
        react_s: seconds between looks of the reactive controller, 5 s in the repository.
        history: windows the forecast is fitted on: ten minutes.
        order: windows that enter a forecast.
        safety_ratio: factor on the forecast, 1.2 in the repository.
        deviations: standard deviations added to the forecast's mean, 0 in the paper.
        added_ratio: part of a pool added at a violation, 0.1 in the repository.
        plans: instances are given back when this many plans did without, 6 in the repository.
        slo_service_ratio: objective in service times where the pipeline states none.
        start_s: start time until one is known.
        effort: factor on the forecast; 1 is the published policy.
    """

    sample_s: float = 5.0
    interval_s: float = 10.0
    react_s: float = 5.0
    history: int = 120
    order: int = 4
    safety_ratio: float = 1.2
    deviations: float = 0.0
    added_ratio: float = 0.1
    plans: int = 6
    slo_service_ratio: float = 10.0
    start_s: float = 5.0
    effort: float = 1.0


RANGES: Ranges = {
    "sample_s": Range(1.0, 10.0, is_log=True),
    "interval_s": Range(2.0, 60.0, is_log=True),
    "react_s": Range(1.0, 10.0, is_log=True),
    "order": Range(1, 8, is_whole=True),
    "safety_ratio": Range(1.0, 1.6),
    "deviations": Range(0.0, 2.0),
    "added_ratio": Range(0.1, 1.0, is_log=True),
    "plans": Range(1, 12, is_whole=True),
}


class Cocktail:
    """The steering.

    Args:
        settings: how it is set up.
    """

    def __init__(self, settings: CocktailSettings | None = None) -> None:
        self._settings = settings or CocktailSettings()
        self._watch = Watch()
        self._pools: dict[str, _Pools] = {}

    def steer(self, snapshot: Snapshot) -> list[SetReplicas]:
        """See `Steering.steer`."""
        wishes: list[tuple[Seen, int]] = []
        for view, seen in self._watch.pipelines(snapshot):
            if view.pipeline not in self._pools:
                self._pools[view.pipeline] = _Pools(self._settings, seen, snapshot.at_s)
            wishes += zip(seen, self._pools[view.pipeline].plan(snapshot.at_s, view, seen), strict=True)
        return actions(snapshot, wishes)


def is_late(stage: Seen, served: float, sojourn_s: float, capacity_rps: float, share_s: float) -> bool:
    """Whether a stage violates its part of the objective.

    Args:
        stage: the stage.
        served: items served since the last look.
        sojourn_s: sum of their sojourns.
        capacity_rps: items a second of its ready replicas.
        share_s: its part of the objective.
    """
    if served > 0 and sojourn_s / served > share_s:
        return True
    return stage.queue > capacity_rps * share_s


class _Pools:
    """One pipeline: a pool of replicas per stage."""

    def __init__(self, settings: CocktailSettings, seen: tuple[Seen, ...], at_s: float) -> None:
        self._settings = settings
        self._log = ArrivalLog(settings.sample_s * 2 + settings.react_s)
        self._rates_rps: collections.deque[float] = collections.deque(maxlen=settings.history)
        self._sampled_s = at_s
        self._planned_s = float("-inf")
        self._reacted_s = at_s
        self._last: dict[str, tuple[float, float]] = {}
        self._plans = [collections.deque([s.scale.current], maxlen=settings.plans) for s in seen]
        self._targets = [s.scale.current for s in seen]

    def plan(self, at_s: float, view: PipelineView, seen: tuple[Seen, ...]) -> list[int]:
        """Replicas by stage for now."""
        settings = self._settings
        self._log.add(at_s, seen[0].arrivals)
        while at_s - self._sampled_s >= settings.sample_s:
            end_s = self._sampled_s + settings.sample_s
            self._rates_rps.append(self._log.count(self._sampled_s, end_s) / settings.sample_s)
            self._sampled_s = end_s
        parts_s = shares_s(view, seen, settings.slo_service_ratio)
        mu_rps = [
            rate_rps(s.batch, batch_within(s.batch, part_s / 2))
            for s, part_s in zip(seen, parts_s, strict=True)
        ]
        if self._rates_rps and at_s - self._planned_s >= settings.interval_s:
            self._planned_s = at_s
            self._resize(seen, mu_rps)
        if at_s - self._reacted_s >= settings.react_s:
            self._reacted_s = at_s
            self._react(seen, mu_rps, parts_s)
        return self._targets

    def _resize(self, seen: tuple[Seen, ...], mu_rps: list[float]) -> None:
        settings = self._settings
        starts_s = [settings.start_s if s.start_s is None else s.start_s for s in seen]
        steps = math.ceil((settings.interval_s + max(starts_s)) / settings.sample_s)
        ahead = forecast(list(self._rates_rps), min(steps, 100), settings.order)
        if ahead is None:
            return
        rate = settings.effort * settings.safety_ratio * ahead.peak_rps(settings.deviations)
        for k, (stage, mu) in enumerate(zip(seen, mu_rps, strict=True)):
            self._plans[k].append(bounded(stage.scale, rate / mu))
            self._targets[k] = max(self._plans[k])

    def _react(self, seen: tuple[Seen, ...], mu_rps: list[float], parts_s: list[float]) -> None:
        for k, stage in enumerate(seen):
            before = self._last.get(stage.function, (stage.services, stage.sojourn_s))
            self._last[stage.function] = (stage.services, stage.sojourn_s)
            served, sojourn_s = stage.services - before[0], stage.sojourn_s - before[1]
            capacity_rps = stage.scale.ready * mu_rps[k]
            # Replicas that are starting already answer the violation.
            if stage.scale.starting or not is_late(stage, served, sojourn_s, capacity_rps, parts_s[k]):
                continue
            added = math.ceil(self._settings.added_ratio * self._targets[k])
            self._targets[k] = bounded(stage.scale, self._targets[k] + added)
            self._plans[k][-1] = max(self._plans[k][-1], self._targets[k])
