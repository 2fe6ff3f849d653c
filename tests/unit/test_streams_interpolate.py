"""Profiles between measured points, on part of a device, and what is refused."""

import pytest

from keystage.batching.profile import LatencyProfile, ProfileError
from keystage.streams.interpolate import economical_batch, grid, on_spus, slowed, table


def test_measured_points_are_kept_and_between_them_lies_a_line():
    profile = table([1, 4, 8], [1.0, 2.5, 3.5])
    assert [profile.latency_s(b) for b in (1, 2, 4, 6, 8)] == [1.0, 1.5, 2.5, 3.0, 3.5]
    assert profile.most == 8


def test_noise_that_falls_is_raised_to_what_a_smaller_batch_took():
    # DiT-XL/2 as published: a batch of 2 was measured faster than one of 1.
    profile = table([1, 2, 3], [0.0197, 0.0186, 0.0194])
    assert profile.seconds == (0.0197, 0.0197, 0.0197)
    assert profile.largest_batch(0.0197) == 3


def test_a_batch_below_the_least_measured_takes_as_long_as_that():
    profile = table([4, 8], [2.0, 3.0])
    assert profile.latency_s(1) == 2.0
    assert profile.largest_batch(1.9) == 0
    assert profile.largest_batch(2.0) == 4


def test_beyond_the_largest_measured_there_is_no_batch():
    profile = table([1, 2], [1.0, 1.1])
    assert profile.largest_batch(1e9) == 2
    with pytest.raises(ProfileError, match="a batch of 3 was not measured, the largest is 2"):
        profile.latency_s(3)


def test_a_line_through_the_points_is_there_for_whoever_needs_one():
    profile = table([1, 2, 4], [1.5, 2.0, 3.0])
    assert (profile.alpha_s, profile.beta_s) == (pytest.approx(0.5), pytest.approx(1.0))
    steep = table([1, 2, 3], [1.0, 3.0, 6.0])
    assert steep.beta_s == 0.0
    assert steep.alpha_s == pytest.approx(25 / 14)


def test_the_grid_is_linear_in_tokens_too():
    prefill = grid([1, 2], [128, 256], [[1.0, 2.0], [2.0, 4.0]])
    assert prefill.latency_s(1, 192) == 1.5
    assert prefill.latency_s(2, 160) == 2.5
    assert prefill.latency_s(2, 5) == 2.0
    assert prefill.at(192).largest_batch(3.0) == 2


def test_a_grid_falls_along_neither_side():
    made = grid([1, 2], [1, 2], [[2.0, 1.0], [1.0, 3.0]])
    assert made.seconds == ((2.0, 2.0), (2.0, 3.0))


def test_a_length_beyond_the_measured_is_refused():
    prefill = grid([1], [128, 256], [[1.0, 2.0]])
    with pytest.raises(ProfileError, match="257 tokens were not measured, the longest are 256"):
        prefill.at(257)


@pytest.mark.parametrize(
    ("batches", "seconds", "text"),
    [
        ([], [], "at least one point, batches has none"),
        ([0, 1], [1.0, 2.0], r"batches must ascend from at least 1, got \[0, 1\]"),
        ([2, 2], [1.0, 2.0], "must ascend"),
        ([1, 2], [1.0], "2 batch sizes need as many times, got 1"),
        ([1], [0.0], "the time of a batch of 1 must be more than 0 s, it is 0"),
        ([1], [float("nan")], "must be more than 0 s, it is nan"),
    ],
)
def test_points_that_make_no_profile_are_refused(batches, seconds, text):
    with pytest.raises(ProfileError, match=text):
        table(batches, seconds)


def test_a_grid_with_a_hole_is_refused():
    with pytest.raises(ProfileError, match="batch 2 needs 2 times, one a length, got 1"):
        grid([1, 2], [1, 2], [[1.0, 2.0], [1.0]])
    with pytest.raises(ProfileError, match="2 batch sizes need as many times, got 1"):
        grid([1, 2], [1, 2], [[1.0, 2.0]])


def test_part_of_the_devices_runs_at_that_part_of_their_rate():
    whole = LatencyProfile(1.0, 2.0, 16)
    half = on_spus(whole, 8, devices=2, device_spus=8)
    assert (half.alpha_s, half.beta_s, half.most) == (2.0, 4.0, 16)
    assert on_spus(whole, 16, 2, 8) is whole
    # batch_limit within the same time falls faster than the share: beta is paid too.
    assert (whole.largest_batch(10.0), half.largest_batch(10.0)) == (8, 3)


def test_a_table_on_part_of_a_device_keeps_its_points():
    made = on_spus(table([1, 3], [1.0, 2.0]), 2, 1, 8)
    assert [made.latency_s(b) for b in (1, 2, 3)] == [4.0, 6.0, 8.0]


@pytest.mark.parametrize("spus", [0, -1, 17])
def test_shares_that_the_devices_do_not_have_are_refused(spus):
    with pytest.raises(ProfileError, match=f"between 1 and 16 SPUs of 2 devices, not {spus}"):
        on_spus(LatencyProfile(1.0, 1.0), spus, 2, 8)


def test_the_way_from_another_device_is_added_to_each_item():
    assert slowed(LatencyProfile(1.0, 2.0), 1.0, 0.25).alpha_s == 1.25
    assert slowed(table([1, 2], [1.0, 1.0]), 1.0, 0.25).seconds == (1.25, 1.5)
    with pytest.raises(ProfileError, match="more than 0, not by 0"):
        slowed(LatencyProfile(1.0, 2.0), 0.0)


def test_beyond_the_economical_batch_a_larger_one_gains_little():
    # Throughputs 1, 2, 2.4, 2.5: flat up to 2, then nearly as long for each item.
    profile = table([1, 2, 3, 4], [1.0, 1.0, 1.25, 1.6])
    assert [economical_batch(profile, 9.0, ratio) for ratio in (0.8, 0.95, 1.0)] == [2, 3, 4]
    assert economical_batch(profile, 1.0, 1.0) == 2
    assert economical_batch(profile, 0.9, 0.5) == 0
    line = LatencyProfile(0.1, 0.1, 8)
    assert (economical_batch(line, 9.0, 1.0), economical_batch(line, 0.5, 1.0)) == (8, 4)
