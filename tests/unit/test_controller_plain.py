"""Plain functions on a time line: to zero and back, by load up and down, and never while something runs."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from keystage.controller.domain.decision import ClearWake, SetReplicas
from keystage.controller.domain.snapshot import FunctionView, GatewayLoad, Override, Snapshot, Target
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings

TICK_S = 0.25


@dataclasses.dataclass
class Function:
    """One function whose replicas are ready at once, looked at every tick; gateways report once a second."""

    zero_after_s: float | None = None
    target: Target | None = None
    least: int = 1
    most: int = 20
    desired: int | None = None
    wake: bool = False
    override: Override | None = None
    told: bool = True
    gateway: str = "g"
    in_flight: float = 0.0
    started: float = 0.0
    now: float = 1000.0
    ready: int | None = None
    state: PolicyState = dataclasses.field(default_factory=PolicyState)
    settings: PolicySettings = dataclasses.field(default_factory=PolicySettings)
    reason: str = ""

    def step(self) -> None:
        self.now += TICK_S
        ready = self.ready if self.ready is not None else self.desired if self.desired is not None else 1
        view = FunctionView(
            function="f",
            desired=self.desired,
            ready=ready,
            min_replicas=self.least,
            max_replicas=self.most,
            wake=self.wake,
            override=self.override,
            zero_after_s=self.zero_after_s,
            target=self.target,
            loads=(GatewayLoad(self.gateway, self.in_flight, self.started),) if self.told else None,
        )
        decision = decide(self.settings, Snapshot(at_s=self.now, functions=(view,)), self.state)
        self.state = decision.state
        self.reason = decision.reports[0].reason
        for action in decision.actions:
            if isinstance(action, SetReplicas):
                self.desired = action.replicas
            elif isinstance(action, ClearWake):
                self.wake = False

    def run(self, seconds: float, rps: float = 0.0) -> int:
        for tick in range(round(seconds / TICK_S)):
            if rps and tick % 4 == 0:
                self.started += rps
            self.step()
        assert self.desired is not None
        return self.desired


def test_without_labels_the_number_stays() -> None:
    function = Function()
    assert function.run(2000) == 1
    function.desired, function.in_flight = 3, 50.0
    assert function.run(100) == 3


def test_it_goes_to_zero_after_its_time_and_stays_there() -> None:
    function = Function(zero_after_s=2.0, least=2)
    assert function.run(2.0) == 2  # two seconds from when it was seen first
    assert function.run(0.5) == 0
    assert function.run(1000) == 0
    assert "nothing came for" in function.reason


def test_a_wake_brings_the_minimum_and_the_time_begins_anew() -> None:
    function = Function(zero_after_s=2.0, least=2, desired=0)
    function.wake = True
    assert function.run(TICK_S) == 2
    assert function.run(1.75) == 2
    assert not function.wake
    assert function.run(1.0) == 0


def test_never_to_zero_while_something_is_in_flight() -> None:
    function = Function(zero_after_s=2.0)
    function.in_flight = 1.0
    assert function.run(500) == 1
    function.in_flight = 0.0
    assert function.run(1.75) == 1
    assert function.run(0.5) == 0


def test_a_request_counts_at_its_start_however_short_it_is() -> None:
    function = Function(zero_after_s=2.0)
    for _ in range(10):
        function.started += 1
        assert function.run(1.75) == 1
    assert function.run(0.75) == 0


def test_a_gateway_that_is_new_or_not_known_is_work() -> None:
    function = Function(zero_after_s=2.0)
    function.run(1.5)
    function.gateway, function.started = "h", 1.0
    assert function.run(1.5) == 1
    function.started = float("nan")
    assert function.run(100) == 1


def test_where_nobody_tells_the_load_nothing_goes_to_zero() -> None:
    assert Function(zero_after_s=2.0, told=False).run(100) == 1
    assert Function(least=0, desired=1, told=False).run(1000) == 1


def test_a_minimum_of_zero_goes_there_after_the_policys_own_time() -> None:
    function = Function(least=0, desired=1)
    assert function.run(300) == 1
    assert function.run(1) == 0


def test_a_person_holds_it_up_and_down() -> None:
    function = Function(zero_after_s=2.0, override=Override(3, 1e9))
    assert function.run(100) == 3
    function = Function(target=Target("capacity", 1.0), in_flight=5.0, override=Override(0, 1e9))
    assert function.run(100) == 0
    function.wake = True
    assert function.run(TICK_S) == 5


def test_capacity_grows_at_once_and_is_given_back_one_by_one() -> None:
    function = Function(target=Target("capacity", 1.8), most=6)  # target 2 at 0.9
    function.in_flight = 7.0
    assert function.run(TICK_S) == 4
    function.in_flight = 100.0
    assert function.run(TICK_S) == 6
    assert "at most 6 by label" not in function.reason
    function.in_flight = 2.0
    numbers = [function.run(1.0) for _ in range(20)]
    assert numbers[:8] == [6] * 8  # hold_s
    assert numbers[-1] == 2
    assert all(a - b in (0, 1) for a, b in itertools.pairwise(numbers))


def test_what_was_needed_while_holding_is_kept() -> None:
    function = Function(target=Target("capacity", 1.0), desired=6)
    for load in (2.0, 5.0, 1.0):
        function.in_flight = load
        function.run(3.0)
    assert function.desired == 5
    assert function.run(60) == 1


def test_rps_follows_the_mean_and_not_single_reports() -> None:
    function = Function(target=Target("rps", 9.0))  # target 10 at 0.9
    assert function.run(60, rps=40) == 5
    highest = 0
    for _ in range(100):
        highest = max(highest, function.run(1.0, rps=40))
    assert highest <= 6
    assert function.run(120, rps=15) == 2
    assert function.run(120) == 1


def test_a_new_controller_does_not_let_go_before_it_knows_the_rate() -> None:
    function = Function(target=Target("rps", 9.0))
    before = function.run(60, rps=40)
    function.state = PolicyState()
    lowest = min(function.run(1.0, rps=40) for _ in range(60))
    assert lowest >= before - 1  # the five that were found have one to spare
    assert lowest * 9.0 >= 36


@pytest.mark.parametrize(("ready", "expected"), [(1, 3), (3, 5), (20, 20)])
def test_factor_bounds_a_step(ready: int, expected: int) -> None:
    function = Function(target=Target("capacity", 1.0, step=2), in_flight=50.0, ready=ready)
    assert function.run(5.0) == expected


def test_a_target_that_is_no_number_changes_nothing() -> None:
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        assert Function(target=Target("capacity", wrong), in_flight=50.0).run(60) == 1


def test_time_that_steps_back_costs_nothing() -> None:
    function = Function(zero_after_s=10.0, target=Target("rps", 9.0))
    function.run(30, rps=40)
    function.now -= 500
    assert function.run(9.0) >= 4
    assert function.run(100) == 0


def test_functions_that_are_gone_are_forgotten() -> None:
    function = Function(zero_after_s=2.0)
    function.step()
    assert set(function.state.functions) == {"f"}
    decision = decide(function.settings, Snapshot(at_s=function.now + 1), function.state)
    assert decision.state.functions == {}


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, -5.0, 7.0])
@pytest.mark.parametrize("field", ["in_flight", "started"])
@pytest.mark.parametrize("every", [1, 3])
def test_what_a_gateway_cannot_have_neither_takes_replicas_nor_brings_any(
    bad: float | None, field: str, every: int
) -> None:
    function = Function(zero_after_s=5.0, target=Target("rps", 5.0), started=100_000.0)
    assert function.run(60, rps=40) == 9
    for tick in range(160):  # 40 s, beyond every hold
        if tick % 4 == 0:
            function.started += 40
        right = getattr(function, field)
        if tick % every == 0:
            setattr(function, field, bad)
        function.step()
        setattr(function, field, right)
        assert function.desired == 9
    for tick in range(240):  # what it comes back to is no burst
        function.started += 40 * (tick % 4 == 0)
        function.step()
        assert function.desired == 9
