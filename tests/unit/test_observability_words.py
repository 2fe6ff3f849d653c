"""Numbers and decisions in words."""

from __future__ import annotations

import math

import pytest

from keystage.observability import words
from keystage.observability.words import Numbers, because, change, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.00031, "0.31 ms"),
        (0.0125, "12.5 ms"),
        (0.31, "310 ms"),
        (0.9996, "1 s"),
        (1.25, "1.25 s"),
        (95.0, "95 s"),
        (720.0, "12 min"),
        (12600.0, "3.5 h"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_more_replicas_say_which_wait_was_predicted_and_which_is_allowed() -> None:
    numbers = Numbers(predicted_wait_s=0.31, allowed_wait_s=0.08, ready=2)
    why = because("waits within 0.1 s", numbers, is_more=True)
    assert change("stage 3", 2, 4, "replica", why) == "stage 3: 2 -> 4, predicted wait 310 ms > 80 ms"


@pytest.mark.parametrize(
    ("reason", "numbers", "is_more", "text"),
    [
        (
            "waits within 0.1 s; at most 4 by label",
            Numbers(predicted_wait_s=0.2, allowed_wait_s=0.1),
            True,
            "predicted wait 200 ms > 100 ms; at most 4 by label",
        ),
        (
            "waits within 0.1 s",
            Numbers(utilisation_ratio=1.4, allowed_wait_s=0.1, ready=2),
            True,
            "140 % of what 2 replicas can do: waits grow without bound",
        ),
        (
            "waits within 0.1 s",
            Numbers(measured_wait_s=0.15, allowed_wait_s=0.1, utilisation_ratio=0.9),
            True,
            "measured wait 150 ms > 100 ms",
        ),
        (
            "waits within 0.1 s",
            Numbers(predicted_wait_s=0.05, allowed_wait_s=0.1, arrival_rps=41.0),
            True,
            "to keep the wait within 100 ms at 41 arrivals/s",
        ),
        (
            "waits within 0.1 s; surplus given back",
            Numbers(predicted_wait_s=0.001, allowed_wait_s=0.1),
            False,
            "fewer keep the wait within 100 ms; surplus given back",
        ),
        (
            "backlog of 12",
            Numbers(predicted_wait_s=0.31, allowed_wait_s=0.08),
            True,
            "backlog of 12, predicted wait 310 ms > 80 ms",
        ),
        ("backlog of 12", Numbers(), True, "backlog of 12"),
        ("override: 3; at most 2 by label", Numbers(), True, "a person asked for 3; at most 2 by label"),
        ("as it is", Numbers(), True, ""),
        ("nothing came for 300 s", Numbers(), False, "nothing came for 300 s"),
        ("advice: 4 % were late", Numbers(), True, "advice: 4 % were late"),
    ],
)
def test_a_reason_gets_the_numbers_behind_it(reason: str, numbers: Numbers, is_more: bool, text: str) -> None:
    assert because(reason, numbers, is_more=is_more) == text


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_what_is_no_number_has_no_words(missing: float | None) -> None:
    numbers = Numbers(
        predicted_wait_s=missing,
        measured_wait_s=missing,
        allowed_wait_s=missing,
        arrival_rps=missing,
        utilisation_ratio=missing,
    )
    for is_more in (True, False):
        assert because("waits within 0.1 s", numbers, is_more=is_more) == "waits within 0.1 s"
    assert words.short(missing) is None
    assert words.known(missing) is None


def test_changes_without_a_number_before_and_of_cores() -> None:
    assert change("f", None, 1, "replica", "") == "f: 1 replica at first"
    assert change("f", None, 3, "replica", "a request waits") == "f: 3 replicas at first, a request waits"
    assert change("stage 0", 1.0, 1.5, "core", "") == "stage 0: 1 -> 1.5 cores"


def test_places_and_orders_are_named_up_to_a_bound() -> None:
    assert words.places([]) == ""
    assert words.places(["b", "a", "b"]) == "on b (2), a"
    assert words.places([f"n{i}" for i in range(9)]) == "on n0, n1, n2, n3, 5 more"
    assert words.stages((2, 0, 1), 1) == "2 and 2 more"
    assert words.stages((2, 0), 2) == "2, 0"


def test_an_order_shows_what_changed() -> None:
    short = words.order((1, 3, 0, 2), (1, 3, 2, 0), 2)
    assert short == "key stages in order: 1, 3, 0, 2 (before: 1, 3, 2, 0)"
    assert words.order((1, 0), (), 1) == "key stages in order: 1, 0"
    before = tuple(range(20))
    first = words.order((1, 0, *range(2, 20)), before, 7)
    assert first.endswith("(before: 0, 1, 2, 3, 4, 5, 6 and 13 more)")
    behind = words.order((*range(10), 12, 11, 10, *range(13, 20)), before, 7)
    assert behind == (
        "key stages in order: 0, 1, 2, 3, 4, 5, 6 and 13 more; "
        "from place 11 on 12, 11, 10 (before: 10, 11, 12)"
    )
    assert words.order(before[:9], before, 3).endswith("and 6 more (before: 0, 1, 2 and 17 more)")


def test_numbers_are_carried_with_four_digits() -> None:
    assert words.short(0.123456) == 0.1235
    assert words.short(123456.0) == 123500.0
    assert words.percent(0.853) == "85 %"


@pytest.mark.parametrize(
    ("reason", "end_s", "text"),
    [
        ("override: 3", 1_764_433_211.9, "override: 3, until 16:20:11 UTC"),
        (
            "override: 3; at most 2 by label",
            1_764_433_211.0,
            "override: 3, until 16:20:11 UTC; at most 2 by label",
        ),
        ("override: 3", None, "override: 3"),
        ("override: 3", math.nan, "override: 3"),
        ("override: 3", math.inf, "override: 3"),
        ("override: 3", 4102444800.0, "override: 3"),
        ("waits within 0.1 s", 1_764_433_211.0, "waits within 0.1 s"),
    ],
)
def test_a_persons_number_is_told_with_its_end(reason: str, end_s: float | None, text: str) -> None:
    assert words.until(reason, end_s) == text
