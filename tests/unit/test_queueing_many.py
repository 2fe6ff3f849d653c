"""The vectorised waits give the very numbers of the scalar ones, and survive garbage."""

from __future__ import annotations

import math

import numpy as np

from keystage.controller.maths import erlang, percentiles, queueing

N = 400


def sample() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    rate = np.exp(rng.uniform(math.log(0.1), math.log(3000), N))
    service_s = np.exp(rng.uniform(math.log(0.001), math.log(1.0), N))
    ca2, cs2 = rng.uniform(0, 64, N), rng.uniform(0, 4, N)
    wait_s = rng.choice([0.0, 0.001, 0.05, 1.0, math.inf], N)
    return rate, service_s, ca2, cs2, wait_s


def test_servers_agree_with_the_scalar_search() -> None:
    rate, service_s, ca2, cs2, wait_s = sample()
    most = np.random.default_rng(4).integers(1, 5000, N)
    many = queueing.servers_for_wait_many(rate, service_s, ca2, cs2, wait_s, most)
    one = [erlang.servers_for_wait(*row) for row in zip(rate, service_s, ca2, cs2, wait_s, most, strict=True)]
    assert many.tolist() == one
    assert len(set(one)) > 50


def test_waits_and_probabilities_agree_bit_by_bit() -> None:
    rate, service_s, ca2, cs2, _ = sample()
    load = rate * service_s
    servers = np.maximum(0, np.floor(load * np.random.default_rng(5).uniform(0.8, 1.5, N)).astype(int))
    c = queueing.erlang_c_many(servers, load)
    w = queueing.ggc_wait_many(rate, service_s, servers, ca2, cs2)
    p = percentiles.wait_percentile_many(rate, service_s, servers, ca2, cs2, 0.99)
    for i in range(N):
        arguments = (float(rate[i]), float(service_s[i]), int(servers[i]), float(ca2[i]), float(cs2[i]))
        assert c[i] == erlang.erlang_c(int(servers[i]), float(load[i]))
        assert w[i] == erlang.ggc_wait_s(*arguments)
        expected = percentiles.wait_percentile_s(*arguments, 0.99)
        assert p[i] == expected or math.isclose(p[i], expected, rel_tol=1e-13)


def test_scalars_and_matrices_broadcast() -> None:
    rates = np.array([[10.0, 50.0], [90.0, 150.0]])
    servers = queueing.servers_for_wait_many(rates, 0.01, 1.0, 1.0, 0.001, 100)
    assert servers.shape == (2, 2)
    assert servers[1, 1] == erlang.servers_for_wait(150.0, 0.01, 1.0, 1.0, 0.001, 100)
    assert float(queueing.erlang_c_many(1, 0.8)) == erlang.erlang_c(1, 0.8)
    assert queueing.servers_for_wait_many([], [], [], [], [], []).shape == (0,)
    assert queueing.erlang_c_many([], []).shape == (0,)


def test_garbage_keeps_nobody_else_from_an_answer() -> None:
    nan, inf = math.nan, math.inf
    rate = np.array([10.0, nan, -1.0, inf, 10.0, 10.0, 10.0])
    ca2 = np.array([1.0, 1.0, 1.0, 1.0, -9.0, 1.0, nan])
    wait_s = np.array([0.1, 0.1, 0.1, 0.1, 0.1, nan, 0.1])
    servers = queueing.servers_for_wait_many(rate, 0.05, ca2, 0.0, wait_s, 50)
    assert servers.tolist() == [1, 0, 0, 0, 0, 0, 0]
    waits = queueing.ggc_wait_many(rate, 0.05, 1, ca2, 0.0)
    assert np.isnan(waits).tolist() == [False, True, True, True, True, False, True]
    assert np.isnan(queueing.erlang_c_many([-1, 1], [0.5, nan])).all()


def test_overload_is_infinite_and_asks_for_all() -> None:
    assert queueing.ggc_wait_many([200.0], 0.01, [2], 0.0, 0.0).tolist() == [math.inf]
    assert queueing.servers_for_wait_many([200.0, 2e6], 0.01, 1.0, 1.0, 0.1, [2, 9000]).tolist() == [2, 9000]


def test_the_layout_of_a_matrix_in_memory_does_not_matter() -> None:
    """Entries are told apart by place: columns first in memory, transposed, or every other one."""
    rate, service_s, ca2, cs2, wait_s = (values[:12].reshape(3, 4) for values in sample())
    load, servers = rate * service_s, np.ceil(rate * service_s * 1.2).astype(int)
    expected = queueing.erlang_c_many(servers, load)
    assert len(set(expected.ravel().tolist())) > 6
    for layout in (np.asfortranarray, lambda x: np.repeat(x, 2, axis=0)[::2]):
        assert np.array_equal(queueing.erlang_c_many(layout(servers), layout(load)), expected)
    assert np.array_equal(queueing.erlang_c_many(servers.T, load.T), expected.T)
    rows = (rate, service_s, ca2, cs2, wait_s, np.full((3, 4), 5000))
    most = queueing.servers_for_wait_many(*rows)
    assert np.array_equal(queueing.servers_for_wait_many(*map(np.asfortranarray, rows)), most)
    assert np.array_equal(queueing.servers_for_wait_many(*(x.T for x in rows)), most.T)
    waits = queueing.ggc_wait_many(*map(np.asfortranarray, (rate, service_s, servers, ca2, cs2)))
    assert np.array_equal(waits, queueing.ggc_wait_many(rate, service_s, servers, ca2, cs2))
