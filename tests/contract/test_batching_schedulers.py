"""What every `Scheduler` owes its owner, whatever its policy: one suite over ours and the rivals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batching_world import BatchingWorld

from keystage.batching.api import Request, Scheduler
from keystage.batching.partial_slo import PartialSlo
from keystage.batching.policies import BatchPolicy, Deferred, Eager, PlainDeferred, Timeout
from keystage.batching.profile import LatencyProfile
from keystage.batching.rivals.clockwork import ClockworkScheduler
from keystage.batching.rivals.nexus import NexusScheduler
from keystage.batching.rivals.nexus_plan import Session
from keystage.batching.rivals.shepherd import ShepherdScheduler
from keystage.batching.scheduler import CentralScheduler

PROFILES = (LatencyProfile(1.0, 5.0), LatencyProfile(0.5, 1.0, most=4), LatencyProfile(2.0, 0.0))
SLO_S = 20.0


def central(policy: BatchPolicy) -> Callable[[Sequence[LatencyProfile]], Scheduler]:
    return lambda profiles: CentralScheduler([(profile, policy) for profile in profiles])


SCHEDULERS: dict[str, Callable[[Sequence[LatencyProfile]], Scheduler]] = {
    "eager": central(Eager()),
    "timeout": central(Timeout(3.0)),
    "algorithm-1": central(PlainDeferred()),
    "deferred": central(Deferred()),
    "partial-slo": central(PartialSlo()),
    "clockwork": ClockworkScheduler,
    "shepherd": ShepherdScheduler,
    "nexus": lambda profiles: NexusScheduler([Session(profile, SLO_S) for profile in profiles], epoch_s=30.0),
}

everyone = pytest.mark.parametrize("name", SCHEDULERS)


def world(name: str, replicas: int = 2) -> BatchingWorld:
    made = BatchingWorld(SCHEDULERS[name](PROFILES), PROFILES)
    for replica in range(replicas):
        made.add(replica, range(len(PROFILES)))
    return made


def request(number: int, model: int, now_s: float, slo_s: float = SLO_S) -> Request:
    return Request(number, model, now_s, now_s + slo_s)


@everyone
def test_a_single_request_is_served_in_time(name: str) -> None:
    here = world(name)
    here.arrive(request(0, 0, 0.0))
    here.until(math.inf)
    assert here.ended == {0: "served"}


@everyone
def test_what_cannot_be_in_time_is_dropped_without_waiting_for_its_deadline(name: str) -> None:
    here = world(name, replicas=1)
    for number in range(40):
        here.arrive(request(number, 2, 0.0, 15.0))
    here.until(15.0)
    assert set(here.ended.values()) == {"served", "dropped"}
    assert len(here.ended) == 40


@everyone
def test_without_a_replica_requests_are_dropped_in_time(name: str) -> None:
    here = world(name, replicas=0)
    here.arrive(request(0, 1, 0.0))
    here.until(SLO_S)
    assert here.ended == {0: "dropped"}


@everyone
def test_a_replica_that_comes_serves_what_waits(name: str) -> None:
    here = world(name, replicas=0)
    here.arrive(request(0, 1, 0.0))
    here.until(5.0)
    here.add(7, {1})
    here.until(math.inf)
    assert here.ended == {0: "served"}


@everyone
def test_only_a_host_of_its_model_gets_a_request(name: str) -> None:
    here = BatchingWorld(SCHEDULERS[name](PROFILES), PROFILES)
    here.add(0, {0, 1})
    here.add(1, {1, 2})
    for number in range(9):
        here.arrive(request(number, number % 3, 0.0, 200.0 + 50 * (number % 3)))
    here.until(math.inf)
    assert set(here.ended.values()) == {"served"}


@everyone
def test_demoted_requests_are_served_late_and_never_dropped_again(name: str) -> None:
    here = world(name, replicas=1)
    here.late_is_refused = False
    for number in range(40):
        here.arrive(request(number, 0, 0.0))
    here.until(math.inf)
    assert set(here.ended.values()) == {"served", "late"}
    assert len(here.ended) == 40


@everyone
def test_a_cancelled_request_is_gone(name: str) -> None:
    here = world(name, replicas=1)
    held = [request(number, 0, 0.0, 100.0) for number in range(4)]
    for one in held:
        here.arrive(one)
    here.cancel(held[3])
    here.until(math.inf)
    here.cancel(held[0])  # long served: not here any more
    assert here.ended == {0: "served", 1: "served", 2: "served", 3: "cancelled"}


@everyone
def test_what_a_lost_replica_ran_is_served_elsewhere(name: str) -> None:
    here = world(name)
    for number in range(6):
        here.arrive(request(number, 0, 0.0, 60.0))
    here.until(50.0)
    here.arrive(request(6, 0, 50.0, 60.0))
    here.until(50.0 + 60.0 - 7.5)  # begun by now, even deferred
    for replica in [replica for replica in here.running if len(here.hosts) > 1]:
        here.lose(replica)
    here.until(math.inf)
    assert len(here.ended) == 7


@everyone
def test_a_replica_number_that_is_in_use_is_refused(name: str) -> None:
    scheduler = SCHEDULERS[name](PROFILES)
    scheduler.add_replica(0, [0], 0.0)
    with pytest.raises(ValueError, match="0"):
        scheduler.add_replica(0, [1], 0.0)
    scheduler.remove_replica(9, 0.0)  # unknown: nothing happens
    assert scheduler.take() == []


event = st.tuples(
    st.sampled_from(["arrive"] * 8 + ["cancel", "lose", "add", "pause"]),
    st.integers(0, 2),
    st.floats(0.0, 4.0),
    st.floats(1.0, 40.0),
)


@everyone
@settings(max_examples=30, deadline=None)
@given(events=st.lists(event, max_size=60), replicas=st.integers(1, 4), is_refused=st.booleans())
def test_no_request_is_lost_doubled_or_late_in_any_history(
    name: str, events: list[tuple[str, int, float, float]], replicas: int, is_refused: bool
) -> None:
    here = world(name, replicas)
    here.late_is_refused = is_refused
    came: list[Request] = []
    fresh = replicas
    for what, choice, gap_s, slo_s in events:
        here.until(here.now_s + gap_s)
        if what == "arrive":
            came.append(request(len(came), choice, here.now_s, slo_s))
            here.arrive(came[-1])
        elif what == "cancel" and came:
            here.cancel(came[-1 - choice % len(came)])
        elif what == "lose" and len(here.hosts) > 1:
            here.lose(sorted(here.hosts)[choice % len(here.hosts)])
        elif what == "add":
            here.add(fresh, range(3) if choice else {0, 2})
            fresh += 1
        elif what == "pause":
            here.until(here.now_s + 10 * gap_s)
    if not any(1 in models for models in here.hosts.values()):
        here.add(fresh, range(3))
    here.until(math.inf)
    assert sorted(here.ended) == [one.number for one in came]
    assert not here.waiting
    assert not here.running
