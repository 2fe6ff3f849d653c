"""l(b) kept current: it finds the line, follows a change, and nothing stray moves it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystage.batching.deadlines import cumulative_shares, stage_deadline_s
from keystage.batching.fit import WINDOW, HighPercentile, ProfileFit
from keystage.batching.profile import LatencyProfile
from keystage.bundle.api import StageProfile
from keystage.router.service_times import ServiceTimes


def fed(
    fit: ProfileFit, alpha_s: float, beta_s: float, batches: int, noise: float = 0.0, seed: int = 1
) -> ProfileFit:
    rng = random.Random(seed)
    for _ in range(batches):
        size = rng.choice((1, 2, 3, 5, 8, 13, 21))
        fit.add(size, (alpha_s * size + beta_s) * (1 + rng.uniform(0, noise)))
    return fit


def test_the_line_is_found_and_a_change_is_followed() -> None:
    fit = fed(ProfileFit(), 0.002, 0.020, 40)
    found = fit.profile()
    assert found is not None
    assert (found.alpha_s, found.beta_s) == pytest.approx((0.002, 0.020))
    found = fed(fit, 0.001, 0.030, WINDOW + 8).profile(most=16)
    assert found is not None
    assert (found.alpha_s, found.beta_s) == pytest.approx((0.001, 0.030))
    assert found.most == 16


def test_strays_do_not_move_it() -> None:
    fit = fed(ProfileFit(), 0.002, 0.020, 100, noise=0.02)
    for _ in range(9):
        fit.add(21, 3.0)  # hung
        fit.add(1, 0.0)  # a clock that stood still
    for nonsense in (math.nan, math.inf, -1.0, 1e12):
        assert not fit.add(4, nonsense)
    assert not fit.add(0, 0.1)
    found = fit.profile()
    assert found is not None
    assert found.latency_s(8) == pytest.approx(0.036, rel=0.05)


def test_one_size_scales_what_was_believed_or_promises_nothing() -> None:
    assert ProfileFit().profile() is None
    fit = ProfileFit(LatencyProfile(0.001, 0.009))
    fit.add(1, 0.020)
    found = fit.profile()
    assert found is not None
    assert (found.alpha_s, found.beta_s) == pytest.approx((0.002, 0.018))
    fit = ProfileFit()
    fit.add(4, 0.020)
    assert fit.profile() == LatencyProfile(0.0025, 0.010)


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 3600)), min_size=1, max_size=200))
def test_whatever_comes_a_profile_comes_out(seen: list[tuple[int, float]]) -> None:
    fit = ProfileFit()
    for batch, seconds in seen:
        fit.add(batch, seconds)
    found = fit.profile()
    assert found is not None
    assert 0 < found.latency_s(1) <= 2 * 3600
    assert found.latency_s(2) >= found.latency_s(1)


def test_a_high_percentile_of_the_last_ones() -> None:
    seen = HighPercentile(window=200)
    assert seen.value_s == 0.0
    seen.add(0.5)
    assert seen.value_s == 0.5
    for _ in range(197):
        seen.add(0.001)
    seen.add(0.5)
    assert seen.value_s == 0.001  # two strays rule nothing
    seen.add(0.25)
    assert seen.value_s == 0.25
    seen.add(math.nan)
    assert len(seen) == 200


def test_deadlines_are_shared_out_cumulatively() -> None:
    assert cumulative_shares([1.0, 2.0, 1.0]) == [0.25, 0.75, 1.0]
    assert cumulative_shares([0.0, math.nan]) == [0.5, 1.0]
    assert cumulative_shares([0.3, 0.0]) == [0.5, 1.0]
    assert stage_deadline_s(2.0, 4.0, 0.25) == 2.5
    assert stage_deadline_s(2.0, math.inf, 0.25) == math.inf


def test_a_span_has_the_time_of_its_slowest_worker_and_before_that_the_bundles() -> None:
    times = ServiceTimes([StageProfile("cpu", 0.001, 0.009), StageProfile("cpu", 0.003, 0.027), None])
    assert times.span(0, 1, {"a"}, 8) == LatencyProfile(0.004, 0.036, 8)
    assert times.span(1, 2, {"a"}, 8) is None
    assert times.of_stages() == pytest.approx([0.010, 0.030, 0.0])
    times.measured("a", (0, 1), 1, 0.080, 0.002)
    times.measured("b", (0, 1), 1, 0.120, 0.002)
    # One batch of each says little of either.
    both = times.span(0, 1, {"a", "b"}, 8)
    assert both is not None
    assert both.latency_s(1) == pytest.approx(0.100)
    for _ in range(10):
        for size in (1, 2):
            times.measured("a", (0, 1), size, 0.076 + 0.004 * size, 0.002)
            times.measured("b", (0, 1), size, 0.116 + 0.004 * size, 0.002)
    slow = times.span(0, 1, {"a", "b"}, 8)
    assert slow is not None
    assert slow.latency_s(1) == pytest.approx(0.120)
    assert times.of_stages() == pytest.approx([0.030, 0.090, 0.0])
    times.forget("b")
    for _ in range(3):
        times.measured("a", (0, 1), 1, 0.080, 0.002)
    assert times.of_stages() == pytest.approx([0.020, 0.060, 0.0])
    assert times.delays().control_s == pytest.approx(0.002)
    times.measured("a", (0, 1), 1, 0.080, 1e9)
    times.measured("a", (0, 1), 1, math.nan, -1.0)
    assert times.delays().control_s == pytest.approx(0.002)


def test_a_damaged_profile_is_none() -> None:
    times = ServiceTimes([StageProfile("cpu", -1.0, 0.0), StageProfile("cpu", 0.0, 0.0)])
    assert times.span(0, 0, {"a"}, 8) is None
    assert times.of_stages() == [0.0, 0.0]
