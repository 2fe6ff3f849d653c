"""Properties of the load generator's histogram: merging is the union, and the error is bounded."""

import math

from hypothesis import given
from hypothesis import strategies as st

from keystage.loadgen import measures
from keystage.loadgen.histogram import RELATIVE_ERROR, UNIT_S, Histogram, bounds_s, index_of, merged

TIMES = st.lists(st.floats(0, 1e6), max_size=120)
LOST = st.integers(0, 20)


@given(parts=st.lists(st.tuples(TIMES, LOST), min_size=1, max_size=5))
def test_a_merge_is_the_histogram_of_the_union(parts: list[tuple[list[float], int]]) -> None:
    union = Histogram.of([value for values, _ in parts for value in values], sum(lost for _, lost in parts))
    pieces = [Histogram.of(values, lost) for values, lost in parts]
    assert merged(pieces) == union
    assert merged(reversed(pieces)) == union
    assert merged(Histogram.from_record(piece.record_of()) for piece in pieces) == union


@given(values=TIMES, lost=LOST, probability=st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0]))
def test_quantiles_are_within_three_digits_of_the_exact_ones(
    values: list[float], lost: int, probability: float
) -> None:
    count = len(values) + lost
    rank = max(math.ceil(probability * count), 1)
    got = Histogram.of(values, lost).quantile(probability)
    if rank > len(values):
        assert got is None
        return
    exact = sorted(values)[rank - 1]
    assert got is not None
    assert abs(got - exact) <= max(exact * RELATIVE_ERROR * (1 + 1e-9), UNIT_S)
    assert min(values) <= got <= max(values)


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=200), lost=LOST)
def test_it_agrees_with_the_percentiles_of_all_rows(values: list[float], lost: int) -> None:
    exact, rough = measures.percentiles(values, lost), Histogram.of(values, lost)
    assert rough.max_s == exact.max
    for probability, value in ((0.5, exact.p50), (0.9, exact.p90), (0.99, exact.p99), (0.999, exact.p999)):
        got = rough.quantile(probability)
        assert (got is None) == (value is None)
        if got is not None and value is not None:
            assert abs(got - value) <= max(value * RELATIVE_ERROR * (1 + 1e-9), UNIT_S)


@given(value=st.floats(UNIT_S, 1e8))
def test_every_time_lies_in_its_bucket(value: float) -> None:
    low_s, high_s = bounds_s(index_of(value))
    assert low_s <= value * (1 + 1e-12)
    assert value <= high_s * (1 + 1e-12)
    assert high_s - low_s <= low_s * 2 * RELATIVE_ERROR * (1 + 1e-12)
