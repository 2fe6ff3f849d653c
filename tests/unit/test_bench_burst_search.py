"""The exact tandem and the search over it, against a plain event-by-event queue."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest

from keystage.bench.burst_search import departures_s, mean_latency_s, search
from keystage.loadgen.arrivals import synthetic


def plain_departures(arrivals: list[float], service_s: float, servers: int) -> list[float]:
    free = [0.0] * servers
    ends = []
    for at_s in arrivals:
        end_s = max(at_s, heapq.heappop(free)) + service_s
        heapq.heappush(free, end_s)
        ends.append(end_s)
    return ends


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_departures_equal_a_plain_queue(servers: int, seed: int) -> None:
    arrivals = synthetic(20, 4, 25, seed)
    expected = plain_departures(arrivals.tolist(), 0.05 * servers, servers)
    np.testing.assert_allclose(departures_s(arrivals, 0.05 * servers, servers), expected, rtol=0, atol=1e-9)


def test_more_servers_than_customers() -> None:
    np.testing.assert_allclose(departures_s(np.array([1.0, 2.0]), 0.5, 5), [1.5, 2.5])


def test_the_order_of_single_servers_does_not_matter() -> None:
    arrivals = synthetic(20, 4, 50, 3)
    means = [
        mean_latency_s(arrivals, services, (1, 1, 1, 1))
        for services in set(itertools.permutations((0.02, 0.02, 0.03, 0.04)))
    ]
    assert max(means) - min(means) < 1e-9


def test_search_visits_every_allocation_and_puts_the_best_first() -> None:
    arrivals = synthetic(20, 4, 25, 0)
    services = (0.02, 0.04, 0.02)
    found = search(arrivals, services, 6)
    every = [a for a in itertools.product(range(1, 7), repeat=3) if sum(a) <= 6]
    assert sorted(a.replicas for a in found) == sorted(every)
    assert found[0].mean_s == pytest.approx(min(mean_latency_s(arrivals, services, a) for a in every))
    assert [a.mean_s for a in found] == pytest.approx(sorted(a.mean_s for a in found))


def test_of_equal_allocations_the_larger_comes_first() -> None:
    found = search(np.array([0.0, 10.0, 20.0]), (1.0, 1.0), 4)
    assert found[0].total == 4
    assert found[-1].total == 2


def test_search_refuses_too_few() -> None:
    with pytest.raises(ValueError, match="1 replicas cannot serve 2 stages"):
        search(np.array([0.0]), (1.0, 1.0), 1)
