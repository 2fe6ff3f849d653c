"""The worked example of Symphony, section 3.3: three replicas, l(b) = b + 5, SLO 12, arrivals every 0.75."""

import heapq

import pytest

from keystage.batching.api import Candidate, Dispatch, Drop, Request
from keystage.batching.policies import BatchPolicy, Deferred, Eager, PlainDeferred, Timeout
from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue
from keystage.batching.scheduler import CentralScheduler

PROFILE = LatencyProfile(alpha_s=1.0, beta_s=5.0)
SLO_S = 12.0
GAP_S = 0.75


class EagerFrom:
    """Deferred until a time, eager from then on, as Figure 5a has it."""

    def __init__(self, from_s: float) -> None:
        self._from_s = from_s

    def candidate(
        self, queue: RequestQueue, profile: LatencyProfile, now_s: float, earliest_s: float
    ) -> Candidate | None:
        policy = PlainDeferred() if now_s < self._from_s else Eager()
        return policy.candidate(queue, profile, now_s, earliest_s)


def trace(
    policy: BatchPolicy, count: int, missing: tuple[int, ...] = (), ends_first: bool = True
) -> tuple[list[tuple[float, int, list[int]]], list[int]]:
    """Batches as (start, replica, requests), and the requests that were dropped."""
    scheduler = CentralScheduler([(PROFILE, policy)])
    for replica in range(3):
        scheduler.add_replica(replica, [0], 0.0)
    events = [(GAP_S * (i - 1), 1, i) for i in range(1, count + 1) if i not in missing]
    batches, dropped = [], []
    while events or scheduler.next_timer_s() < 1e9:
        timer_s = scheduler.next_timer_s()
        if events and events[0][0] <= timer_s:
            now_s, is_arrival, what = heapq.heappop(events)
            if is_arrival == 1:
                scheduler.arrive(Request(what, 0, now_s, now_s + SLO_S), now_s)
            else:
                scheduler.finished(what, now_s)
        else:
            now_s = timer_s
            scheduler.on_timer(now_s)
        for order in scheduler.take():
            assert isinstance(order, Dispatch | Drop)
            numbers = [request.number for request in order.requests]
            if isinstance(order, Dispatch):
                batches.append((now_s, order.replica, numbers))
                assert order.start_s == now_s
                end_s = now_s + PROFILE.latency_s(len(numbers))
                heapq.heappush(events, (end_s, 0 if ends_first else 2, order.replica))
            else:
                dropped += numbers
    return batches, dropped


@pytest.mark.parametrize("policy", [PlainDeferred(), Deferred()])
@pytest.mark.parametrize("ends_first", [True, False])
def test_deferred_batches_of_four_staggered(policy: BatchPolicy, ends_first: bool) -> None:
    batches, dropped = trace(policy, 60, ends_first=ends_first)
    assert not dropped
    assert [start_s for start_s, _, _ in batches] == [2.25 + 3 * k for k in range(15)]
    assert [replica for _, replica, _ in batches] == [k % 3 for k in range(15)]
    assert [numbers for _, _, numbers in batches] == [[4 * k + i for i in (1, 2, 3, 4)] for k in range(15)]


@pytest.mark.parametrize("ends_first", [True, False])
def test_deferred_regains_the_pattern_after_three_missing(ends_first: bool) -> None:
    batches, dropped = trace(PlainDeferred(), 63, (13, 14, 15), ends_first)
    assert not dropped
    assert [start_s for start_s, _, _ in batches[:3]] == [2.25, 5.25, 8.25]
    assert [start_s for start_s, _, _ in batches[3:]] == [13.5 + 3 * k for k in range(12)]
    assert {len(numbers) for _, _, numbers in batches} == {4}


def test_staggered_starts_lose_nothing_after_three_missing() -> None:
    batches, dropped = trace(Deferred(), 120, (13, 14, 15))
    assert not dropped
    assert min(len(numbers) for _, _, numbers in batches[:-1]) >= 3


def test_eager_deteriorates_after_three_missing() -> None:
    batches, dropped = trace(EagerFrom(11.25), 63, (13, 14, 15), ends_first=False)
    by_start = {start_s: (replica, numbers) for start_s, replica, numbers in batches}
    assert by_start[11.25] == (0, [16])
    assert len(by_start[14.25][1]) == len(by_start[17.25][1]) == 4
    assert len(by_start[18.0][1]) == 1
    assert by_start[23.25] == (1, [26, 27])
    # Figure 5a: "drop R35, R37, R38, and so on".
    assert dropped[:3] == [35, 37, 38]


def test_timeout_of_zero_is_eager() -> None:
    assert trace(Timeout(0.0), 40) == trace(Eager(), 40)


def test_timeout_waits_for_its_first_request() -> None:
    batches, _ = trace(Timeout(2.25), 40)
    assert batches[0] == (2.25, 0, [1, 2, 3, 4])
