"""Autoscaling advice in the simulator: the whole loop, from deferred batches to replicas that come and go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keystage.batching.advice import AdviceSettings
from keystage.controller.domain.decision import Action, SetReplicas
from keystage.controller.domain.snapshot import Slo, Snapshot
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.steering import Keystage
from keystage.simulator.api import ArrivalSpec, LoadSpec, PipelineSpec, StageSpec, World
from keystage.simulator.run import simulate


class Watched:
    """Keystage's policy, its reasons, numbers and victims written down."""

    def __init__(self, settings: PolicySettings) -> None:
        self.policy = Keystage(settings)
        self.reasons: set[str] = set()
        self.course: list[tuple[float, int]] = []
        self.victims: list[tuple[int, tuple[str, ...]]] = []

    def steer(self, snapshot: Snapshot) -> Sequence[Action]:
        before = snapshot.pipelines[0].stages[0].scale
        actions = self.policy.steer(snapshot)
        assert self.policy.last is not None
        report = self.policy.last.reports[0]
        self.reasons.add(report.reason)
        self.course.append((snapshot.at_s, report.replicas))
        for action in actions:
            if isinstance(action, SetReplicas) and action.replicas < before.ready:
                self.victims.append((before.ready - action.replicas, action.victims))
        return actions


def run(
    settings: PolicySettings, pieces: Sequence[tuple[float, float]], batching: str = "deferred"
) -> tuple[Watched, float]:
    """(what was decided, part of the requests that was bad) for (seconds, requests/s) one after the other."""
    random, at_s, times = np.random.default_rng(3), 0.0, []
    for seconds, rate in pieces:
        times += np.sort(at_s + random.uniform(0, seconds, random.poisson(rate * seconds))).tolist()
        at_s += seconds
    stage = StageSpec(alpha_s=0.004, beta_s=0.012, most=64, batching=batching, replicas=2)
    pipeline = PipelineSpec(
        name="p", stages=(stage,), arrivals=ArrivalSpec(times_s=tuple(times)), slo=Slo(deadline_s=0.1)
    )
    watched = Watched(settings)
    outcome = simulate(World(pipelines=(pipeline,), load=LoadSpec(fixed_s=0.5)), watched, 3).pipelines[0]
    return watched, float(np.mean(outcome.latency_s > 0.1 + 1e-9))


QUICK = AdviceSettings(add_s=1.0, release_s=5.0)


def test_advice_makes_up_for_a_model_that_asks_for_too_few() -> None:
    """The demand is cut to a half; a bad rate brings it back."""
    load = ((30.0, 600.0),)
    advised, bad = run(PolicySettings(effort=0.5, advice=QUICK), load)
    silent, bad_without = run(PolicySettings(effort=0.5, advice=AdviceSettings(bad_ratio=1.0)), load)
    assert any(reason.startswith("advice:") for reason in advised.reasons)
    assert not any(reason.startswith("advice:") for reason in silent.reasons)
    assert bad < 0.8 * bad_without
    assert max(n for _, n in advised.course) > max(n for _, n in silent.course)


def test_idle_replicas_are_given_back_and_the_smallest_numbers_work_on() -> None:
    """Which of the idle ones goes first is a matter of moments; those that work are never among them."""
    watched, bad = run(PolicySettings(advice=QUICK), ((8.0, 600.0), (40.0, 60.0)))
    assert max(n for _, n in watched.course) >= 4
    assert watched.course[-1][1] <= 2
    assert bad < 0.1
    assert watched.victims
    for count, named in watched.victims:
        numbers = [int(name.rsplit("-", 1)[1]) for name in named]
        assert min(numbers[:count]) > sorted(numbers)[min(1, len(numbers) - count - 1)]


def test_an_eager_pipeline_gets_none() -> None:
    watched, _ = run(PolicySettings(effort=0.3, advice=QUICK), ((5.0, 900.0),), batching="eager")
    assert not any("advice" in reason for reason in watched.reasons)
