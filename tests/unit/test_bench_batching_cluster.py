"""The emulated cluster: conservation, known answers, what it refuses; the search for a goodput."""

from __future__ import annotations

import math

import numpy as np
import pytest

from keystage.batching.api import Dispatch, Order, Request
from keystage.batching.policies import Eager, PlainDeferred
from keystage.batching.profile import LatencyProfile
from keystage.batching.rivals.clockwork import ClockworkScheduler
from keystage.batching.scheduler import CentralScheduler
from keystage.bench.batching_arrivals import Arrivals, arrivals, gamma
from keystage.bench.batching_cluster import ClusterError, Model, RunLength, goodput, serve
from keystage.bench.batching_models import TABLE_2, capacity_rps


def at(*times_s: float) -> Arrivals:
    return Arrivals(np.array(times_s), np.zeros(len(times_s), dtype=np.int32))


def eager(*models: Model) -> CentralScheduler:
    return CentralScheduler([(model.profile, Eager()) for model in models])


def test_a_run_worked_by_hand() -> None:
    model = Model("m", LatencyProfile(1.0, 1.0), 6.0)
    served = serve(lambda: eager(model), [model], at(1, 2, 2.5, 10), 1, seconds=20, warm_s=0)
    # 1..3 alone; 2 and 2.5 wait for it and run 3..6; 10..12 alone.
    assert served.good.tolist() == [4]
    assert served.batches[0] == {1: 2, 2: 1}
    assert served.queueing_s[0] == pytest.approx([0, 1, 0.5, 0])
    assert served.busy_s.tolist() == pytest.approx([7])
    assert served.idle_ratio == pytest.approx(13 / 20)
    assert served.goodput_rps == pytest.approx(4 / 20)


def test_what_came_in_the_warm_up_is_served_and_not_counted() -> None:
    model = Model("m", LatencyProfile(1.0, 1.0), 6.0)
    served = serve(lambda: eager(model), [model], at(1, 2, 2.5, 10), 1, seconds=20, warm_s=2.2)
    assert served.offered.tolist() == [2]
    assert served.queueing_s[0] == pytest.approx([0.5, 0])
    assert served.busy_s.tolist() == pytest.approx([0.8 + 3 + 2])
    assert served.batches[0] == {1: 1, 2: 1}


@pytest.mark.parametrize("overload", [0.1, 1.5])
def test_every_request_is_good_late_or_dropped(overload: float) -> None:
    models = [row.model for row in TABLE_2]
    rate = overload * capacity_rps(models, [0.5, 0.5], 4)
    drawn = arrivals([rate / 2, rate / 2], 4.0, 1, gamma(0.3))
    served = serve(lambda: eager(*models), models, drawn, 4, seconds=4.0, warm_s=0.5)
    offered = np.bincount(drawn.model[drawn.times_s >= 0.5], minlength=2)
    assert served.offered.tolist() == offered.tolist()
    assert (served.good + served.late + served.dropped).tolist() == offered.tolist()
    assert (served.dropped.sum() > 0) == (overload > 1)
    assert [len(waits) for waits in served.queueing_s] == (served.good + served.late).tolist()


def test_service_one_by_one_waits_like_an_m_d_1_queue() -> None:
    model = Model("m", LatencyProfile(1.0, 0.0, most=1), 1e6)
    for load in (0.3, 0.6):
        waits = [
            serve(
                lambda: eager(model), [model], arrivals([load], 1e4, seed), 1, seconds=1e4, warm_s=100
            ).queueing_s[0].mean()
            for seed in range(4)
        ]  # fmt: skip
        assert np.mean(waits) == pytest.approx(load / (2 * (1 - load)), rel=0.08)


def test_evenly_spaced_arrivals_form_the_staggered_pattern_of_the_paper() -> None:
    # Symphony, section 3.3: l(b) = b + 5, SLO 12, three replicas, a request every 0.75: batches of 4.
    model = Model("m", LatencyProfile(1.0, 5.0), 12.0)
    drawn = Arrivals(0.75 * np.arange(4000), np.zeros(4000, dtype=np.int32))
    served = serve(
        lambda: CentralScheduler([(model.profile, PlainDeferred())]),
        [model],
        drawn,
        3,
        seconds=3000,
        warm_s=0,
    )
    assert served.bad_ratio == 0
    assert served.batches[0] == {4: 1000}
    assert served.queueing_s[0].max() == pytest.approx(2.25)
    # Never idle once begun, at 2.25, 5.25 and 8.25.
    assert served.idle_ratio == pytest.approx((2.25 + 5.25 + 8.25) / (3 * 3000))


def test_the_network_delays_the_start_and_the_scheduler_does_not_know() -> None:
    model = Model("m", LatencyProfile(1.0, 1.0), 2.5)
    arguments = ([model], at(0, 10), 1)
    punctual = serve(lambda: eager(model), *arguments, seconds=20, warm_s=0, network=lambda batch: 0.4)
    assert punctual.good.tolist() == [2]
    assert punctual.queueing_s[0] == pytest.approx([0.4, 0.4])
    slow = serve(lambda: eager(model), *arguments, seconds=20, warm_s=0, network=lambda batch: 0.6)
    assert slow.late.tolist() == [2]


def test_demoted_requests_run_late_instead_of_being_dropped() -> None:
    model = Model("m", LatencyProfile(1.0, 1.0), 2.5)
    refused, demoted = (
        serve(lambda: eager(model), [model], at(0, 0.1, 5), 1, seconds=20, warm_s=0, demote=demote)
        for demote in (False, True)
    )
    assert (refused.good[0], refused.late[0], refused.dropped[0]) == (2, 0, 1)
    assert (demoted.good[0], demoted.late[0], demoted.dropped[0]) == (2, 1, 0)


def test_replicas_run_only_what_they_host() -> None:
    models = [Model(name, LatencyProfile(1.0, 1.0), 6.0) for name in "ab"]
    drawn = Arrivals(np.array([0.0, 0.0, 0.0]), np.array([0, 0, 1], dtype=np.int32))
    served = serve(lambda: eager(*models), models, drawn, 2, seconds=10, warm_s=0, hosts=[{0}, {1}])
    assert served.busy_s.tolist() == pytest.approx([4, 2])  # one alone, then the other; never on b's replica


class Wrong(ClockworkScheduler):
    """Spoils the first order."""

    def __init__(self, spoil: str) -> None:
        super().__init__([LatencyProfile(1.0, 1.0)])
        self.spoil = spoil

    def take(self) -> list[Order]:
        orders = super().take()
        if orders and self.spoil:
            order = orders[0]
            assert isinstance(order, Dispatch)
            if self.spoil == "lost":
                order.requests.pop()
                orders = []
            elif self.spoil == "twice":
                order.requests.append(order.requests[0])
            else:
                order.requests[0] = Request(0, 1, 0.0, 9.0)
            self.spoil = ""
        return orders


@pytest.mark.parametrize(
    ("spoil", "said"),
    [("lost", "neither served nor dropped"), ("twice", "settled before"), ("foreign", "among requests of")],
)
def test_a_scheduler_that_breaks_its_word_is_found_out(spoil: str, said: str) -> None:
    model = Model("m", LatencyProfile(1.0, 1.0), 6.0)
    with pytest.raises(ClusterError, match=said):
        serve(lambda: Wrong(spoil), [model], at(0, 3, 6), 1, seconds=10, warm_s=0)


def test_a_window_that_is_none_is_refused() -> None:
    model = Model("m", LatencyProfile(1.0, 1.0), 6.0)
    with pytest.raises(ValueError, match="warm-up 10 of 10 s"):
        serve(lambda: eager(model), [model], at(0), 1, seconds=10, warm_s=10)


def lost_ratio(load: float) -> float:
    """Of an M/D/1 queue with service 1 whose customers leave when they would wait for more than 2.

    P(W <= t) = (1 - load) sum_k (-load (t - k))^k / k! exp(load (t - k)) without leaving (Erlang 1909), and
    (1 - load) P(W > t) / (1 - load P(W > t)) leave (de Kok and Tijms 1985).
    """
    terms = ((-load * (2 - k)) ** k / math.factorial(k) * math.exp(load * (2 - k)) for k in range(3))
    waits = 1 - (1 - load) * sum(terms)
    return (1 - load) * waits / (1 - load * waits)


@pytest.mark.slow
def test_the_search_finds_the_rate_at_which_a_single_server_loses_one_percent() -> None:
    model = Model("m", LatencyProfile(1.0, 0.0, most=1), 3.0)
    found = [
        goodput(
            lambda rate: ClockworkScheduler([model.profile]),
            [model],
            lambda rate, seconds, seed: arrivals([rate], seconds, seed),
            1,
            most_rps=1.0,
            guess_rps=0.3,
            length=RunLength(requests=8_000),
            tolerance_ratio=0.01,
            seed=seed,
        )
        for seed in range(3)
    ]
    exact = next(load for load in np.arange(0.2, 0.6, 0.001) if lost_ratio(load) > 0.01)
    # Of 8,000 requests 80 may be lost, three runs know that to 7 %: and the loss grows as the rate squared.
    assert np.mean([one.rate_rps for one in found]) == pytest.approx(exact, rel=0.06)
    for one in found:
        assert one.served is not None
        assert one.served.worst_bad_ratio <= 0.01
        assert one.nominal_rps < one.failed_rps <= one.nominal_rps * 1.011


def test_what_cannot_hold_at_all_has_no_goodput() -> None:
    model = Model("m", LatencyProfile(1.0, 1.0), 1.5)
    found = goodput(
        lambda rate: eager(model),
        [model],
        lambda rate, seconds, seed: arrivals([rate], seconds, seed),
        1,
        most_rps=1.0,
        length=RunLength(requests=200),
    )
    assert (found.rate_rps, found.served) == (0, None)


def test_pooled_judgement_lets_one_model_stand_for_another() -> None:
    # One request of the rare model is bad: 1 of 4 of its own, but 1 of 204 of all.
    models = [Model(name, LatencyProfile(0.0, 1.0), 1.5) for name in "ab"]
    times_s = np.array([*(float(k) * 2 for k in range(200)), 0.25, 101.0, 201.0, 301.0])
    order = np.argsort(times_s, kind="stable")
    drawn = Arrivals(times_s[order], np.array([0] * 200 + [1] * 4, dtype=np.int32)[order])
    apart, pooled = (
        serve(
            lambda: eager(*models), models, drawn, 1, seconds=401, warm_s=0, give_up_ratio=0.01, pooled=pooled
        )
        for pooled in (False, True)
    )
    assert apart.stopped
    assert not pooled.stopped
    assert pooled.worst_bad_ratio == pytest.approx(0.25)
