"""The PID step: sign, bounds, anti-windup, freeze."""

from __future__ import annotations

import pytest

from keystage.controller.domain.state import PidState
from keystage.controller.maths.pid import PidGains, output, step

GAINS = PidGains(kp=0.5, ki=0.1, kd=0.2, limit=1.0)


def test_too_long_a_time_asks_for_more() -> None:
    value, state = step(GAINS, PidState(), 0.4, 1.0)
    assert value == pytest.approx(0.5 * 0.4 + 0.1 * 0.4)
    assert state == PidState(pytest.approx(0.04), 0.4)


def test_too_short_a_time_asks_for_less() -> None:
    assert step(GAINS, PidState(), -0.4, 1.0)[0] < 0


def test_slope_term() -> None:
    value, _ = step(GAINS, PidState(0.0, 0.1), 0.3, 0.5)
    assert value == pytest.approx(0.5 * 0.3 + 0.2 * 0.4 + 0.1 * 0.3 * 0.5)


def test_integral_does_not_wind_up_and_comes_back_at_once() -> None:
    state = PidState()
    for _ in range(1000):
        value, state = step(GAINS, state, 5.0, 1.0)
        assert value == 1.0
    assert state.integral <= 1.0
    value, _ = step(GAINS, state, -1.0, 1.0)
    assert value < 0.6


def test_no_time_no_integration() -> None:
    value, state = step(GAINS, PidState(0.2, 0.1), 0.3, 0.0)
    assert value == pytest.approx(0.35)
    assert state.integral == 0.2
    assert step(GAINS, PidState(0.2, 0.1), 0.3, -5.0)[1].integral == 0.2


def test_frozen_output_is_the_last_one_without_slope() -> None:
    value, state = step(PidGains(kd=0.0), PidState(), 0.4, 1.0)
    assert output(PidGains(kd=0.0), state) == pytest.approx(value)
