"""NeuStream's Algorithm 2 and Symphony's Figure 18 as printed: one gives away too much, one idles nobody."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from keystage.controller.domain.decision import Action
from keystage.controller.domain.snapshot import FunctionView, Snapshot
from keystage.controller.policy.clamp import deal
from keystage.controller.policy.plan import Plan
from keystage.simulator.api import ArrivalSpec, PipelineSpec, StageSpec, World
from keystage.simulator.run import simulate


def printed_allotment(least: list[int], goodput_per_unit: list[float], units: int) -> list[int]:
    """NeuStream Algorithm 2 with delta = 1: minima first, then a unit at a time to the lowest goodput.

    As printed N is not lowered by the minima.
    """
    given = list(least)
    while units >= 1:
        bottleneck = min(range(len(given)), key=lambda i: given[i] * goodput_per_unit[i])
        given[bottleneck] += 1
        units -= 1
    return given


def test_algorithm_2_hands_out_the_minima_twice() -> None:
    given = printed_allotment([3, 2, 2], [1.0, 1.0, 1.0], 10)
    assert sum(given) == 17 > 10  # 7 devices that do not exist


def test_our_dealing_counts_the_minima() -> None:
    plans = [
        Plan(
            scale=FunctionView(function=f"p-stage-{k}", min_replicas=least),
            wanted=9,
            corrected=9,
            reason="",
            is_stage=True,
            pipeline="p",
            stage=k,
            rank=k,
        )
        for k, least in enumerate((3, 2, 2))
    ]
    dealt = [p.wanted for p in deal(plans, Snapshot(at_s=0.0, budget_replicas=10))]
    assert sum(dealt) == 10
    assert dealt == [4, 3, 3]


def used(arrivals_s: list[float], service_s: float, gpus: int, *, is_earliest_free: bool) -> list[float]:
    """Busy seconds per GPU when each item takes the GPU that is free since longest, or the smallest id."""
    free_s, busy_s = [0.0] * gpus, [0.0] * gpus
    for at_s in arrivals_s:
        free = [g for g in range(gpus) if free_s[g] <= at_s] or [min(range(gpus), key=free_s.__getitem__)]
        chosen = min(free, key=lambda g: (free_s[g], g)) if is_earliest_free else min(free)
        free_s[chosen] = max(at_s, free_s[chosen]) + service_s
        busy_s[chosen] += service_s
    return busy_s


def test_figure_18_keeps_every_gpu_a_little_busy() -> None:
    """At a third of what four GPUs carry, earliest-free uses all of them; the smallest id leaves two idle."""
    arrivals_s = [0.0075 * i for i in range(4000)]  # 0.01 s each: 1.33 GPUs' worth
    spread = used(arrivals_s, 0.01, 4, is_earliest_free=True)
    packed = used(arrivals_s, 0.01, 4, is_earliest_free=False)
    assert sum(spread) == pytest.approx(sum(packed))
    assert min(spread) == pytest.approx(max(spread), rel=0.01)
    assert packed[2:] == [0.0, 0.0]  # use is proportional to load: these can be released


class Watcher:
    """Steers nothing and keeps the last snapshot."""

    def __init__(self) -> None:
        self.seen: Snapshot | None = None

    def steer(self, snapshot: Snapshot) -> Sequence[Action]:
        self.seen = snapshot
        return ()


def test_our_replicas_are_used_in_order_so_the_last_ones_stay_idle() -> None:
    watcher = Watcher()
    stage = StageSpec(alpha_s=0.01, replicas=4)
    arrivals = ArrivalSpec(rate_rps=133.0, cv=0.0, count=4000)
    simulate(World(pipelines=(PipelineSpec(name="p", stages=(stage,), arrivals=arrivals),)), watcher, 1)
    assert watcher.seen is not None
    workers = sorted(watcher.seen.pipelines[0].stages[0].workers, key=lambda w: w.replica)
    busy_s = [w.busy_s or 0.0 for w in workers]
    assert busy_s[0] >= busy_s[1] > 5.0
    assert busy_s[2:] == [0.0, 0.0]
