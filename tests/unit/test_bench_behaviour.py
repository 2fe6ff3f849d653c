"""What the behaviour benchmark reads off a run: settling, reversals, traffic and charts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from keystage.bench.behaviour import STEP, Course, chart, dips, reversals, settled_s


def course(*changes: tuple[float, int]) -> Course:
    nothing = np.zeros(0)
    return Course(nothing, nothing, nothing, nothing, nothing, changes)


def test_settled_is_when_the_number_no_longer_falls_below_what_it_stays_at() -> None:
    assert settled_s(course((0.0, 1), (60.25, 4), (61.5, 9), (80.0, 4)), 60, 150) == pytest.approx(0.25)
    assert settled_s(course((0.0, 1), (60.25, 3), (62.0, 5)), 60, 150) == pytest.approx(2.0)
    assert settled_s(course((0.0, 1), (60.5, 5), (61.0, 2), (70.0, 5)), 60, 150) == pytest.approx(10.0)
    assert settled_s(course((0.0, 4)), 60, 150) == 0.0


def test_a_reversal_is_more_after_fewer() -> None:
    assert reversals(course((0.0, 2), (10.0, 1), (20.0, 2), (30.0, 1), (40.0, 2)), 0, 100) == 2
    assert reversals(course((0.0, 1), (10.0, 5), (20.0, 4), (30.0, 3)), 0, 100) == 0


def test_a_dip_is_fewer_than_the_load_needs() -> None:
    assert dips(course((0.0, 4), (160.0, 3), (170.0, 2)), 150, 240, 160.0) == 0  # 1.6 erlang
    assert dips(course((0.0, 4), (160.0, 3), (170.0, 1)), 150, 240, 160.0) == 1


def test_the_traffic_has_the_rates_it_names_and_is_the_same_for_the_same_seed() -> None:
    times_s = np.array(STEP.times_s(1))
    assert STEP.times_s(1) == tuple(times_s)
    assert np.all(np.diff(times_s) >= 0)
    for (begin_s, rate), (end_s, _) in itertools.pairwise(STEP.pieces):
        inside = np.count_nonzero((times_s >= begin_s) & (times_s < end_s))
        assert inside == pytest.approx(rate * (end_s - begin_s), rel=0.1)


def test_a_chart_is_mermaid_with_a_value_a_point() -> None:
    text = chart("t", "second", np.array([1.0, 2.0]), "items", [np.array([0.5, 2.25])])
    assert text.startswith("```mermaid\nxychart-beta\n")
    assert 'x-axis "second" [1, 2]' in text
    assert "line [0.5, 2.25]" in text
