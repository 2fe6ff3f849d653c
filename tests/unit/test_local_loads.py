"""Load reports as the supervisor keeps them, and as the policy sees them."""

from __future__ import annotations

import pytest

from keystage.controller.domain.snapshot import FunctionView, GatewayLoad, Target
from keystage.controller.platforms.local_cap import Machine
from keystage.controller.platforms.local_view import Seen, snapshot_of
from keystage.local.api import Deployment, FunctionRecord, Load
from keystage.local.errors import BadDeployment
from keystage.local.loads import ANSWER_S, KEPT_S, MAX_GATEWAYS, Loads

P = "com.openfaas.scale."


def test_the_newest_word_of_each_gateway_counts() -> None:
    loads = Loads()
    loads.hear("f", Load("a", 3, 10), 1.0)
    loads.hear("f", Load("b", 1, 1), 2.0)
    loads.hear("f", Load("a", 0, 12), 3.0)
    assert loads.of("f", 4.0) == (Load("b", 1, 1, 2.0), Load("a", 0, 12, 3.0))
    assert loads.of("g", 4.0) == ()
    loads.keep_only("fg".__contains__)
    assert len(loads.of("f", 4.0)) == 2
    loads.keep_only("g".__contains__)
    assert loads.of("f", 4.0) == ()


def test_a_silent_gateway_is_forgotten_and_so_are_too_many() -> None:
    loads = Loads()
    loads.hear("f", Load("a", 3, 10), 0.0)
    assert len(loads.of("f", KEPT_S)) == 1
    assert loads.of("f", KEPT_S + 0.1) == ()
    for n in range(MAX_GATEWAYS + 5):
        loads.hear("f", Load(f"g{n}", 1, 1), 1.0)
    assert len(loads.of("f", 1.0)) == MAX_GATEWAYS
    assert loads.of("f", 1.0)[0].gateway == "g5"


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (Load("", 0, 0), r"gateway must have 1\.\.128 characters, not 0"),
        (Load("g" * 129, 0, 0), "not 129"),
        (Load("g", -1, 0), "in_flight must be at least 0, not -1"),
        (Load("g", 0, -2), "started must be at least 0, not -2"),
        (Load("g", 0, 0, replicas={"f-0": -3}), r"replicas\[f-0\] must be at least 0, not -3"),
        (Load("g", 0, 0, replicas={str(n): 0 for n in range(10_001)}), "at most 10000, not 10001"),
    ],
)
def test_reports_out_of_bounds_are_refused(load: Load, said: str) -> None:
    with pytest.raises(BadDeployment, match=said):
        Loads().hear("f", load, 0.0)


def hand(at_s: float, gateway: str = "a", **counts: int) -> Loads:
    loads = Loads()
    loads.hear("f", Load(gateway, sum(counts.values()), 9, replicas=counts), at_s)
    return loads


def test_a_replica_that_left_may_have_work_until_every_gateway_has_said_since_that_it_has_none() -> None:
    def may(loads: Loads, at_s: float) -> bool:
        return loads.may_have_work("f", "r", left_s=10.0, at_s=at_s)

    assert not may(Loads(), 10.5)  # nobody was ever heard of
    assert may(hand(9.0, r=1), 60.0)
    assert may(hand(9.0, r=0), 10.5)
    assert may(hand(9.0), 10.5)  # it may have become ready, and got a request, since
    assert not may(hand(9.0), 10.0 + ANSWER_S)  # that gateway is gone
    assert may(hand(10.1, r=0), 10.5)  # said before it saw the replica leave
    assert may(hand(10.1, r=2), 69.0)
    assert not may(hand(10.1, r=2), 10.2 + KEPT_S)
    assert not may(hand(10.1, other=2), 10.5)
    two = hand(10.1)
    two.hear("f", Load("b", 1, 1, replicas={"r": 1}), 10.2)
    assert may(two, 10.5)
    two.hear("f", Load("b", 0, 1), 10.6)
    assert not may(two, 10.7)


def test_at_work_is_what_some_gateway_has_there() -> None:
    assert hand(1.0, r=1).is_at_work("f", "r", 2.0)
    assert not hand(1.0, r=0, other=1).is_at_work("f", "r", 2.0)
    assert not hand(1.0, r=1).is_at_work("f", "r", 2.0 + KEPT_S)


def view(role: str = "function", *, tells_load: bool = True, **labels: str) -> FunctionView:
    deployment = Deployment(
        service="f",
        envProcess="x",
        envVars={"KEYSTAGE_ROLE": role},
        labels={P + name.replace("_", "-"): value for name, value in labels.items()},
    )
    record = FunctionRecord(deployment=deployment, created_at_s=0.0, loads=(Load("g", 2, 5, 1.0),))
    seen = Seen(
        at_s=1.0,
        functions=[record],
        replicas=[],
        stats={},
        unread={},
        bundles={},
        machine=Machine(2, 1 << 30),
        tells_load=tells_load,
    )
    (found,) = snapshot_of(seen).functions
    return found


def test_labels_and_loads_reach_the_policy() -> None:
    assert view().loads == (GatewayLoad("g", 2, 5),)
    assert (view().zero_after_s, view().target) == (None, None)
    assert view(zero="true").zero_after_s == 900
    assert view(zero="true", zero_duration="90s").zero_after_s == 90
    assert view(zero_duration="90s").zero_after_s is None
    assert view(target="10").target == Target("rps", 9.0)
    assert view(type="capacity", target="4", target_proportion="0.5").target == Target("capacity", 2.0)


def test_factor_is_percent_of_the_maximum_and_zero_switches_scaling_by_load_off() -> None:
    assert view(target="10", factor="0").target is None
    assert view(target="10", factor="20", max="6").target == Target("rps", 9.0, 2)
    assert view(target="10", factor="1").target == Target("rps", 9.0, 1)


def test_nobody_tells_the_load_of_a_router_or_behind_a_stock_gateway() -> None:
    assert view("router").loads is None
    assert view(tells_load=False).loads is None


def test_labels_that_cannot_be_honoured_leave_the_bounds_that_can_be_read() -> None:
    found = view(min="2", max="5", type="cpu", zero="true")
    assert (found.min_replicas, found.max_replicas, found.zero_after_s, found.target) == (2, 5, None, None)
    assert view(min="many").min_replicas == 1
