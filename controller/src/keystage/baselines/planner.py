"""InferLine's planner: the cheapest replica numbers whose simulated p99 meets the objective.

Before it: a sample of arrival times and the service profile of each stage. After it: the tuner scales
around this plan. It follows InferLine (SoCC 2020), sections on the estimator and the planner: an
estimator that simulates the pipeline on the sample trace; an initial configuration made feasible by
adding a replica to the bottleneck; then the greedy loop that takes away what it can while the p99 stays
within the objective.

Gaps filled here:
- Batch sizes and hardware are not chosen: workers of this world form batches of whatever waits, up to
  the profile's largest, on one kind of GPU. The estimator simulates exactly that, and of the planner's
  moves (larger batch, fewer replicas, cheaper hardware) only "one replica fewer" is left.
- No stage gets fewer replicas than its offered load, which a short sample would not punish.
- The initial configuration is the offered load instead of one replica; steps grow with the stage (an eighth
  of it), so that large ones are reached in tens of simulations.
- The stages are a chain: the snapshot names no graph.
- An objective that no replica number meets is replaced by the best reachable p99 times `slack_ratio`
  (the original answers "infeasible" and leaves it to a person).
- The sample is cut to its last `most_items` arrivals, for the cost of planning.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

from keystage.controller.domain.snapshot import BatchProfile


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A configuration.

    Attributes:
        replicas: by stage.
        p99_s: estimated 99th percentile of latency on the sample, in seconds.
        is_feasible: whether that meets the objective that was asked for.
    """

    replicas: tuple[int, ...]
    p99_s: float
    is_feasible: bool


def pass_stage(
    items: Sequence[tuple[float, int]], replicas: int, batch: BatchProfile
) -> tuple[list[tuple[float, int]], float]:
    """Simulates one stage: first come, first served; an idle replica takes what waits, up to `most`.

    Args:
        items: (arrival time in s, item number), sorted.
        replicas: servers, at least 1.
        batch: service seconds of a batch.

    Returns:
        (departure time in s, item number) sorted, and the mean wait in seconds.
    """
    free = [float("-inf")] * replicas
    done: list[tuple[float, int]] = []
    wait_s = 0.0
    i, n = 0, len(items)
    while i < n:
        start_s = max(heapq.heappop(free), items[i][0])
        j = i
        while j < n and j - i < batch.most and items[j][0] <= start_s:
            wait_s += start_s - items[j][0]
            j += 1
        end_s = start_s + batch.alpha_s * (j - i) + batch.beta_s
        done += [(end_s, number) for _, number in items[i:j]]
        heapq.heappush(free, end_s)
        i = j
    done.sort()
    return done, wait_s / n if n else 0.0


class _Estimator:
    """Simulates a chain; remembers what went into each stage, so that a change costs only what follows."""

    def __init__(self, arrivals_s: Sequence[float], stages: Sequence[BatchProfile]) -> None:
        self._arrivals_s = arrivals_s
        self._stages = stages
        self._known: dict[tuple[int, ...], tuple[list[tuple[float, int]], float]] = {
            (): ([(t, i) for i, t in enumerate(arrivals_s)], 0.0)
        }

    def _after(self, replicas: tuple[int, ...]) -> tuple[list[tuple[float, int]], float]:
        if replicas not in self._known:
            before, _ = self._after(replicas[:-1])
            self._known[replicas] = pass_stage(before, replicas[-1], self._stages[len(replicas) - 1])
        return self._known[replicas]

    def p99_s(self, replicas: tuple[int, ...]) -> float:
        """99th percentile of latency: the smallest latency that 99 % of the items do not exceed."""
        done, _ = self._after(replicas)
        latencies = sorted(end_s - self._arrivals_s[number] for end_s, number in done)
        return latencies[-(-99 * len(latencies) // 100) - 1]

    def bottleneck(self, replicas: tuple[int, ...], most: Sequence[int]) -> int | None:
        """The stage with the longest mean wait that may have one more replica, None without one."""
        waits = [(self._after(replicas[: k + 1])[1], -k) for k in range(len(replicas))]
        open_ = [w for w, r, m in zip(waits, replicas, most, strict=True) if r < m]
        return -max(open_)[1] if open_ else None


def plan(
    arrivals_s: Sequence[float],
    stages: Sequence[BatchProfile],
    most: Sequence[int],
    slo_s: float,
    *,
    slack_ratio: float = 1.1,
    most_items: int = 2000,
) -> Planned | None:
    """Plans replicas by stage; None when the sample is empty.

    Args:
        arrivals_s: sample of arrival times in seconds, sorted.
        stages: service profiles of a chain.
        most: most replicas by stage, each at least 1.
        slo_s: objective for the 99th percentile of latency.
        slack_ratio: see the module's gaps.
        most_items: arrivals of the sample that are used, the last ones.
    """
    sample = arrivals_s[-most_items:]
    if not sample or not stages:
        return None
    estimator = _Estimator(sample, stages)
    reachable_s = estimator.p99_s(tuple(most))
    is_feasible = reachable_s <= slo_s
    target_s = slo_s if is_feasible else reachable_s * slack_ratio
    replicas = fewest = tuple(
        max(1, min(bound, math.ceil(_load(sample, batch)))) for batch, bound in zip(stages, most, strict=True)
    )
    while (p99_s := estimator.p99_s(replicas)) > target_s:
        stage = estimator.bottleneck(replicas, most)
        if stage is None:
            break
        step = max(1, replicas[stage] // 8)
        replicas = _with(replicas, stage, min(most[stage], replicas[stage] + step))
    while True:
        fewer = [
            (estimator.p99_s(r), r)
            for r in (_with(replicas, k, c - 1) for k, c in enumerate(replicas) if c > fewest[k])
        ]
        good = [candidate for candidate in fewer if candidate[0] <= target_s]
        if not good:
            return Planned(replicas, p99_s, is_feasible)
        p99_s, replicas = min(good)


def _load(arrivals_s: Sequence[float], batch: BatchProfile) -> float:
    """Offered load in replicas with full batches: fewer cannot keep up, so the search starts there."""
    span_s = arrivals_s[-1] - arrivals_s[0]
    full_s = (batch.alpha_s * batch.most + batch.beta_s) / batch.most
    return (len(arrivals_s) - 1) / span_s * full_s if span_s > 0 else 1.0


def _with(replicas: tuple[int, ...], stage: int, count: int) -> tuple[int, ...]:
    return (*replicas[:stage], count, *replicas[stage + 1 :])
