"""What counts as goodput: answers within their request's own deadline, or all of the pipeline's objective."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from keystage.bundle.api import Pipeline, emulated
from keystage.controller.policy.settings import PolicySettings
from keystage.router.batch_settings import BatchSettings
from keystage.router.config import DEFAULT_TTFT_S, RouterConfig
from keystage.router.counters import StageMeter
from keystage.router.served import Pace, Served


def settings(slo: str, execution: str) -> BatchSettings:
    made: Pipeline = emulated("p", 2, execution=execution, activation_bytes=64, context_length=64)  # type: ignore[arg-type]
    config = RouterConfig(pipeline="p", bundle="b", router="r", run=Path("run"), slo=slo)
    return config.batch_settings_of(made)


@pytest.mark.parametrize(
    ("slo", "execution", "wanted"),
    [
        ("", "looping", (None, DEFAULT_TTFT_S, None)),
        ("", "single-pass", (None, None, None)),
        ('{"ttft_s": 1, "tpot_s": 0.1}', "looping", (None, 1, 0.1)),
        ('{"tpot_s": 0.1}', "looping", (None, None, 0.1)),
        ('{"deadline_s": 3}', "looping", (3, None, None)),
        ('{"deadline_s": 3, "ttft_s": 1}', "single-pass", (3, None, None)),
        # The controller holds for what cannot be believed, and says so; here it is no bound.
        ('{"ttft_s": -1, "tpot_s": "soon"}', "looping", (None, None, None)),
        ('{"ttft_s": true, "tpot_s": 1e999}', "looping", (None, None, None)),
    ],
)
def test_the_objective_of_a_pipeline(
    slo: str, execution: str, wanted: tuple[float | None, float | None, float | None]
) -> None:
    found = settings(slo, execution)
    assert (found.objective_s, found.ttft_s, found.tpot_s) == wanted


def test_router_and_controller_hold_a_silent_pipeline_to_the_same() -> None:
    assert PolicySettings().ttft_s == DEFAULT_TTFT_S


@pytest.mark.parametrize(
    ("taken_s", "deadline_s", "first_s", "token_s", "wanted"),
    [
        (9.0, None, 1.0, 0.1, True),
        (9.0, None, 1.1, 0.1, False),
        (9.0, None, 1.0, 0.11, False),
        (10.1, None, 1.0, 0.1, False),
        (9.0, None, 1.0, None, True),  # one token
        (math.inf, None, math.inf, None, False),  # refused
        (5.0, 5.0, 4.0, 2.0, True),  # its own deadline replaces the pipeline's objective
        (5.1, 5.0, 0.1, 0.01, False),
    ],
)
def test_an_answer_is_in_time(
    taken_s: float, deadline_s: float | None, first_s: float, token_s: float | None, wanted: bool
) -> None:
    held = BatchSettings(objective_s=10.0, ttft_s=1.0, tpot_s=0.1)
    assert held.is_met(taken_s, deadline_s, first_s, token_s) is wanted


def test_without_an_objective_nothing_is_due() -> None:
    assert BatchSettings().is_met(3.0, None) is None
    served = Served()
    for is_met in (None, True, False, True):
        served.ended(is_met)
    assert (served.due, served.in_time) == (3, 2)


def test_the_pace_of_tokens() -> None:
    pace = Pace(10.0)
    assert pace.first_s is None
    assert pace.token_s(11.0) is None
    assert pace.came(1, 10.5)
    assert pace.token_s(11.0) is None
    assert not pace.came(4, 11.0)
    assert pace.first_s == 0.5
    assert pace.token_s(12.5) == pytest.approx(0.5)


def test_batches_are_counted_with_their_items_whatever_waits_are() -> None:
    """A span of stages waits once for all of them, and an item that is sent again is in two batches."""
    meter = StageMeter(0)
    for size in (3, 1, 300):
        meter.batched(size)
    meter.waited(0.1)
    counters = meter.counters()
    assert counters.batch_items == 304
    assert sum(counters.batch_sizes) == 3
    assert counters.waits == 1
