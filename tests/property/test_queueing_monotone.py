"""What must hold for every queue: more servers never wait longer, more load never needs fewer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystage.controller.maths import batching, closed, erlang, percentiles, queueing, transient

loads = st.floats(0.001, 3000.0)
services = st.floats(1e-4, 10.0)
scvs = st.floats(0.0, 100.0)
waits = st.floats(0.0, 100.0)


@given(load=loads, service_s=services, servers=st.integers(1, 4000), ca2=scvs, cs2=scvs)
def test_more_servers_never_wait_longer(
    load: float, service_s: float, servers: int, ca2: float, cs2: float
) -> None:
    rate = load / service_s
    one = erlang.ggc_wait_s(rate, service_s, servers, ca2, cs2)
    more = erlang.ggc_wait_s(rate, service_s, servers + 1, ca2, cs2)
    assert more <= one * (1 + 1e-9)


@given(load=loads, factor=st.floats(1.0, 3.0), service_s=services, ca2=scvs, cs2=scvs, wait_s=waits)
def test_more_load_never_needs_fewer_servers(
    load: float, factor: float, service_s: float, ca2: float, cs2: float, wait_s: float
) -> None:
    few = erlang.servers_for_wait(load / service_s, service_s, ca2, cs2, wait_s, 10_000)
    many = erlang.servers_for_wait(load * factor / service_s, service_s, ca2, cs2, wait_s, 10_000)
    assert few <= many


@given(load=st.floats(0.001, 3000.0), servers=st.integers(1, 4000))
def test_blocking_and_waiting_are_probabilities_in_order(load: float, servers: int) -> None:
    blocking, waiting = erlang.erlang_b(servers, load), erlang.erlang_c(servers, load)
    assert 0 <= blocking <= waiting * (1 + 1e-12) <= 1 + 1e-9


@given(load=st.floats(900.0, 1100.0), servers=st.integers(990, 1010))
def test_the_two_ways_to_blocking_agree_where_they_meet(load: float, servers: int) -> None:
    blocking = 1.0
    for k in range(1, servers + 1):
        blocking = erlang.next_b(blocking, k, load)
    assert erlang.erlang_b(servers, load) == pytest.approx(blocking, rel=1e-10)


@given(
    rows=st.lists(
        st.tuples(loads, services, scvs, scvs, waits, st.integers(1, 4000)), min_size=1, max_size=20
    )
)
def test_many_stages_at_once_give_the_numbers_of_one_at_a_time(
    rows: list[tuple[float, float, float, float, float, int]],
) -> None:
    rate, service_s, ca2, cs2, wait_s, most = zip(
        *((a / s, s, ca, cs, w, m) for a, s, ca, cs, w, m in rows), strict=True
    )
    many = queueing.servers_for_wait_many(rate, service_s, ca2, cs2, wait_s, most)
    one = [erlang.servers_for_wait(*row) for row in zip(rate, service_s, ca2, cs2, wait_s, most, strict=True)]
    assert many.tolist() == one
    w = queueing.ggc_wait_many(rate, service_s, most, ca2, cs2).tolist()
    assert w == [erlang.ggc_wait_s(*row) for row in zip(rate, service_s, most, ca2, cs2, strict=True)]


@given(
    load=st.floats(0.01, 50.0), spare=st.integers(1, 20), p=st.floats(0.0, 0.999), more=st.floats(0.0, 0.9)
)
def test_a_higher_percentile_is_never_a_shorter_wait(load: float, spare: int, p: float, more: float) -> None:
    servers = math.floor(load) + spare
    higher = p + (0.9999 - p) * more
    low_s = percentiles.wait_percentile_s(load, 1.0, servers, 3.0, 1.0, p)
    assert low_s <= percentiles.wait_percentile_s(load, 1.0, servers, 3.0, 1.0, higher)
    assert percentiles.wait_tail(load, 1.0, servers, 3.0, 1.0, low_s) <= (1 - p) * (1 + 1e-9)


@given(
    alpha_s=st.floats(0.0, 1.0),
    beta_s=st.floats(1e-6, 1.0),
    most=st.integers(1, 512),
    share_s=st.floats(0.0, 50.0),
)
def test_the_largest_batch_is_within_its_limit_and_the_next_is_not(
    alpha_s: float, beta_s: float, most: int, share_s: float
) -> None:
    batch = batching.largest_batch(alpha_s, beta_s, most, share_s)
    half_s = share_s / 2
    assert 1 <= batch <= most
    assert batch == 1 or batching.batch_s(alpha_s, beta_s, batch) <= half_s * (1 + 1e-9)
    assert batch == most or batching.batch_s(alpha_s, beta_s, batch + 1) >= half_s * (1 - 1e-9)


@given(
    services_s=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=6),
    servers=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    customers=st.integers(1, 60),
    think_s=st.floats(0.0, 3.0),
)
def test_rings_keep_their_customers_and_their_bounds(
    services_s: list[float], servers: list[int], customers: int, think_s: float
) -> None:
    c = servers[: len(services_s)]
    result = closed.ring(services_s, c, customers, think_s)
    bounds = closed.ring_bounds(services_s, c, customers, think_s)
    assert sum(result.queues) + result.throughput_rps * think_s == pytest.approx(customers, rel=1e-6)
    assert result.throughput_rps <= bounds.throughput_rps * (1 + 1e-9)
    assert result.cycle_s >= bounds.cycle_s * (1 - 1e-9)
    assert max(result.busy_ratios) <= 1 + 1e-9
    grown = closed.ring(services_s, c, customers + 1, think_s)
    assert grown.throughput_rps >= result.throughput_rps * (1 - 1e-9)


@given(
    backlog=st.floats(0.0, 1e4),
    rate=st.floats(0.0, 500.0),
    ready=st.integers(0, 20),
    starts_s=st.lists(st.floats(0.0, 20.0), max_size=10),
    start_s=st.floats(0.0, 5.0),
    within_s=st.floats(0.1, 60.0),
)
def test_the_asked_for_servers_drain_in_time(
    backlog: float, rate: float, ready: int, starts_s: list[float], start_s: float, within_s: float
) -> None:
    most = 10_000
    more = transient.servers_to_drain(backlog, rate, 10.0, ready, starts_s, start_s, within_s, most)
    if more == most:
        return
    less = 1 - 1e-6  # where drift is almost 0 a rounding error is worth seconds
    result = transient.drain(backlog * less, rate * less, 10.0, ready, [*starts_s, *[start_s] * more])
    assert result.time_s <= within_s * (1 + 1e-6)
    assert result.peak >= backlog * less
