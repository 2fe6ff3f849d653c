"""The partitions: every layer once, no part empty, and as good as an exhaustive search."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystage.bundle import partition
from keystage.bundle.errors import SplitError

sizes = st.integers(1, 60).flatmap(lambda items: st.tuples(st.just(items), st.integers(1, items)))


@given(sizes)
def test_uniform_counts_differ_by_one_at_most(size: tuple[int, int]) -> None:
    items, parts = size
    bounds = partition.uniform(items, parts)
    partition.check_bounds(bounds, items)
    counts = [end - start for start, end in itertools.pairwise(bounds)]
    assert len(counts) == parts
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_balanced_has_the_lightest_heaviest_part(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    bounds = partition.balanced(weights, parts)
    partition.check_bounds(bounds, len(weights))

    def heaviest(cuts: tuple[int, ...]) -> int:
        return max(sum(weights[start:end]) for start, end in itertools.pairwise((0, *cuts, len(weights))))

    best = min(heaviest(cuts) for cuts in itertools.combinations(range(1, len(weights)), parts - 1))
    assert heaviest(tuple(bounds[1:-1])) == best


def test_known_partitions() -> None:
    assert partition.uniform(30, 4) == [0, 8, 16, 23, 30]
    assert partition.balanced([1, 1, 1, 5, 1, 1, 1, 5], 3) == [0, 3, 6, 8]
    assert partition.with_ends([1, 1, 1], 10, 20) == [11, 1, 21]
    # A heavy embedding leaves the first stage one layer, never none.
    assert partition.balanced(partition.with_ends([1.0] * 6, 100, 100), 3) == [0, 1, 5, 6]


@pytest.mark.parametrize(("stages", "message"), [(0, "at least 1, got 0"), (5, "5 stages wanted.* 4 layers")])
def test_impossible_counts_are_refused(stages: int, message: str) -> None:
    with pytest.raises(SplitError, match=message):
        partition.check_stages(stages, 4)


@pytest.mark.parametrize("bounds", [[0, 2, 2, 4], [0, 3], [1, 4], [0, 3, 2, 4]])
def test_bad_bounds_are_refused(bounds: list[int]) -> None:
    with pytest.raises(SplitError):
        partition.check_bounds(bounds, 4)
