"""Sub-cluster partition: known answers, bounds kept, what cannot be met is named."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from keystage.batching import partition_milp
from keystage.batching.partition import partition
from keystage.batching.partition_local import Descent, largest_first, tables, value
from keystage.batching.partition_problem import (
    Bounds,
    PartitionError,
    Problem,
    SharedModel,
    disruption,
    imbalance_ratio,
    violations,
)


def _zoo(count: int, seed: int) -> list[SharedModel]:
    rng = random.Random(seed)
    return [
        SharedModel(f"m{i}", rng.expovariate(0.01), rng.uniform(1e7, 6e8), rng.uniform(5e7, 2e9))
        for i in range(count)
    ]


def test_four_models_in_two_pairs() -> None:
    models = [SharedModel(n, r, 1.0) for n, r in (("a", 10), ("b", 20), ("c", 30), ("d", 40))]
    found = partition(Problem(models, Bounds(2)), time.monotonic)
    assert found.status == "optimal"
    assert found.objective == pytest.approx(0, abs=1e-9)
    assert found.assigned[0] == found.assigned[3] != found.assigned[1] == found.assigned[2]


def test_the_weight_decides_between_load_and_memory() -> None:
    models = [SharedModel("a", 3, 1), SharedModel("b", 1, 3), SharedModel("c", 3, 3), SharedModel("d", 1, 1)]
    by_rate = partition(Problem(models, Bounds(2), weight=0.0), time.monotonic)
    assert by_rate.rate_imbalance_ratio == pytest.approx(0)
    both = partition(Problem(models, Bounds(2), weight=1.0), time.monotonic)
    assert both.memory_imbalance_ratio == both.rate_imbalance_ratio == pytest.approx(0)


def test_a_middling_size_is_balanced_within_a_thousandth() -> None:
    problem = Problem(_zoo(120, 3), Bounds(5))
    found = partition(problem, time.monotonic)
    assert found.status == "gap"
    assert found.rate_imbalance_ratio < 2e-3
    assert found.memory_imbalance_ratio < 2e-3


def test_the_disruption_bound_holds_and_a_larger_one_balances_better() -> None:
    models = _zoo(60, 4)
    now = [i % 3 for i in range(60)]
    found = []
    for most in (0, 4, 40):
        problem = Problem(models, Bounds(3, disruption=most), current=now)
        answer = partition(problem, time.monotonic, limit_s=1.0)
        assert answer.disruption == disruption(problem, answer.assigned) <= most
        assert answer.moved == sum(a != b for a, b in zip(now, answer.assigned, strict=True)) <= most / 2
        found.append(answer.objective)
    assert found[0] > found[1] > found[2]


def test_costs_are_per_model_and_sub_cluster() -> None:
    """Both a and b would do; a is dear to load."""
    models = [SharedModel(n, 1, 1) for n in "abcd"]
    costs = [[9.0, 9.0], [1.0, 1.0], [9.0, 9.0], [9.0, 9.0]]
    problem = Problem(models, Bounds(2, disruption=2), current=(0, 0, 0, 1), costs=costs)
    answer = partition(problem, time.monotonic)
    assert answer.assigned == (0, 1, 0, 1)
    assert answer.disruption == 2


def test_new_models_are_placed_and_old_ones_stay() -> None:
    models = [SharedModel("a", 5, 5), SharedModel("b", 5, 5), SharedModel("new", 5, 5)]
    problem = Problem(models, Bounds(3, disruption=1), current=(0, 1, -1))
    answer = partition(problem, time.monotonic)
    assert answer.assigned == (0, 1, 2)
    assert answer.moved == 0


def test_one_batch_runs_at_a_time_so_the_largest_dynamic_memory_counts_once() -> None:
    models = [SharedModel("a", 1, 3, 4), SharedModel("b", 1, 3, 4), SharedModel("c", 1, 3, 1)]
    answer = partition(Problem(models, Bounds(1, memory_bytes=13)), time.monotonic)
    assert answer.assigned == (0, 0, 0)
    with pytest.raises(PartitionError, match="memory_bytes") as caught:
        partition(Problem(models, Bounds(1, memory_bytes=12.5)), time.monotonic)
    assert caught.value.excess == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("bounds", "bound", "excess", "word"),
    [
        (Bounds(2, rate_rps=25), "rate_rps", 5.0, "m2 alone has 30 requests/s"),
        (Bounds(2, memory_bytes=11), "memory_bytes", 1.0, "m1 alone takes 12 bytes"),
        (Bounds(1, rate_rps=50), "rate_rps", 10.0, "all 3 models together have 60"),
        (Bounds(1, memory_bytes=20), "memory_bytes", 6.0, "all 3 models together take 26"),
    ],
)
def test_sums_that_miss_a_bound_are_named(bounds: Bounds, bound: str, excess: float, word: str) -> None:
    models = [SharedModel("m0", 10, 8, 2), SharedModel("m1", 20, 8, 4), SharedModel("m2", 30, 6, 0)]
    with pytest.raises(PartitionError, match=word) as caught:
        partition(Problem(models, bounds), time.monotonic)
    assert caught.value.bound == bound
    assert caught.value.excess == pytest.approx(excess)
    assert caught.value.is_proven


def test_pieces_that_fit_in_sum_only_are_named_with_the_least_excess() -> None:
    models = [SharedModel(n, 6, 1) for n in "abc"]
    with pytest.raises(PartitionError, match="every division") as caught:
        partition(Problem(models, Bounds(2, rate_rps=10)), time.monotonic)
    assert caught.value.bound == "rate_rps"
    assert caught.value.excess == pytest.approx(2)
    assert caught.value.is_proven


def test_a_disruption_bound_too_small_for_the_others_is_named() -> None:
    models = [SharedModel(n, 5, 1) for n in "abcd"]
    problem = Problem(models, Bounds(2, rate_rps=10, disruption=3), current=(0, 0, 0, 0))
    with pytest.raises(PartitionError, match=r"disruption: .* at least 4") as caught:
        partition(problem, time.monotonic)
    assert caught.value.bound == "disruption"
    assert caught.value.excess == pytest.approx(1)
    within = Problem(models, Bounds(2, rate_rps=10, disruption=4), current=(0, 0, 0, 0))
    assert partition(within, time.monotonic).moved == 2


def test_what_exchanges_cannot_mend_the_milp_does() -> None:
    """Halves of 62 exist, moves and swaps end before them; too many binaries to be solved at once."""
    models = [SharedModel(f"m{i}", size, size) for i, size in enumerate((31, 26, 24, 16, 13, 9, 5))]
    models += [SharedModel(f"none{i}", 0.0, 0.0) for i in range(30)]
    problem = Problem(models, Bounds(2))
    tab = tables(problem)
    search = Descent(tab, largest_first(tab))
    search.run(lambda: False)
    assert value(tab, search.assigned) > 0.05
    assert partition(problem, time.monotonic).objective == pytest.approx(0, abs=1e-9)


def test_exchanges_never_leave_the_disruption_bound() -> None:
    problem = Problem(_zoo(40, 9), Bounds(4, disruption=7), current=[i % 4 for i in range(40)])
    tab = tables(problem)
    search = Descent(tab, largest_first(tab))
    before = value(tab, search.assigned)
    search.run(lambda: False)
    assert value(tab, search.assigned) < before
    assert disruption(problem, search.assigned.tolist()) <= 7


def test_the_programme_on_two_sub_clusters_leaves_the_others_alone() -> None:
    tab = tables(Problem(_zoo(30, 5), Bounds(3)))
    base = np.arange(30) % 3
    found = partition_milp.solve(tab, 0.5, base=base, clusters=np.array([0, 2]))
    assert found.assigned is not None
    assert (found.assigned[base == 1] == 1).all()
    assert set(found.assigned[base != 1]) <= {0, 2}


def test_a_time_limit_is_told() -> None:
    """With no time at all the exchanges' first step is the answer."""
    problem = Problem(_zoo(200, 6), Bounds(8))
    ticks = iter(range(10_000))
    answer = partition(problem, lambda: float(next(ticks)), limit_s=1.0, gap_ratio=1e-12)
    assert answer.status == "time limit"
    assert violations(problem, answer.assigned) == {}


def test_imbalance_of_nothing_is_none() -> None:
    assert imbalance_ratio([0.0, 0.0]) == 0.0
    assert imbalance_ratio([1.0, 3.0]) == 1.0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"models": []}, "at least one model"),
        ({"bounds": Bounds(0)}, "sub_clusters must be at least 1, it is 0"),
        ({"weight": -1.0}, "weight must be at least 0"),
        ({"bounds": Bounds(2, rate_rps=float("nan"))}, "rate_rps must be at least 0"),
        ({"models": [SharedModel("x", float("nan"), 1)]}, "rate_rps of x"),
        ({"current": (0, 1)}, "must name 1 sub-clusters, it names 2"),
        ({"current": (2,)}, "sub-cluster 2, there are 2"),
        ({"bounds": Bounds(2, disruption=3)}, "needs the current division"),
        ({"costs": [[1.0]]}, "1 rows of 2"),
    ],
)
def test_problems_that_are_none(change: dict[str, object], text: str) -> None:
    fields: dict[str, object] = {"models": [SharedModel("a", 1, 1)], "bounds": Bounds(2)}
    with pytest.raises(ValueError, match=text):
        Problem(**(fields | change))  # type: ignore[arg-type]
