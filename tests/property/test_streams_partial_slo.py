"""NeuStream's batching rule under the central scheduler: bounds of every batch, and nobody is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.batching.api import Dispatch, Drop, Request
from keystage.batching.partial_slo import PartialSlo, partial_slos_s
from keystage.batching.profile import LatencyProfile
from keystage.batching.scheduler import CentralScheduler

MS = 1e-3
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 20_000).map(MS.__mul__), st.integers(-3000, 6000).map(MS.__mul__)),
    min_size=1,
    max_size=40,
)
"""When each request comes, and its budget then."""


@dataclass
class _World:
    """One module on some replicas: carries out orders, and keeps what became of whom."""

    profile: LatencyProfile
    share_s: float
    replicas: int
    is_demoting: bool
    busy: dict[int, float] = field(default_factory=dict)
    batches: list[tuple[float, list[Request]]] = field(default_factory=list)
    dropped: list[tuple[float, Request]] = field(default_factory=list)

    def run(self, requests: list[Request]) -> None:
        scheduler = CentralScheduler([(self.profile, PartialSlo(self.share_s))])
        for replica in range(self.replicas):
            scheduler.add_replica(replica, [0], 0.0)
        coming = sorted(requests, key=lambda request: request.arrived_s)
        for _ in range(1000):
            times = [scheduler.next_timer_s(), *self.busy.values(), *(r.arrived_s for r in coming[:1])]
            now_s = min(times)
            if now_s == math.inf:
                return
            for replica in [replica for replica, end_s in self.busy.items() if end_s <= now_s]:
                del self.busy[replica]
                scheduler.finished(replica, now_s)
            while coming and coming[0].arrived_s <= now_s:
                scheduler.arrive(coming.pop(0), now_s)
            scheduler.on_timer(now_s)
            while orders := scheduler.take():
                for order in orders:
                    self._follow(order, scheduler, now_s)
        raise AssertionError("it never ends")

    def _follow(self, order: object, scheduler: CentralScheduler, now_s: float) -> None:
        match order:
            case Dispatch():
                assert order.replica not in self.busy
                self.busy[order.replica] = now_s + self.profile.latency_s(len(order.requests))
                self.batches.append((now_s, order.requests))
            case Drop():
                self.dropped += [(now_s, request) for request in order.requests]
                if self.is_demoting:
                    for request in order.requests:
                        scheduler.demote(request, now_s)


@settings(max_examples=80, deadline=None)
@given(st.floats(0.01, 1), st.floats(0.01, 2), st.floats(0.5, 6), st.integers(1, 3), ARRIVALS, st.booleans())
def test_batches_keep_to_the_share_and_spent_budgets_are_given_up(
    alpha_s: float,
    beta_s: float,
    share_s: float,
    replicas: int,
    arrivals: list[tuple[float, float]],
    is_demoting: bool,
) -> None:
    profile = LatencyProfile(alpha_s, beta_s)
    requests = [
        Request(number, 0, at_s, at_s + budget_s + share_s)
        for number, (at_s, budget_s) in enumerate(arrivals)
    ]
    world = _World(profile, share_s, replicas, is_demoting)
    world.run(requests)
    dropped = {request.number for _, request in world.dropped}
    limit = max(1, profile.largest_batch(share_s))
    for now_s, batch in world.batches:
        in_time = [request for request in batch if request.number not in dropped]
        if in_time:
            assert len(batch) <= limit
            assert in_time == batch[: len(in_time)], "the demoted come last"
            earliest_s = min(request.deadline_s for request in in_time)
            assert now_s + profile.latency_s(len(batch)) <= earliest_s + 1e-6
            assert arrivals[in_time[0].number][1] >= -1e-6, "the first one's budget was spent when it came"
    for now_s, request in world.dropped:
        is_spent = arrivals[request.number][1] < 1e-6
        assert is_spent or now_s + profile.latency_s(1) > request.deadline_s - 1e-6
    served = sorted(request.number for _, batch in world.batches for request in batch)
    assert len(served) == len(set(served))
    assert set(served) | dropped == set(range(len(requests)))
    if is_demoting:
        assert served == list(range(len(requests)))


@given(
    st.floats(0.001, 100),
    st.lists(
        st.tuples(st.just(0.0) | st.floats(1e-9, 10), st.integers(0, 50)), min_size=1, max_size=8
    ).filter(lambda path: any(visits for _, visits in path)),
)
def test_shares_along_a_path_sum_to_the_slo(slo_s: float, path: list[tuple[float, int]]) -> None:
    services, visits = [service for service, _ in path], [count for _, count in path]
    shares = partial_slos_s(slo_s, services, visits)
    total = sum(share * count for share, count in zip(shares, visits, strict=True))
    assert math.isclose(total, slo_s, rel_tol=1e-9)
    assert all(share > 0 for share in shares)
