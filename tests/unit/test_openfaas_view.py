"""What a stock gateway tells, made a snapshot: starts timed from outside, bounds with their reason."""

from __future__ import annotations

import pytest

from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.snapshot import FunctionView, Snapshot, Target
from keystage.controller.domain.state import PolicyState
from keystage.controller.platforms.openfaas_memory import SETTLE_S, Memory, Starts, see, state
from keystage.controller.platforms.openfaas_view import gateway_snapshot
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings
from keystage.openfaas.provider import Kind, limits
from keystage.openfaas.types import FunctionStatus
from keystage.router.api import RouterStats, StageCounters

T = 1_000_000.0


def told(replicas: int, available: int, name: str = "f", **labels: str) -> FunctionStatus:
    return FunctionStatus(name=name, replicas=replicas, availableReplicas=available, labels=labels)


def watched(*sights: tuple[float, int, int]) -> Starts:
    memory = Memory()
    for at_s, replicas, available in sights:
        memory, _ = see(memory, [told(replicas, available)], T + at_s)
    return memory.starts["f"]


def seen(
    *statuses: FunctionStatus, kind: Kind = "openfaas-ce", memory: Memory | None = None, at_s: float = T
) -> Snapshot:
    memory = memory if memory is not None else see(Memory(), statuses, at_s)[0]
    return gateway_snapshot(at_s, statuses, memory, limits(kind), stats={}, unread={})


def only(snapshot: Snapshot) -> FunctionView:
    (found,) = snapshot.functions
    return found


# ---------------------------------------------------------------- memory


def test_missing_replicas_are_timed_and_the_oldest_arrives_first() -> None:
    assert watched((0, 1, 1)) == Starts(1)
    assert watched((0, 1, 1), (1, 3, 1)) == Starts(1, (T + 1, T + 1))
    assert watched((0, 1, 1), (1, 2, 1), (2, 3, 1), (4, 3, 2)) == Starts(2, (T + 2,), (3.0,))
    assert watched((0, 1, 1), (1, 2, 1), (2, 3, 1), (4, 3, 3)) == Starts(3, (), (3.0, 2.0))


def test_fewer_wanted_gives_up_the_youngest_and_times_nothing() -> None:
    assert watched((0, 1, 1), (1, 2, 1), (2, 4, 1), (3, 2, 1)) == Starts(1, (T + 1,))


def test_a_replica_that_dies_is_missed_anew() -> None:
    assert watched((0, 3, 3), (5, 3, 2), (6, 3, 3)) == Starts(3, (), (1.0,))


def test_what_was_stated_counts_until_the_gateway_had_time_to_show_it() -> None:
    memory, said = see(state(Memory(), "f", 4, T), [told(2, 2)], T + 0.5)
    assert said == []
    assert only(seen(told(2, 2), memory=memory, at_s=T + 0.5)).desired == 4
    assert len(only(seen(told(2, 2), memory=memory, at_s=T + 0.5)).starting) == 2
    memory, said = see(memory, [told(2, 2)], T + SETTLE_S)
    assert len(said) == 1
    assert "function f: 4 replicas were stated, the gateway has 2" in said[0]
    assert only(seen(told(2, 2), memory=memory, at_s=T + SETTLE_S)).desired == 2
    assert see(memory, [told(2, 2)], T + 9)[1] == []


def test_a_number_that_holds_is_not_remarked_and_a_later_change_is() -> None:
    memory = state(Memory(), "f", 4, T)
    for at_s in (1.0, 3.0, 60.0):
        memory, said = see(memory, [told(4, 4)], T + at_s)
        assert said == []
    _, said = see(memory, [told(1, 1)], T + 61)  # an update set it back
    assert len(said) == 1


def test_functions_that_went_are_forgotten() -> None:
    memory, _ = see(state(Memory(), "f", 4, T), [told(4, 1)], T)
    memory, _ = see(memory, [], T + 1)
    assert memory == Memory({}, {})


# ---------------------------------------------------------------- snapshot


def test_numbers_and_expected_times_are_told() -> None:
    memory = Memory()
    for at_s, replicas, available in ((0.0, 1, 1), (1.0, 2, 1), (4.0, 3, 2)):
        memory, _ = see(memory, [told(replicas, available)], T + at_s)
    view = only(seen(told(3, 2), memory=memory, at_s=T + 4))
    assert (view.desired, view.ready) == (3, 2)
    assert [s.expected_ready_s for s in view.starting] == [T + 4 + 3.0]


@pytest.mark.parametrize(
    ("kind", "labels", "bounds"),
    [
        ("openfaas-ce", {}, (1, 20, 5)),
        ("openfaas-ce", {"com.openfaas.scale.max": "3"}, (1, 3, None)),
        ("openfaas-ce", {"com.openfaas.scale.min": "0"}, (1, 20, 5)),
        ("openfaas-pro", {"com.openfaas.scale.min": "0", "com.openfaas.scale.max": "9"}, (0, 9, None)),
        ("faasd", {}, (1, 20, 1)),
        ("unknown", {}, (1, 20, None)),
    ],
)
def test_the_gateways_bounds_are_the_functions(
    kind: Kind, labels: dict[str, str], bounds: tuple[int, int, int | None]
) -> None:
    view = only(seen(told(1, 1, **labels), kind=kind))
    assert (view.min_replicas, view.max_replicas, view.cap) == bounds
    assert ("at most" in view.cap_reason) == (view.cap is not None)


def test_only_what_can_be_at_zero_goes_there() -> None:
    labels = {"com.openfaas.scale.zero": "true"}
    assert only(seen(told(1, 1, **labels), kind="openfaas-pro")).zero_after_s == 900.0
    assert only(seen(told(1, 1, **labels), kind="openfaas-ce")).zero_after_s is None
    assert only(seen(told(1, 1, **labels), kind="faasd")).zero_after_s is None


def test_labels_without_effect_on_a_stock_gateway_take_nothing_from_the_others() -> None:
    p = "com.openfaas.scale."
    lone = {p + "zero-duration": "10m", p + "target": "5", p + "type": "capacity", p + "max": "4"}
    view = only(seen(told(1, 1, **lone), kind="openfaas-pro"))
    assert (view.zero_after_s, view.target, view.max_replicas) == (None, Target("capacity", 4.5, None), 4)
    assert (
        only(seen(told(1, 1, **{p + "factor": "20", p + "max": "4"}), kind="openfaas-pro")).max_replicas == 4
    )


def pipeline(device: str, queue: int, tick: int = 0) -> Snapshot:
    labels = {"keystage.pipeline": "p", "keystage.role": "stage", "keystage.stage": "0"}
    stage = FunctionStatus(
        name="p-stage-0",
        replicas=1,
        availableReplicas=1,
        labels=labels,
        envVars={"KEYSTAGE_DEVICE": device},
    )
    router = told(1, 1, "p", **{"keystage.pipeline": "p", "keystage.role": "router"})
    n = 9 * (tick + 1)
    counters = StageCounters(0, n, n * 0.1, n * 0.01, queue, 1, n, 0.0, n, n * 0.1, n * 0.01, n * 0.1)
    stats = RouterStats("p", "i", 5.0 + tick, T, "single-pass", n, n, {}, 0, 0, [counters], [])
    at_s = T + tick
    memory, _ = see(Memory(), [router, stage], at_s)
    return gateway_snapshot(
        at_s, [router, stage], memory, limits("openfaas-ce"), stats={"p": [stats]}, unread={}
    )


@pytest.mark.parametrize("device", ["cpu", "cuda", "emulated:alpha=0.1,beta=0"])
def test_stages_are_bounded_by_the_gateway_and_not_by_this_machine(device: str) -> None:
    snapshot = pipeline(device, 0)
    (stage,) = snapshot.pipelines[0].stages
    assert (stage.scale.cap, stage.cpu) == (5, None)
    assert stage.scale.cap_reason == "OpenFaaS Community Edition takes at most 5 replicas of a function"
    assert stage.routers[0].counters.queue == 0


def test_the_policy_says_why_it_stops_at_five() -> None:
    device = "emulated:alpha=0.1,beta=0.0"
    decision = decide(PolicySettings(), pipeline(device, 0), PolicyState())
    decision = decide(PolicySettings(), pipeline(device, 5000, 1), decision.state)
    assert [a for a in decision.actions if isinstance(a, SetReplicas)] == [SetReplicas("p-stage-0", 5)]
    (report,) = [r for r in decision.reports if r.function == "p-stage-0"]
    assert "at most 5: OpenFaaS Community Edition takes at most 5 replicas" in report.reason
