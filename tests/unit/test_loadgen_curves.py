"""What plots show: thinned distributions, stretches of time, marks of axes, and their drawing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.load_reports import rows

from keystage.loadgen import curves
from keystage.loadgen.charts import Chart, Line, svg
from keystage.loadgen.sender import Row


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=3000), failed=st.integers(0, 50))
def test_a_thinned_distribution_keeps_ends_and_order(values: list[float], failed: int) -> None:
    got = curves.cdf(values, failed)
    assert len(got.values) == len(got.share) <= curves.CDF_POINTS + 1
    assert (got.values[0], got.values[-1]) == (min(values), max(values))
    assert got.values == sorted(got.values)
    assert got.share[-1] == pytest.approx(len(values) / (len(values) + failed))
    ordered = sorted(values)
    for value, share in zip(got.values, got.share, strict=True):
        assert ordered[round(share * (len(values) + failed)) - 1] == value


def test_no_value_has_no_distribution() -> None:
    assert curves.cdf([], 3) == curves.Cdf([], [])


def test_stretches_by_hand() -> None:
    of = [
        Row(0, 0.0, 0.1, 0.2, 1.0, 200, 1, 2),
        Row(1, 0.5, 0.5, 0.6, 0.7, 200, 1, 2),
        Row(2, 1.5, 2.5, None, 2.6, 503, error="http_503: no"),
    ]
    first, second, third = curves.spans(of, 3.0, most=3)
    assert (first.from_s, first.to_s, first.sent, first.served, first.failed) == (0.0, 1.0, 2, 2, 0)
    assert (first.median_s, first.p99_s, first.max_s) == (pytest.approx(0.2), 1.0, 1.0)
    assert (first.lag_max_s, second.lag_max_s) == (pytest.approx(0.1), 1.0)
    assert (second.sent, second.failed, second.median_s) == (0, 1, None)
    assert (third.sent, third.served, third.lag_max_s) == (1, 0, 0.0)


@given(end_s=st.floats(0.01, 1e6))
def test_every_request_is_in_a_stretch(end_s: float) -> None:
    of = [Row(k, end_s * k / 20, end_s * k / 20, 0, end_s, 200) for k in range(21)]
    made = curves.spans(of, end_s)
    assert len(made) <= curves.SPANS
    assert sum(span.sent for span in made) == sum(span.served for span in made) == 21


@given(high=st.floats(1e-6, 1e9))
def test_marks_cover_what_is_shown(high: float) -> None:
    made = curves.ticks(high)
    assert made[0] == 0
    assert made[-1] >= high * (1 - 1e-9)
    assert 2 <= len(made) <= 7


@pytest.mark.parametrize(
    ("least", "step"), [(1.0, 1.0), (1.1, 2.0), (2.2, 2.5), (3.0, 5.0), (7.0, 10.0), (0.03, 0.05)]
)
def test_steps_are_round(least: float, step: float) -> None:
    assert curves.nice_step(least) == pytest.approx(step)


def test_a_line_breaks_where_nothing_is_known() -> None:
    line = Line("a", [(0.0, 1.0), (1.0, None), (2.0, 1.0), (3.0, 2.0)])
    drawn = svg(Chart("t", "says", "x", "y", [line]), "c0")
    path = drawn.partition('class="line s0"')[2].partition("/>")[0]
    assert (path.count("M"), path.count("L")) == (2, 1)


def test_names_are_escaped() -> None:
    chart = Chart(
        "<t>", "&", "<x>", "<y>", [Line("<a>", [(0, 1)])], bounds=[(1, "<b>")], x_ticks=[(0, "<"), (1, "")]
    )
    drawn = svg(chart, "c0")
    assert not [name for name in ("<t>", "<x>", "<y>", "<a>", "<b>") if name in drawn]


def test_a_large_run_is_drawn_with_few_points() -> None:
    made = curves.spans(rows(1, 20_000, failed_ratio=0.01), 60.0)
    assert len(made) <= curves.SPANS
    assert sum(span.failed + span.served for span in made) == 20_000
