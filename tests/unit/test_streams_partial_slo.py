"""NeuStream's Algorithm 1: batch limit, budget, demotion; and shares of an SLO along a path."""

from __future__ import annotations

import math

import pytest

from keystage.batching.api import Candidate, Request
from keystage.batching.partial_slo import BudgetRequest, PartialSlo, budget_s, partial_slos_s
from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue

PROFILE = LatencyProfile(alpha_s=1.0, beta_s=5.0)


def _queue(*requests: Request) -> RequestQueue:
    queue = RequestQueue()
    for request in requests:
        queue.push(request)
    return queue


def _came(count: int, deadline_s: float, at_s: float = 0.0) -> list[Request]:
    return [Request(number, 0, at_s, deadline_s) for number in range(count)]


def test_the_batch_is_the_largest_within_the_share_though_more_would_be_in_time() -> None:
    queue = _queue(*_came(9, 40.0))
    assert PartialSlo(10.0).candidate(queue, PROFILE, 0.0, 0.0) == Candidate(5, 0.0, 30.0)
    assert len(queue) == 9


def test_it_never_waits_for_more() -> None:
    assert PartialSlo(10.0).candidate(_queue(*_came(2, 40.0)), PROFILE, 3.0, 3.0) == Candidate(2, 3.0, 33.0)
    assert PartialSlo(10.0).candidate(_queue(), PROFILE, 3.0, 3.0) is None


def test_time_lost_before_makes_the_batch_smaller() -> None:
    assert PartialSlo(10.0).candidate(_queue(*_came(9, 10.0)), PROFILE, 2.0, 2.0) == Candidate(3, 2.0, 2.0)


def test_a_budget_spent_upstream_is_given_up_though_it_could_still_be_in_time() -> None:
    """Share 10, deadline 20: the modules before had until 10, and it came at 11."""
    late, fine = Request(1, 0, 11.0, 20.0), Request(2, 0, 12.0, 23.0)
    queue = _queue(late, fine)
    found = PartialSlo(10.0).candidate(queue, PROFILE, 12.0, 12.0)
    assert found == Candidate(1, 12.0, 17.0)
    assert queue.take_given_up() == [late]
    assert PartialSlo(10.0).budget_s(late) == -1.0
    assert PartialSlo(10.0).budget_s(fine) == 1.0


def test_a_spent_budget_further_back_takes_part_where_there_is_room() -> None:
    first, spent = Request(1, 0, 0.0, 20.0), Request(2, 0, 11.0, 20.0)
    queue = _queue(first, spent)
    assert PartialSlo(10.0).budget_s(spent) == -1.0
    assert PartialSlo(10.0).candidate(queue, PROFILE, 12.0, 12.0) == Candidate(2, 12.0, 13.0)
    assert queue.take_given_up() == []


def test_at_the_first_module_a_request_that_waits_keeps_its_budget() -> None:
    """As printed, B_r = 0 - waited is negative here, and every request that queued would be dropped."""
    request = Request(1, 0, 0.0, 20.0)
    assert budget_s(0.0, 0.0, 4.0) == -4.0
    assert PartialSlo(20.0).candidate(_queue(request), PROFILE, 4.0, 4.0) == Candidate(1, 4.0, 14.0)


def test_one_that_cannot_be_in_time_even_alone_is_given_up() -> None:
    queue = _queue(*_came(2, 20.0))
    assert PartialSlo(20.0).candidate(queue, PROFILE, 14.5, 14.5) is None
    assert len(queue.take_given_up()) == 2


def test_demoted_requests_fill_the_places_that_are_left_and_run_when_alone() -> None:
    queue = _queue(*_came(2, 40.0))
    for request in _came(9, 1.0):
        queue.demote(request)
    found = PartialSlo(10.0).candidate(queue, PROFILE, 0.0, 0.0)
    assert found == Candidate(5, 0.0, 30.0)
    assert len(queue.pop_front(5)) == 5
    alone = PartialSlo(10.0).candidate(queue, PROFILE, 0.0, 0.0)
    assert alone is not None
    assert (alone.start_s, alone.latest_s) == (0.0, math.inf)
    assert queue.take_given_up() == []


def test_requests_may_bring_shares_of_their_own() -> None:
    own = [BudgetRequest(number, 0, 0.0, 40.0, share_s=8.0) for number in range(9)]
    assert PartialSlo().candidate(_queue(*own), PROFILE, 0.0, 0.0) == Candidate(3, 0.0, 32.0)


def test_without_any_share_the_time_left_on_arrival_is_the_share() -> None:
    assert PartialSlo().candidate(_queue(*_came(20, 15.0)), PROFILE, 0.0, 0.0) == Candidate(10, 0.0, 0.0)


def test_a_share_shorter_than_one_item_still_serves_one() -> None:
    assert PartialSlo(2.0).candidate(_queue(*_came(3, 40.0)), PROFILE, 0.0, 0.0) == Candidate(1, 0.0, 34.0)


def test_requests_without_a_deadline_never_lose_their_budget() -> None:
    request = Request(1, 0, 5.0, math.inf)
    assert PartialSlo(10.0).budget_s(request) == math.inf
    found = PartialSlo(10.0).candidate(_queue(request), PROFILE, 5.0, 5.0)
    assert found == Candidate(1, 5.0, math.inf)


def test_a_share_is_a_time() -> None:
    with pytest.raises(ValueError, match="share_s must be at least 0 and finite, it is -1"):
        PartialSlo(-1.0)


def test_an_slo_is_divided_by_service_times_along_the_path() -> None:
    """Text encoder once, denoiser 20 times, decoder once; the visits' sum is the SLO."""
    shares = partial_slos_s(5.0, [0.1, 0.2, 0.9], [1, 20, 1])
    assert shares == pytest.approx([0.1, 0.2, 0.9])
    assert shares[0] + 20 * shares[1] + shares[2] == pytest.approx(5.0)
    assert partial_slos_s(6.0, [0.0, 1.0, math.nan], [1, 1, 1]) == pytest.approx([2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("services", "visits", "words"),
    [
        ([1.0], [1, 1], "1 service times for 2 modules"),
        ([1.0], [0], "visits must be at least 0"),
        ([1.0, 1.0], [-1, 2], "visits must be at least 0"),
    ],
)
def test_a_path_must_be_one(services: list[float], visits: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        partial_slos_s(1.0, services, visits)
