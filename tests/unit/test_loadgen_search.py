"""The rule of the saturation search, on imagined targets: it finds the limit, and says what the limit is."""

import pytest

from keystage.loadgen.search import Outcome, Search, Step, Verdict, Window, conclusion, verdict_of


def window(verdict: Verdict) -> Window:
    return Window(0, verdict, 100, 0, 0.5, 0.1, 0.001)


def searched(
    limit_rps: float, start: float = 1.0, most: float = 1e4, late_rps: float = 1e9
) -> tuple[Search, list[float]]:
    search = Search(start, 0.25, most, 0.05)
    tried = []
    while (rate := search.next_rps) is not None:
        tried.append(rate)
        assert len(tried) < 60
        if rate > late_rps:
            search.tell("invalid")
        else:
            search.tell("met" if rate <= limit_rps else "missed")
    return search, tried


@pytest.mark.parametrize("limit", [0.3, 0.9, 1.0, 7.77, 100.0, 3333.0])
@pytest.mark.parametrize("start", [1.0, 50.0])
def test_the_limit_is_found_within_the_precision(limit: float, start: float) -> None:
    search, _ = searched(limit, start)
    assert search.best_rps is not None
    assert search.not_met_rps is not None
    assert search.best_rps <= limit < search.not_met_rps <= search.best_rps * 1.05
    assert search.bound_by == "target"


def test_it_doubles_and_then_halves_the_gap() -> None:
    _, tried = searched(11.0)
    assert tried == [1.0, 2.0, 4.0, 8.0, 16.0, 12.0, 10.0, 11.0, 11.5]


def test_a_start_that_is_too_high_goes_down() -> None:
    _, tried = searched(11.0, 64.0)
    assert tried[:4] == [64.0, 32.0, 16.0, 8.0]


def test_the_highest_rate_that_may_be_tried_is_tried() -> None:
    search, tried = searched(1e9, most=100.0)
    assert tried[-3:] == [32.0, 64.0, 100.0]
    assert (search.best_rps, search.bound_by) == (100.0, "max-rate")
    assert searched(1e9, start=500.0, most=100.0)[1] == [100.0]


def test_nothing_met() -> None:
    search, tried = searched(0.0)
    assert tried == [1.0, 0.5, 0.25]
    assert (search.best_rps, search.not_met_rps, search.bound_by) == (None, 0.25, "no rate met")


def test_a_generator_that_is_late_is_the_bound_and_named() -> None:
    search, _ = searched(1e9, late_rps=20.0)
    assert search.best_rps is not None
    assert 19 <= search.best_rps <= 20
    assert search.bound_by == "generator"
    found = Outcome(search.best_rps, search.not_met_rps, search.bound_by, 0.99, 30.0, ())
    assert "the generator was late, the target may do more" in conclusion(found)


def test_a_trace_that_is_too_short_is_the_bound() -> None:
    search = Search(8.0, 0.25, 1e4, 0.05)
    search.tell("met")
    assert search.next_rps == 16.0
    search.limit(11.0)
    assert search.next_rps == 11.0
    search.tell("met")
    assert (search.next_rps, search.best_rps, search.bound_by) == (None, 11.0, "trace")
    search = Search(8.0, 0.25, 1e4, 0.05)
    search.limit(0.2)
    assert search.next_rps is None


def test_majorities() -> None:
    def of(*verdicts: Verdict) -> Verdict | None:
        return verdict_of(tuple(window(verdict) for verdict in verdicts), 3)

    assert of() is None
    assert of("met") is None
    assert of("met", "met") == "met"
    assert of("missed", "met") is None
    assert of("missed", "met", "met") == "met"
    assert of("missed", "missed") == "missed"
    assert of("invalid", "invalid") == "invalid"
    assert of("invalid", "missed") == "missed", "a rate is invalid only if most of its failures are"
    assert verdict_of((window("met"),), 1) == "met"


def test_conclusions_name_rates_and_share() -> None:
    steps = (Step(2.0, "missed", ()), Step(0.5, "missed", ()))
    told = conclusion(Outcome(None, 0.5, "no rate met", 0.99, 30.0, steps))
    assert told == "search: no rate down to 0.5/s had 99 % of requests within the SLO in most windows of 30 s"
    assert conclusion(Outcome(8.0, 8.4, "target", 0.9, 30.0, steps)).endswith(
        "8/s is the highest rate found with 90 % of requests within the SLO; 8.4/s had not"
    )
    assert "--max-rate" in conclusion(Outcome(8.0, None, "max-rate", 0.9, 30.0, steps))
