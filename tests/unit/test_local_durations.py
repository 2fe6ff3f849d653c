"""Durations as Go writes and reads them."""

from __future__ import annotations

import pytest

from keystage.local.durations import MAX_S, go_duration, parse_go_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0015, "1.5ms"),
        (0.25, "250ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.999999, "59.999999s"),
        (60, "1m0s"),
        (600, "10m0s"),
        (3600, "1h0m0s"),
        (5400.5, "1h30m0.5s"),
        (360000, "100h0m0s"),
    ],
)
def test_written_as_go_does_and_read_back(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text
    assert parse_go_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("+5s", 5),
        ("1h15m30.918s", 4530.918),
        (".5s", 0.5),
        ("1.s", 1),
        ("100us", 1e-4),
        ("2µs", 2e-6),
    ],
)
def test_read_as_go_does(text: str, seconds: float) -> None:
    assert parse_go_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no duration"),
        ("15", "no duration"),
        ("s", "no duration"),
        (".s", "no duration"),
        ("1s ", "no duration"),
        ("1d", "no duration"),
        ("1h 5m", "no duration"),
        ("٣s", "no duration"),
        ("-1s", "negative"),
        ("9999999999s", "more than"),
        ("9" * 200 + "s", "no duration"),
    ],
)
def test_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_go_duration(text)


def test_what_go_cannot_hold_is_not_written() -> None:
    for seconds in (-1.0, MAX_S * 2, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a duration must be in"):
            go_duration(seconds)
