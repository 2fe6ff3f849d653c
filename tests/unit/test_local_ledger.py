"""The ledger's rules, one event at a time."""

from __future__ import annotations

import pytest

from keystage.local.api import Deployment, Intent, Load, Override
from keystage.local.errors import BadDeployment, UnknownFunction
from keystage.local.events import (
    Answered,
    Deployed,
    Exited,
    Intended,
    Kill,
    Loaded,
    Missed,
    Removed,
    Scaled,
    Start,
    Started,
    Terminate,
    Ticked,
)
from keystage.local.ledger import Bounds, Ledger, backoff_s

BOUNDS = Bounds(linger_s=0.3, drain_s=10.0, healthy_s=30.0, start_limit_s=100.0, misses=3, timeout_s=20.0)
FUNCTION = Deployment(service="f", envProcess="serve")
ROUTER = Deployment(
    service="p",
    envVars={"KEYSTAGE_ROLE": "router", "KEYSTAGE_PIPELINE": "p", "KEYSTAGE_BUNDLE": "file:///b"},
)


def started(instructions: list) -> list[str]:
    return [i.replica for i in instructions if isinstance(i, Start)]


def ready_ledger(replicas: int, deployment: Deployment = FUNCTION) -> Ledger:
    ledger = Ledger(BOUNDS)
    names = started(ledger.handle(Deployed(deployment), 0.0))
    names += started(ledger.handle(Scaled(deployment.service, replicas), 0.0))
    for pid, name in enumerate(names):
        ledger.handle(Started(name, 100 + pid, "127.0.0.1:1"), 0.0)
        ledger.handle(Answered(name), 1.0)
    return ledger


def states(ledger: Ledger) -> dict[str, str]:
    return {r.replica: r.state for r in ledger.replicas()}


def test_a_deployed_function_starts_one_replica_and_is_ready_only_when_it_answers() -> None:
    ledger = Ledger(BOUNDS)
    assert started(ledger.handle(Deployed(FUNCTION), 5.0)) == ["f-0"]
    ledger.handle(Started("f-0", 7, "127.0.0.1:9"), 5.1)
    (record,) = ledger.replicas()
    assert (record.state, record.pid, record.address, record.ready_at_s) == (
        "starting",
        7,
        "127.0.0.1:9",
        0.0,
    )
    ledger.handle(Answered("f-0"), 6.0)
    (record,) = ledger.replicas()
    assert (record.state, record.started_at_s, record.ready_at_s) == ("ready", 5.0, 6.0)


def test_label_sets_the_first_number_and_desired_overrules_it() -> None:
    ledger = Ledger(BOUNDS)
    deployment = Deployment(service="f", envProcess="serve", labels={"com.openfaas.scale.min": "2"})
    assert started(ledger.handle(Deployed(deployment), 0.0)) == ["f-0", "f-1"]
    assert started(ledger.handle(Scaled("f", 3), 0.0)) == ["f-2"]


def test_scale_down_takes_starting_ones_first_then_the_youngest_and_lingers_before_sigterm() -> None:
    ledger = ready_ledger(3)
    assert started(ledger.handle(Scaled("f", 4), 2.0)) == ["f-3"]
    assert ledger.handle(Scaled("f", 2), 3.0) == [Terminate("f-3")]
    assert states(ledger) == {"f-0": "ready", "f-1": "ready", "f-2": "draining", "f-3": "draining"}
    assert ledger.handle(Ticked(), 3.2) == []
    assert ledger.handle(Ticked(), 3.31) == [Terminate("f-2")]
    assert ledger.handle(Ticked(), 3.4) == []
    assert ledger.handle(Exited("f-3", ""), 3.5) == []
    assert ledger.handle(Ticked(), 13.32) == [Kill("f-2")]
    assert ledger.handle(Ticked(), 13.4) == []
    ledger.handle(Exited("f-2", ""), 13.5)
    assert states(ledger) == {"f-0": "ready", "f-1": "ready"}


def loaded(at_s: float, ledger: Ledger, **counts: int) -> None:
    replicas = {name.replace("_", "-"): count for name, count in counts.items()}
    assert ledger.handle(Loaded("f", Load("g", sum(counts.values()), 9, replicas=replicas)), at_s) == []


def test_a_plain_functions_replica_is_stopped_when_no_gateway_has_requests_there() -> None:
    ledger = ready_ledger(1)
    loaded(2.0, ledger, f_0=1)
    ledger.handle(Scaled("f", 0), 3.0)
    assert states(ledger) == {"f-0": "draining"}
    assert ledger.handle(Ticked(), 9.0) == []
    ledger.handle(Scaled("f", 1), 9.0)  # woken again meanwhile: the old one is still at work
    assert ledger.handle(Ticked(), 9.5) == []
    loaded(9.6, ledger)
    assert ledger.handle(Ticked(), 9.7) == [Terminate("f-0")]
    assert ledger.handle(Ticked(), 19.6) == []
    assert ledger.handle(Ticked(), 19.71) == [Kill("f-0")]


def test_what_is_in_hand_is_waited_for_on_scale_down_redeploy_and_removal() -> None:
    ledger = ready_ledger(3)
    loaded(2.0, ledger, f_0=1, f_1=1, f_2=1)
    ledger.handle(Scaled("f", 2), 3.0)
    assert ledger.handle(Ticked(), 3.4) == []
    loaded(3.5, ledger, f_0=1, f_1=1)
    assert ledger.handle(Ticked(), 3.6) == [Terminate("f-2")]
    ledger.handle(Exited("f-2", ""), 3.7)
    new = started(ledger.handle(Deployed(FUNCTION), 4.0))
    for pid, name in enumerate(new):
        ledger.handle(Started(name, 200 + pid, "127.0.0.1:1"), 4.0)
        ledger.handle(Answered(name), 5.0)
    assert states(ledger) == {"f-0": "draining", "f-1": "draining", "f-3": "ready", "f-4": "ready"}
    assert ledger.handle(Ticked(), 5.5) == []
    loaded(5.6, ledger, f_1=1, f_3=1, f_4=0)
    assert ledger.handle(Ticked(), 5.7) == [Terminate("f-0")]
    ledger.handle(Removed("f"), 6.0)
    loaded(6.1, ledger, f_1=1, f_3=1)  # taken although the function is gone
    assert ledger.handle(Ticked(), 6.4) == [Terminate("f-4")]
    loaded(6.5, ledger)
    assert ledger.handle(Ticked(), 6.6) == [Terminate("f-1"), Terminate("f-3")]
    for name in states(ledger):
        ledger.handle(Exited(name, ""), 6.7)
    with pytest.raises(UnknownFunction):
        ledger.handle(Loaded("f", Load("g", 0, 9)), 6.8)
    ledger.handle(Ticked(), 6.9)
    assert ledger.loads.of("f", 6.9) == ()


def test_a_word_from_before_the_replica_left_does_not_do() -> None:
    ledger = ready_ledger(1)
    loaded(2.9, ledger, f_0=0)  # a request may have come since
    ledger.handle(Scaled("f", 0), 3.0)
    loaded(3.01, ledger, f_0=0)  # and still may: this gateway has not seen it leave
    assert ledger.handle(Ticked(), 3.5) == []
    loaded(3.6, ledger)
    assert ledger.handle(Ticked(), 3.7) == [Terminate("f-0")]


def test_what_is_in_hand_is_waited_for_within_bounds_and_not_by_programs_that_drain() -> None:
    ledger = ready_ledger(1)
    ledger.handle(Scaled("f", 0), 3.0)
    for at_s in (3.1, 22.0):
        loaded(at_s, ledger, f_0=1)
    assert ledger.handle(Ticked(), 22.9) == []
    assert ledger.handle(Ticked(), 23.0) == [Terminate("f-0")]  # the time-out
    assert ledger.handle(Ticked(), 33.01) == [Kill("f-0")]
    ledger = ready_ledger(1, ROUTER)
    ledger.handle(Loaded("p", Load("g", 1, 1, replicas={"p-0": 1})), 2.0)
    ledger.handle(Removed("p"), 3.0)
    assert ledger.handle(Ticked(), 3.31) == [Terminate("p-0")]
    with pytest.raises(UnknownFunction):
        ledger.handle(Loaded("no", Load("g", 0, 0)), 25.0)


def test_silence_at_work_is_no_miss_but_an_answer_or_refusal_and_silence_without_work_are() -> None:
    ledger = ready_ledger(1)
    loaded(2.0, ledger, f_0=1)
    for at_s in range(3, 20):
        assert ledger.handle(Missed("f-0", is_silent=True), float(at_s)) == []
    assert ledger.handle(Missed("f-0"), 20.0) == []
    loaded(21.0, ledger, f_0=0)
    assert ledger.handle(Missed("f-0", is_silent=True), 22.0) == []
    assert ledger.handle(Missed("f-0", is_silent=True), 23.0) == [Kill("f-0")]


def test_own_drain_time_wins() -> None:
    ledger = Ledger(BOUNDS)
    ledger.handle(Deployed(Deployment(service="f", envProcess="x", envVars={"KEYSTAGE_DRAIN_S": "1"})), 0.0)
    ledger.handle(Scaled("f", 0), 0.0)
    assert ledger.handle(Ticked(), 0.9) == []
    assert ledger.handle(Ticked(), 1.31) == [Kill("f-0")]


def test_backoff_grows_to_its_bound() -> None:
    assert [backoff_s(n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 5000)] == [
        0,
        0,
        0.5,
        1,
        2,
        4,
        8,
        16,
        30,
        30,
        30,
    ]


def test_crash_loop_backs_off_says_why_and_goes_on() -> None:
    ledger = Ledger(BOUNDS)
    ledger.handle(Deployed(FUNCTION), 0.0)
    assert started(ledger.handle(Exited("f-0", "exit code 1: boom"), 0.0)) == ["f-1"]
    assert ledger.handle(Exited("f-1", "exit code 1: boom"), 0.1) == []
    (record,) = ledger.replicas()
    assert (record.state, record.restarts, record.reason) == ("failed", 2, "exit code 1: boom")
    assert ledger.handle(Ticked(), 0.59) == []
    assert started(ledger.handle(Ticked(), 0.6)) == ["f-2"]
    assert ledger.replicas()[0].restarts == 2


def test_crash_after_a_healthy_time_is_forgotten() -> None:
    ledger = Ledger(BOUNDS)
    ledger.handle(Deployed(FUNCTION), 0.0)
    ledger.handle(Exited("f-0", ""), 0.0)
    ledger.handle(Answered("f-1"), 1.0)
    assert started(ledger.handle(Exited("f-1", ""), 31.0)) == ["f-2"]
    assert ledger.replicas()[0].restarts == 1


def test_hung_replica_is_killed_once_after_three_misses_in_a_row() -> None:
    ledger = ready_ledger(1)
    assert ledger.handle(Missed("f-0"), 2.0) == []
    assert ledger.handle(Missed("f-0"), 4.0) == []
    ledger.handle(Answered("f-0"), 6.0)
    assert [ledger.handle(Missed("f-0"), 8.0 + i) for i in range(4)] == [[], [], [Kill("f-0")], []]
    ledger.handle(Exited("f-0", "killed by SIGKILL"), 12.0)
    ledger.handle(Exited("f-1", "killed by SIGKILL"), 12.0)
    assert "killed by SIGKILL" in ledger.replicas()[0].reason


def test_hang_while_starting_is_bounded_and_named() -> None:
    ledger = Ledger(BOUNDS)
    ledger.handle(Deployed(FUNCTION), 0.0)
    assert ledger.handle(Ticked(), 99.9) == []
    assert ledger.handle(Ticked(), 100.0) == [Kill("f-0")]
    assert ledger.handle(Ticked(), 101.0) == []


def test_update_keeps_the_old_replica_until_a_new_one_is_ready() -> None:
    ledger = ready_ledger(2)
    assert started(ledger.handle(Deployed(FUNCTION), 2.0)) == ["f-2", "f-3"]
    assert [r.generation for r in ledger.replicas()] == [1, 1, 2, 2]
    ledger.handle(Answered("f-2"), 3.0)
    assert states(ledger) == {"f-0": "ready", "f-1": "draining", "f-2": "ready", "f-3": "starting"}
    ledger.handle(Answered("f-3"), 4.0)
    assert states(ledger)["f-0"] == "draining"
    assert ledger.handle(Ticked(), 4.4) == [Terminate("f-0"), Terminate("f-1")]


def test_update_of_a_router_stops_the_old_one_first() -> None:
    ledger = ready_ledger(1, ROUTER)
    assert ledger.handle(Deployed(ROUTER), 2.0) == []
    assert states(ledger) == {"p-0": "draining"}
    assert ledger.handle(Ticked(), 2.4) == [Terminate("p-0")]
    assert started(ledger.handle(Exited("p-0", ""), 3.0)) == ["p-1"]


def test_a_router_has_one_replica_whatever_is_desired() -> None:
    ledger = ready_ledger(3, ROUTER)
    assert states(ledger) == {"p-0": "ready"}


def test_removed_function_drains_and_may_come_back_under_new_names() -> None:
    ledger = ready_ledger(2)
    ledger.handle(Removed("f"), 2.0)
    assert "f" not in ledger.functions
    assert set(states(ledger).values()) == {"draining"}
    assert started(ledger.handle(Deployed(FUNCTION), 2.0)) == ["f-2"]
    assert ledger.functions["f"].generation == 1
    ledger.handle(Exited("f-0", ""), 2.5)
    ledger.handle(Exited("f-1", ""), 2.5)
    assert states(ledger) == {"f-2": "starting"}


def test_intents_are_kept_and_wake_ends_when_a_replica_is_ready() -> None:
    ledger = ready_ledger(1)
    ledger.handle(Scaled("f", 0), 2.0)
    ledger.handle(Exited("f-0", ""), 3.0)
    ledger.handle(Intended("f", Intent(wake=True, override=Override(4, 99.0))), 4.0)
    assert ledger.functions["f"].wake
    assert ledger.replicas() == []  # only the controller starts something
    ledger.handle(Intended("f", Intent(override=None)), 4.0)
    assert (ledger.functions["f"].wake, ledger.functions["f"].override) == (True, None)
    ledger.handle(Scaled("f", 1), 5.0)
    ledger.handle(Answered("f-1"), 6.0)
    assert not ledger.functions["f"].wake


@pytest.mark.parametrize("event", [Removed("g"), Scaled("g", 1), Intended("g", Intent(wake=True))])
def test_unknown_functions_are_named(event: Removed | Scaled | Intended) -> None:
    with pytest.raises(UnknownFunction, match="function g is not deployed"):
        ready_ledger(1).handle(event, 2.0)


@pytest.mark.parametrize("replicas", [-1, 1001, 10**9])
def test_impossible_numbers_change_nothing(replicas: int) -> None:
    ledger = ready_ledger(1)
    for event in (Scaled("f", replicas), Intended("f", Intent(override=Override(replicas, 9.0)))):
        with pytest.raises(BadDeployment, match=f"0..1000, not {replicas}"):
            ledger.handle(event, 2.0)
    assert (ledger.functions["f"].desired, ledger.functions["f"].override) == (1, None)


def test_a_failed_replica_is_the_first_to_go() -> None:
    ledger = ready_ledger(2)
    ledger.handle(Exited("f-0", "boom"), 2.0)
    ledger.handle(Exited("f-2", "boom"), 2.0)
    assert states(ledger) == {"f-1": "ready", "f-2": "failed"}
    assert ledger.handle(Scaled("f", 1), 2.1) == []
    assert states(ledger) == {"f-1": "ready"}
