"""Workers that never fit are asked who they are now and then, not for every message of theirs."""

from __future__ import annotations

import logging

import pytest

from keystage.router.turned_away import MOST, PAUSE_S, TurnedAway


def test_a_refused_worker_is_not_asked_again_for_a_while() -> None:
    away = TurnedAway()
    assert not away.is_silenced("a", 10.0)
    away.add("a", "other parameters", 10.0)
    assert away.is_silenced("a", 10.0 + PAUSE_S - 0.01)
    assert not away.is_silenced("a", 10.0 + PAUSE_S)
    assert not away.is_silenced("b", 10.0)


def test_the_log_says_what_is_news(caplog: pytest.LogCaptureFixture) -> None:
    away = TurnedAway()
    with caplog.at_level(logging.ERROR):
        for second in range(3):
            away.add("a", "other parameters", float(second))
        away.add("a", "speaks wire version 1", 3.0)
    assert [record.getMessage() for record in caplog.records] == [
        "refused a worker: other parameters",
        "refused a worker: speaks wire version 1",
    ]


def test_what_is_remembered_is_bounded() -> None:
    away = TurnedAway()
    for number in range(MOST + 2):
        away.add(f"w{number}", "no", 0.0)
    assert not away.is_silenced("w0", 0.0)
    assert away.is_silenced(f"w{MOST + 1}", 0.0)
