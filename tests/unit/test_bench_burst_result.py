"""What `keystage bench burst` makes of outcomes: figures, rows, and the check of the key stage."""

from __future__ import annotations

import dataclasses

import pytest

from keystage.bench.burst import KeyStageMissed, NoAnswers, Trial, result, second, services_s
from keystage.bench.burst_lane import Outcome, Run
from keystage.bench.burst_search import Allocation


def outcome(position: int, seed: int, mean_s: float, *, key_ratio: float = 1.0) -> Outcome:
    run = Run(position, seed, services_s(position), 20.0, 4.0, 5.0)
    return Outcome(run, [mean_s] * 100, 0, 0.001, (1.0, 2.5, 1.0, 1.0), key_ratio, 3, 2, (0.5, 0.6), 1.0)


def trial(position: int, seed: int, ours_s: float, theirs_s: float, *, key_ratio: float = 1.0) -> Trial:
    best = Allocation((1, 2, 1, 1), theirs_s)
    ours = outcome(position, seed, ours_s, key_ratio=key_ratio)
    return Trial(ours, outcome(position, seed, theirs_s), best, None)


def test_figures_pair_position_and_seed() -> None:
    trials = [trial(0, 0, 0.2, 0.4), trial(1, 0, 0.3, 0.4), trial(0, 1, 0.5, 0.5)]
    found = result(trials, [outcome(0, 0, 2.0), outcome(1, 1, 1.0)])
    assert found.figures["latency_vs_static"].samples == pytest.approx([0.5, 0.75, 1.0])
    assert found.figures["latency_vs_one_each"].samples == pytest.approx([0.1, 0.15, 0.5])
    assert found.figures["model_vs_live"].median == pytest.approx(1.0)


def test_rows_have_one_shape_and_replica_seconds() -> None:
    rows = result([trial(0, 0, 0.2, 0.4), trial(2, 0, 0.3, 0.4)], [outcome(0, 0, 2.0)]).rows
    assert [(row["slow_stage"], row["policy"]) for row in rows] == [
        ("0", "controller"),
        ("0", "best static"),
        ("2", "controller"),
        ("2", "best static"),
        ("any", "one each"),
    ]
    assert len({tuple(row) for row in rows}) == 1
    assert rows[0]["replica_s"] == pytest.approx(5.5 * 5.0)
    assert rows[1]["allocation"] == "1-2-1-1"


def test_a_missed_key_stage_is_named() -> None:
    trials = [trial(0, 0, 0.2, 0.4), trial(3, 1, 0.3, 0.4, key_ratio=0.25)]
    with pytest.raises(KeyStageMissed, match=r"position 3, seed 1: .* 25% of the time"):
        result(trials, [outcome(0, 0, 2.0), outcome(1, 1, 2.0)])


def test_a_run_without_answers_is_no_result() -> None:
    lost = trial(0, 0, 0.2, 0.4)
    lost = dataclasses.replace(lost, controller=dataclasses.replace(lost.controller, latencies_s=[]))
    with pytest.raises(NoAnswers, match="position 0, seed 0: none of 100 requests"):
        result([lost], [outcome(0, 0, 2.0)])


def test_second_differs_in_mean_and_is_near() -> None:
    found = [
        Allocation((2, 2), 1.0),
        Allocation((2, 1), 1.0),
        Allocation((1, 2), 1.04),
        Allocation((1, 1), 2),
    ]
    assert second(found) == found[2]
    assert second(found[:2]) is None
    assert second([found[0], found[3]]) is None
