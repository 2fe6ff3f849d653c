"""The central scheduler keeps its promises whatever happens; without delays it is Algorithm 1."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.batching.api import Candidate, Delays, Dispatch, Drop, Request
from keystage.batching.policies import BatchPolicy, Deferred, Eager, PlainDeferred, Timeout
from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue
from keystage.batching.scheduler import CentralScheduler

SLACK_S = 1e-8
NO_DELAYS = Delays()
PROFILES = (LatencyProfile(1.0, 5.0), LatencyProfile(0.2, 9.0), LatencyProfile(3.0, 0.1, most=4))
SLOS_S = (12.0, 20.0, 9.0)
POLICIES: tuple[BatchPolicy, ...] = (Eager(), Timeout(2.0), PlainDeferred(), Deferred())

gaps = st.floats(0.001, 4.0, allow_nan=False)
event = st.one_of(
    st.tuples(st.just("arrive"), gaps, st.integers(0, 2)),
    st.tuples(st.just("burst"), gaps, st.integers(0, 2)),
    st.tuples(st.just("cancel"), gaps, st.integers(0, 50)),
    st.tuples(st.just("add"), gaps, st.integers(0, 5)),
    st.tuples(st.just("remove"), gaps, st.integers(0, 5)),
)
events = st.lists(event, max_size=60)
HOSTS = (range(3), range(3), (0, 1), (2,), range(3), (1, 2))


@dataclasses.dataclass
class Running:
    """A batch that a replica has or is to have."""

    replica: int
    start_s: float
    end_s: float
    requests: list[Request]


class World:
    """Emulated replicas under one scheduler; checks every order as it comes."""

    def __init__(
        self, policies: Sequence[BatchPolicy], delays: Delays = NO_DELAYS, *, demotes: bool = False
    ) -> None:
        self.scheduler = CentralScheduler(list(zip(PROFILES, policies, strict=True)), delays)
        self.delays = delays
        self.demotes = demotes
        self.now_s = 0.0
        self.replicas: dict[int, list[Running]] = {}
        self.ends: list[tuple[float, int, Running]] = []
        self.came: list[Request] = []
        self.waiting: dict[int, Request] = {}
        self.demoted: set[int] = set()
        self.log: list[tuple[float, str, int, int, tuple[int, ...]]] = []

    def apply(self, kind: str, gap_s: float, what: int) -> None:
        self.pass_to(self.now_s + gap_s)
        if kind == "arrive":
            self.arrive(what)
        elif kind == "burst":
            for _ in range(5):
                self.arrive(what)
        elif kind == "cancel" and what < len(self.came):
            request = self.came[what]
            assert self.scheduler.cancel(request, self.now_s) == (request.number in self.waiting)
            self.waiting.pop(request.number, None)
        elif kind == "add" and what not in self.replicas:
            self.replicas[what] = []
            self.scheduler.add_replica(what, HOSTS[what], self.now_s)
        elif kind == "remove" and what in self.replicas:
            lost = [request for run in self.replicas.pop(what) for request in run.requests]
            self.scheduler.remove_replica(what, self.now_s)
            self.carry_out()
            for request in lost:
                # Its replica is gone: it comes back, with its deadline.
                self.waiting[request.number] = request
                again = self.scheduler.demote if request.number in self.demoted else self.scheduler.arrive
                again(request, self.now_s)
                self.carry_out()
        self.carry_out()

    def arrive(self, model: int) -> None:
        request = Request(len(self.came), model, self.now_s, self.now_s + SLOS_S[model])
        self.came.append(request)
        self.waiting[request.number] = request
        self.scheduler.arrive(request, self.now_s)
        self.carry_out()

    def pass_to(self, until_s: float) -> None:
        while True:
            end_s = self.ends[0][0] if self.ends else math.inf
            timer_s = self.scheduler.next_timer_s()
            at_s = max(self.now_s, min(end_s, timer_s))
            if at_s > until_s:
                break
            self.now_s = at_s
            if end_s <= timer_s:
                _, _, run = heapq.heappop(self.ends)
                if run in self.replicas.get(run.replica, []):
                    self.replicas[run.replica].remove(run)
                    self.scheduler.finished(run.replica, at_s)
            else:
                self.scheduler.on_timer(at_s)
            self.carry_out()
        self.now_s = until_s

    def carry_out(self) -> None:
        for order in self.scheduler.take():
            assert isinstance(order, Dispatch | Drop)
            numbers = tuple(request.number for request in order.requests)
            assert numbers
            for number in numbers:
                del self.waiting[number]  # neither lost nor served twice
            if isinstance(order, Dispatch):
                self.dispatch(order)
                self.log.append((self.now_s, "dispatch", order.model, order.replica, numbers))
            else:
                self.drop(order)
                self.log.append((self.now_s, "drop", order.model, -1, numbers))

    def dispatch(self, order: Dispatch) -> None:
        profile, size = PROFILES[order.model], len(order.requests)
        assert order.model in HOSTS[order.replica]
        assert 1 <= size <= profile.most
        queue = self.replicas[order.replica]
        sends_ahead = self.delays != Delays()
        assert len(queue) <= sends_ahead
        assert order.start_s >= self.now_s + self.delays.of(size) - SLACK_S
        assert not queue or order.start_s >= queue[-1].end_s - SLACK_S
        end_s = order.start_s + profile.latency_s(size)
        in_time = [r for r in order.requests if r.number not in self.demoted]
        assert all(end_s <= request.deadline_s + SLACK_S for request in in_time)
        assert sorted(in_time, key=lambda r: r.deadline_s) == in_time
        if not sends_ahead:
            idle = [n for n, running in self.replicas.items() if not running and order.model in HOSTS[n]]
            assert order.replica == min(idle)
        run = Running(order.replica, order.start_s, end_s, order.requests)
        queue.append(run)
        heapq.heappush(self.ends, (end_s, len(self.came) + len(self.log), run))

    def drop(self, order: Drop) -> None:
        for request in order.requests:
            assert request.number not in self.demoted
            if self.demotes:
                self.demoted.add(request.number)
                self.waiting[request.number] = request
        if self.demotes:
            for request in order.requests:
                self.scheduler.demote(request, self.now_s)
            self.carry_out()

    def finish(self) -> None:
        """All replicas come back, and much time passes: nothing is left."""
        for replica in range(len(HOSTS)):
            self.apply("add", 0.01, replica)
        self.pass_to(self.now_s + 1000.0)
        assert not self.waiting
        assert [self.scheduler.queued(model) for model in range(3)] == [0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.sampled_from(POLICIES)] * 3), st.booleans(), events)
def test_no_request_is_lost_and_no_promise_is_broken(
    policies: tuple[BatchPolicy, ...], demotes: bool, happens: list[tuple[str, float, int]]
) -> None:
    world = World(policies, demotes=demotes)
    world.apply("add", 0.0, 1)
    for kind, gap_s, what in happens:
        world.apply(kind, gap_s, what)
        assert [world.scheduler.queued(m) for m in range(3)] == [
            sum(request.model == m for request in world.waiting.values()) for m in range(3)
        ]
    world.finish()


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.sampled_from(POLICIES)] * 3),
    st.builds(Delays, st.floats(0.0, 2.0), st.sampled_from((0.0, 0.1))),
    events,
)
def test_the_same_with_delays(
    policies: tuple[BatchPolicy, ...], delays: Delays, happens: list[tuple[str, float, int]]
) -> None:
    world = World(policies, delays)
    world.apply("add", 0.0, 4)
    for kind, gap_s, what in happens:
        world.apply(kind, gap_s, what)
    world.finish()


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from((1, 3)),
    st.floats(0.05, 0.6),
    st.sampled_from((NO_DELAYS, Delays(0.3))),
)
def test_promises_hold_once_rates_are_known_and_far_above_capacity(
    seed: int, models: int, gap_s: float, delays: Delays
) -> None:
    random, world = np.random.default_rng(seed), World([Deferred()] * 3, delays)
    for replica in (0, 1, 4):
        world.apply("add", 0.0, replica)
    for shape in (1.0, 0.2):
        for gap in random.standard_gamma(shape, 200) / shape * gap_s:
            world.apply("arrive", float(gap), int(random.integers(models)))
    world.finish()


class Reference:
    """Algorithm 1 as one reads it: everything computed anew at every event, in O(models x replicas)."""

    def __init__(self, policies: Sequence[BatchPolicy]) -> None:
        self.policies = policies
        self.queues: list[list[Request]] = [[] for _ in PROFILES]
        self.is_schedulable = [False] * len(PROFILES)
        self.busy: dict[int, bool] = {}
        self.orders: list[tuple[str, int, int, tuple[int, ...]]] = []

    def candidate(self, model: int, now_s: float) -> Candidate | None:
        queue = RequestQueue()
        for request in self.queues[model]:
            queue.push(request)
        found = self.policies[model].candidate(queue, PROFILES[model], now_s, now_s)
        gone = queue.take_given_up()
        if gone:
            self.orders.append(("drop", model, -1, tuple(r.number for r in gone)))
            self.queues[model] = [r for r in self.queues[model] if r not in gone]
        if found is None or found.start_s > now_s:
            self.is_schedulable[model] = False
        return found

    def dispatch(self, model: int, replica: int, now_s: float) -> None:
        found = self.candidate(model, now_s)
        assert found is not None
        self.queues[model].sort(key=lambda request: request.deadline_s)
        batch, self.queues[model] = self.queues[model][: found.size], self.queues[model][found.size :]
        self.busy[replica] = True
        self.is_schedulable[model] = False
        self.orders.append(("dispatch", model, replica, tuple(r.number for r in batch)))

    def on_replica_timer(self, replica: int, now_s: float) -> None:
        """Of the schedulable models the one whose latest moment is the closest."""
        self.busy[replica] = False
        found = [(self.candidate(model, now_s), model) for model in HOSTS[replica]]
        urgent = [(c.latest_s, model) for c, model in found if c and self.is_schedulable[model]]
        if urgent:
            self.dispatch(min(urgent)[1], replica, now_s)
        self.on_model_timers(now_s)

    def on_model_timers(self, now_s: float) -> None:
        """Models whose time has come, in order; each takes the smallest replica, or is schedulable."""
        while True:
            found = [(self.candidate(model, now_s), model) for model in range(len(PROFILES))]
            due = [
                (c.start_s, m) for c, m in found if c and c.start_s <= now_s and not self.is_schedulable[m]
            ]
            if not due:
                return
            model = min(due)[1]
            idle = [n for n, is_busy in self.busy.items() if not is_busy and model in HOSTS[n]]
            if idle:
                self.dispatch(model, min(idle), now_s)
            else:
                self.is_schedulable[model] = True


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.sampled_from(POLICIES[:3])] * 3), events)
def test_equals_algorithm_1_computed_from_scratch(
    policies: tuple[BatchPolicy, ...], happens: list[tuple[str, float, int]]
) -> None:
    reference = Reference(policies)

    class Twin(World):
        """The world, telling the reference the same."""

        def arrive(self, model: int) -> None:
            reference.queues[model].append(
                Request(len(self.came), model, self.now_s, self.now_s + SLOS_S[model])
            )
            super().arrive(model)
            reference.on_model_timers(self.now_s)

    world = Twin(policies)
    scheduler = world.scheduler
    finished, on_timer, cancel = scheduler.finished, scheduler.on_timer, scheduler.cancel
    add, remove, arrive = scheduler.add_replica, scheduler.remove_replica, scheduler.arrive

    def told_finished(replica: int, now_s: float) -> None:
        finished(replica, now_s)
        reference.on_replica_timer(replica, now_s)

    def told_on_timer(now_s: float) -> None:
        on_timer(now_s)
        reference.on_model_timers(now_s)

    def told_cancel(request: Request, now_s: float) -> bool:
        waited = cancel(request, now_s)
        kept = [r for r in reference.queues[request.model] if r.number != request.number]
        assert waited == (len(kept) < len(reference.queues[request.model]))
        reference.queues[request.model] = kept
        reference.on_model_timers(now_s)
        return waited

    def told_add(replica: int, models: Sequence[int], now_s: float) -> None:
        add(replica, models, now_s)
        reference.on_replica_timer(replica, now_s)

    def told_remove(replica: int, now_s: float) -> None:
        remove(replica, now_s)
        del reference.busy[replica]
        reference.on_model_timers(now_s)

    def told_arrive(request: Request, now_s: float) -> None:
        arrive(request, now_s)
        if request.arrived_s < now_s:
            reference.queues[request.model].append(request)
            reference.on_model_timers(now_s)

    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        for name, told in (
            ("finished", told_finished),
            ("on_timer", told_on_timer),
            ("cancel", told_cancel),
            ("add_replica", told_add),
            ("remove_replica", told_remove),
            ("arrive", told_arrive),
        ):
            patch.setattr(scheduler, name, told, raising=True)
        for kind, gap_s, what in happens:
            world.apply(kind, gap_s, what)
        world.finish()
    dispatched = [entry[1:] for entry in world.log if entry[1] == "dispatch"]
    assert dispatched == [order for order in reference.orders if order[0] == "dispatch"]
    dropped = sorted(number for entry in world.log if entry[1] == "drop" for number in entry[4])
    assert dropped == sorted(n for order in reference.orders if order[0] == "drop" for n in order[3])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(POLICIES), st.sampled_from(PROFILES), events)
def test_the_candidate_kept_is_the_candidate_from_scratch(
    policy: BatchPolicy, profile: LatencyProfile, happens: list[tuple[str, float, int]]
) -> None:
    # No replica: the queue only grows, shrinks by cancelling and by giving up.
    kept, waiting, now_s = RequestQueue(), dict[int, Request](), 0.0
    for number, (kind, gap_s, what) in enumerate(happens):
        now_s += gap_s
        if kind in ("arrive", "burst"):
            request = Request(number, 0, now_s, now_s + SLOS_S[what])
            waiting[number] = request
            kept.push(request)
        elif kind == "cancel" and what in waiting:
            assert kept.remove(waiting.pop(what))
        found = policy.candidate(kept, profile, now_s, now_s)
        for request in kept.take_given_up():
            assert now_s + profile.latency_s(1) > request.deadline_s - SLACK_S
            del waiting[request.number]
        fresh = RequestQueue()
        for request in waiting.values():
            fresh.push(request)
        assert policy.candidate(fresh, profile, now_s, now_s) == found
        assert not fresh.take_given_up()
        assert len(kept) == len(waiting)
