"""InferLine as a steering: a planner now and then, and a tuner on traffic envelopes at every tick.

Before it: a snapshot. After it: `SetReplicas` per stage. Source: Crankshaw and others, "InferLine:
latency-aware provisioning and scaling for prediction serving pipelines", SoCC 2020 (arXiv 1812.01776),
as QUART section 8.1 uses it: a pipeline whose stages are scaled one by one.

What follows the paper:
- planner (its sections on estimator and planner): see `planner`;
- tuner, scaling up: envelope windows from the service time of the system up to 60 s, doubling; as soon as
  the rate of any window exceeds the planned one, r_max is the largest such rate and every stage m gets
  k_m = ceil(r_max s_m / (mu_m rho_m)), rho_m = lambda s_m / (k_m mu_m) of the plan;
- tuner, scaling down: no change for 15 s; lambda_new is the largest rate of 5 s windows within the last
  30 s; k_m = ceil(lambda_new s_m / (mu_m rho_p)), rho_p the smallest rho_m of the pipeline: careful.

Gaps filled, and readings chosen. The text at hand held the overview and the envelope definition; the
constants 15 s, 30 s and 5 s and the use of rho_p are as commonly cited and were not checked word by word.
- The plan needs a sample of traffic. The original plans offline on one; here nobody is told the traffic,
  so the first plan is made after `first_plan_s` on what came so far (until then rates are divided by
  `utilisation_ratio`), and made again every `replan_s` on the last `plan_span_s`. `samples` hands in an
  offline sample instead: then the plan is deployed at the first tick.
- Compared are the windows that end now. With every window of the last 60 s, a burst that is over would
  ask for the same replicas again after each scale-down; for the same reason a scale-down never goes below
  what the windows ask for at that moment.
- `by_envelope` scales the plan by the worst ratio r_i / q_i instead: with a bursty plan the printed formula
  takes the rate of a window of half a second for a mean rate. The search may choose.
- s_m = 1: every item visits every stage once. mu_m is taken with full batches; it cancels out.
- `effort` multiplies every k_m. Cluster bounds: see `bounds`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec

from keystage.baselines.bounds import actions, bounded
from keystage.baselines.envelope import ArrivalLog, widths
from keystage.baselines.planner import plan
from keystage.baselines.seen import Seen, Watch, deadline_s, rate_rps
from keystage.baselines.tunable import Choice, Range, Ranges
from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.snapshot import PipelineView, Snapshot


class InferLineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How InferLine is set up.

    Attributes:
        longest_s: widest window, 60 s in the paper.
        least_s: narrowest window: two ticks; below that a window counts noise of the observation.
        stable_s: no scaling down for this long after a change, 15 s in the paper.
        recent_s: scaling down looks this far back, 30 s in the paper.
        window_s: ... in windows of this width, 5 s in the paper.
        first_plan_s: the first plan needs this much traffic: about one start of a replica.
        replan_s: seconds between plans: the original replans when traffic has drifted, in hours.
        plan_span_s: a plan uses this much of the past.
        utilisation_ratio: rho until there is a plan.
        slo_service_ratio: objective in service times where the pipeline states none.
        by_envelope: see the module.
        effort: factor on all replica numbers; 1 is the published policy.
    """

    longest_s: float = 60.0
    least_s: float = 0.5
    stable_s: float = 15.0
    recent_s: float = 30.0
    window_s: float = 5.0
    first_plan_s: float = 5.0
    replan_s: float = 300.0
    plan_span_s: float = 60.0
    utilisation_ratio: float = 0.7
    slo_service_ratio: float = 10.0
    by_envelope: bool = False
    effort: float = 1.0


RANGES: Ranges = {
    "least_s": Range(0.25, 4.0, is_log=True),
    "stable_s": Range(5.0, 60.0, is_log=True),
    "recent_s": Range(10.0, 60.0, is_log=True),
    "first_plan_s": Range(2.0, 30.0, is_log=True),
    "replan_s": Range(15.0, 600.0, is_log=True),
    "utilisation_ratio": Range(0.4, 0.95),
    "by_envelope": Choice((False, True)),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What the tuner holds the traffic against.

    Attributes:
        rate_rps: mean rate of the planned traffic.
        rates_rps: its envelope by window.
        replicas: planned replicas by stage.
    """

    rate_rps: float
    rates_rps: tuple[float, ...]
    replicas: tuple[int, ...]

    def rho(self, mu_rps: Sequence[float]) -> tuple[float, ...]:
        """Planned utilisation of each stage."""
        return tuple(self.rate_rps / (k * mu) for k, mu in zip(self.replicas, mu_rps, strict=True))


def scale_up(
    planned: Plan, rates_rps: Sequence[float], mu_rps: Sequence[float], effort: float, *, by_envelope: bool
) -> tuple[float, ...] | None:
    """Replicas by stage that the present windows ask for; None while none exceeds the plan."""
    exceeding = [
        (r, r / q if q > 0 else float("inf"))
        for r, q in zip(rates_rps, planned.rates_rps, strict=True)
        if r > q * (1 + 1e-9)
    ]
    if not exceeding:
        return None
    r_max = max(r for r, _ in exceeding)
    if by_envelope:
        # A plan that saw no traffic in a window says nothing about its ratio; its rate does.
        factor = min(max(f for _, f in exceeding), r_max / planned.rate_rps)
        return tuple(effort * factor * k for k in planned.replicas)
    return tuple(effort * r_max / (mu * rho) for mu, rho in zip(mu_rps, planned.rho(mu_rps), strict=True))


def scale_down(planned: Plan, peak_rps: float, mu_rps: Sequence[float], effort: float) -> tuple[float, ...]:
    """Replicas by stage that the recent peak asks for, at the plan's lowest utilisation."""
    rho = min(planned.rho(mu_rps))
    return tuple(effort * peak_rps / (mu * rho) for mu in mu_rps)


class InferLine:
    """The steering.

    Args:
        settings: how it is set up.
        samples: arrival times in seconds of a sample of each pipeline's traffic, sorted; see the module.
    """

    def __init__(
        self,
        settings: InferLineSettings | None = None,
        samples: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self._settings = settings or InferLineSettings()
        self._samples = samples or {}
        self._watch = Watch()
        self._tuners: dict[str, _Tuner] = {}

    def steer(self, snapshot: Snapshot) -> list[SetReplicas]:
        """See `Steering.steer`."""
        wishes: list[tuple[Seen, int]] = []
        for view, seen in self._watch.pipelines(snapshot):
            if view.pipeline not in self._tuners:
                sample = self._samples.get(view.pipeline, ())
                self._tuners[view.pipeline] = _Tuner(self._settings, sample)
            wishes += zip(seen, self._tuners[view.pipeline].tune(snapshot.at_s, view, seen), strict=True)
        return actions(snapshot, wishes)


class _Tuner:
    """One pipeline."""

    def __init__(self, settings: InferLineSettings, sample: Sequence[float]) -> None:
        self._settings = settings
        self._sample = sample
        self._log = ArrivalLog(max(settings.longest_s, settings.plan_span_s, settings.recent_s) + 1.0)
        self._begun_s: float | None = None
        self._planned_s: float | None = None
        self._tried_s: float | None = None
        self._plan: Plan | None = None
        self._targets: list[int] = []
        self._changed_s = float("-inf")

    def tune(self, at_s: float, view: PipelineView, seen: tuple[Seen, ...]) -> list[int]:
        """Replicas by stage for now."""
        settings = self._settings
        self._log.add(at_s, seen[0].arrivals)
        if len(self._targets) != len(seen):
            self._targets = [s.scale.current for s in seen]
            self._begun_s = at_s
        windows = widths(sum(s.item_s for s in seen), settings.longest_s, settings.least_s)
        mu_rps = [rate_rps(s.batch, s.batch.most) for s in seen]
        if self._is_plan_due(at_s):
            self._make_plan(at_s, view, seen, windows)
        rates_rps = self._log.rates(windows, at_s)
        if self._plan is None:
            wanted: Sequence[float] | None = self._unplanned(at_s, mu_rps)
        else:
            wanted = scale_up(
                self._plan, rates_rps, mu_rps, settings.effort, by_envelope=settings.by_envelope
            )
        if wanted is not None:
            self._move(at_s, [max(t, bounded(s.scale, w)) for t, s, w in self._with_targets(seen, wanted)])
        if self._plan is not None and at_s - self._changed_s >= settings.stable_s:
            peak_rps = self._log.peak_rps(at_s - settings.recent_s, at_s, settings.window_s)
            fewer = scale_down(self._plan, peak_rps, mu_rps, settings.effort)
            wanted = (
                fewer if wanted is None else [max(up, down) for up, down in zip(wanted, fewer, strict=True)]
            )
            self._move(at_s, [min(t, bounded(s.scale, w)) for t, s, w in self._with_targets(seen, wanted)])
        return self._targets

    def _with_targets(self, seen: tuple[Seen, ...], wanted: Sequence[float]) -> list[tuple[int, Seen, float]]:
        return list(zip(self._targets, seen, wanted, strict=True))

    def _move(self, at_s: float, targets: list[int]) -> None:
        if targets != self._targets:
            self._targets, self._changed_s = targets, at_s

    def _unplanned(self, at_s: float, mu_rps: Sequence[float]) -> tuple[float, ...] | None:
        """Before the first plan: the mean rate so far, once it spans a second."""
        first_s = self._log.first_s
        if first_s is None or at_s - first_s < 1.0:
            return None
        rate = self._log.count(first_s, at_s) / (at_s - first_s)
        return tuple(self._settings.effort * rate / (mu * self._settings.utilisation_ratio) for mu in mu_rps)

    def _is_plan_due(self, at_s: float) -> bool:
        if self._plan is None and self._sample:
            return True
        if self._begun_s is None:
            return False
        if (
            self._planned_s is None or (self._tried_s or 0.0) > self._planned_s
        ):  # none yet, or the last try failed
            since_s = self._begun_s if self._tried_s is None else self._tried_s
            return at_s - since_s >= self._settings.first_plan_s
        return at_s - self._planned_s >= self._settings.replan_s

    def _make_plan(
        self, at_s: float, view: PipelineView, seen: tuple[Seen, ...], windows: tuple[float, ...]
    ) -> None:
        settings = self._settings
        self._tried_s = at_s
        sample = list(self._sample) if self._plan is None else []
        if sample:
            span_s, log = sample[-1] - sample[0], _log_of(sample, settings.least_s)
        else:
            sample, span_s = self._log.times(at_s - settings.plan_span_s)
            log = self._log
        if len(sample) < 2 or not span_s > 0:
            return
        slo_s = deadline_s(view, seen, settings.slo_service_ratio)
        most = [bounded(s.scale, float("inf")) for s in seen]
        planned = plan(sample, [s.batch for s in seen], [min(m, len(sample)) for m in most], slo_s)
        if planned is None:
            return
        self._planned_s = at_s
        replicas = planned.replicas
        self._plan = Plan(len(sample) / span_s, log.envelope(windows), replicas)
        self._move(at_s, [bounded(s.scale, settings.effort * k) for s, k in zip(seen, replicas, strict=True)])


def _log_of(sample: Sequence[float], tick_s: float) -> ArrivalLog:
    """A sample as counters read every `tick_s` would show it."""
    log = ArrivalLog(float("inf"))
    begin_s, came = sample[0] - tick_s, 0
    steps = int((sample[-1] - begin_s) / tick_s) + 1
    for step in range(steps + 1):
        while came < len(sample) and sample[came] <= begin_s + step * tick_s:
            came += 1
        log.add(begin_s + step * tick_s, float(came))
    return log
