"""Autoscaling advice: Symphony's two formulas, and the hysteresis around them."""

from __future__ import annotations

import itertools

import pytest

from keystage.batching.advice import (
    Advice,
    AdviceSettings,
    AdviceState,
    Growth,
    advise,
    missing,
    surplus,
)

SETTINGS = AdviceSettings()


def _after(
    seconds: int, replicas: int, bad: float, idle: float, settings: AdviceSettings = SETTINGS
) -> list[tuple[int, Advice]]:
    """Looks once a second at a steady world; what was advised, and when."""
    state, given = AdviceState(replicas), []
    for at in range(1, seconds + 1):
        growth = Growth(1.0, 100.0, 100.0 * bad, float(replicas), replicas * idle)
        advice, state = advise(settings, state, replicas, growth)
        if advice.change:
            given.append((at, advice))
    return given


def test_the_formulas_restore_capacity() -> None:
    """o = 1.25 p on 8: a fifth goes bad, 2 are missing; o = 0.75 p on 8: a quarter idles, 2 are too many."""
    assert missing(8, 0.2) == pytest.approx(2)
    assert surplus(8, 0.25) == pytest.approx(2)
    offered, peak = 1700.0, 1000.0
    bad = (offered - peak) / offered
    assert 10 + missing(10, bad) == pytest.approx(10 * offered / peak)


def test_a_bad_rate_asks_for_more_after_the_interval() -> None:
    given = _after(12, 8, 0.2, 0.0)
    assert [at for at, _ in given] == [5, 10]
    assert given[0][1] == Advice(2, "20.0% of 500 bad in 5 s")


@pytest.mark.parametrize("bad", [0.0, 0.005, 0.01])
def test_a_bad_rate_within_the_threshold_asks_for_nothing(bad: float) -> None:
    assert _after(20, 8, bad, 0.0) == []


def test_few_requests_are_no_evidence() -> None:
    state = AdviceState(4)
    for _ in range(39):  # 195 requests over 39 s
        advice, state = advise(SETTINGS, state, 4, Growth(1.0, 5.0, 1.0, 4.0, 0.0))
        assert advice.change == 0
    advice, _ = advise(SETTINGS, state, 4, Growth(1.0, 5.0, 1.0, 4.0, 0.0))
    assert advice.change == 1


def test_idle_replicas_are_let_go_less_a_spare_after_a_longer_interval() -> None:
    given = _after(31, 20, 0.0, 0.4)
    assert given == [(30, Advice(-7, "40% idle in 30 s"))]  # 20 * (0.4 - 0.05)


def test_nobody_is_let_go_while_requests_go_bad() -> None:
    assert [a.change for _, a in _after(60, 20, 0.007, 0.4)] == []
    assert all(a.change > 0 for _, a in _after(60, 20, 0.02, 0.4))


def test_one_replica_always_stays() -> None:
    assert _after(30, 1, 0.0, 1.0) == []
    assert _after(30, 3, 0.0, 1.0)[0][1].change == -2


def test_less_than_one_replica_of_idle_time_is_kept() -> None:
    assert _after(90, 4, 0.0, 0.29) == []
    assert _after(30, 4, 0.0, 0.31)[0][1].change == -1


def test_another_number_of_replicas_begins_anew() -> None:
    state = AdviceState(8)
    for _ in range(4):
        _, state = advise(SETTINGS, state, 8, Growth(1.0, 100.0, 50.0, 8.0, 0.0))
    advice, state = advise(SETTINGS, state, 9, Growth(1.0, 100.0, 50.0, 9.0, 0.0))
    assert (advice, state) == (Advice(), AdviceState(9))


def test_all_bad_is_bounded_and_none_serving_is_silent() -> None:
    assert _after(5, 3, 1.0, 0.0)[0][1].change == 12  # as at 80 %
    assert _after(60, 0, 1.0, 0.0) == []


def test_nothing_told_advises_nothing() -> None:
    state = AdviceState(5)
    for _ in range(100):
        advice, state = advise(SETTINGS, state, 5, Growth(1.0))
        assert advice.change == 0


def test_following_the_advice_settles() -> None:
    """A flat-top world: capacity 100 a replica; load 1000, then 420."""
    replicas, state, course = 4, AdviceState(4), []
    for at in range(400):
        offered = 1000.0 if at < 200 else 420.0
        peak = 100.0 * replicas
        bad, idle = max(0.0, 1 - peak / offered), max(0.0, 1 - offered / peak)
        growth = Growth(1.0, offered, offered * bad, float(replicas), replicas * idle)
        advice, state = advise(SETTINGS, state, replicas, growth)
        replicas += advice.change
        course.append(replicas)
    assert course[190] == 10
    assert course[-1] == 5
    assert sum(a != b for a, b in itertools.pairwise(course)) <= 4
