"""A cluster with a clock of its own that checks everything a `Scheduler` orders."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from keystage.batching.api import Dispatch, Drop, Preempt, Request, Scheduler
from keystage.batching.profile import LatencyProfile

SLACK_S = 1e-6


class BatchingWorld:
    """Requests, replicas that take exactly l(b), and who is where.

    Attributes:
        waiting: requests that the scheduler holds, by number; `demoted` those of them that are.
        ended: how each request ended: served, late, dropped or cancelled.
    """

    def __init__(self, scheduler: Scheduler, profiles: Sequence[LatencyProfile]) -> None:
        self.scheduler = scheduler
        self.profiles = profiles
        self.now_s = 0.0
        self.hosts: dict[int, frozenset[int]] = {}
        self.running: dict[int, tuple[float, list[Request]]] = {}
        self.waiting: dict[int, Request] = {}
        self.demoted: set[int] = set()
        self.ended: dict[int, str] = {}
        self.late_is_refused = True

    def add(self, replica: int, models: Collection[int]) -> None:
        self.hosts[replica] = frozenset(models)
        self.scheduler.add_replica(replica, models, self.now_s)
        self.obey()

    def lose(self, replica: int) -> None:
        """A replica dies: what it ran comes back."""
        del self.hosts[replica]
        _, requests = self.running.pop(replica, (0.0, []))
        self.scheduler.remove_replica(replica, self.now_s)
        self.obey()
        for request in requests:
            if request.number in self.demoted:
                self.waiting[request.number] = request
                self.scheduler.demote(request, self.now_s)
                self.obey()
            else:
                self.arrive(request)

    def arrive(self, request: Request) -> None:
        self.waiting[request.number] = request
        self.scheduler.arrive(request, self.now_s)
        self.obey()

    def cancel(self, request: Request) -> None:
        found = self.scheduler.cancel(request, self.now_s)
        assert found == (request.number in self.waiting), request
        if found:
            del self.waiting[request.number]
            self.end(request, "cancelled")
        self.obey()

    def end(self, request: Request, how: str) -> None:
        assert request.number not in self.ended, f"{request} ended before: {self.ended[request.number]}"
        self.ended[request.number] = how

    def until(self, time_s: float) -> None:
        """Lets time pass: batches end, timers go off."""
        for _ in range(10_000):
            ends = [(end_s, replica) for replica, (end_s, _) in self.running.items()]
            first_s, replica = min(ends, default=(math.inf, -1))
            timer_s = self.scheduler.next_timer_s()
            next_s = min(first_s, timer_s)
            if next_s > time_s or next_s == math.inf:
                break
            self.now_s = max(self.now_s, next_s)
            if first_s <= timer_s:
                for request in self.running.pop(replica)[1]:
                    late = request.deadline_s + SLACK_S < self.now_s
                    assert not late or request.number in self.demoted, f"{request} ends at {self.now_s}"
                    self.end(request, "late" if late else "served")
                self.scheduler.finished(replica, self.now_s)
            else:
                self.scheduler.on_timer(self.now_s)
            self.obey()
        else:
            raise AssertionError(f"time stands still at {self.now_s}")
        self.now_s = max(self.now_s, time_s) if time_s < math.inf else self.now_s

    def obey(self) -> None:
        """Carries out what the scheduler orders and checks that it can be."""
        for _ in range(1_000):
            orders = self.scheduler.take()
            if not orders:
                break
            for order in orders:
                if isinstance(order, Dispatch):
                    self._dispatch(order)
                elif isinstance(order, Drop):
                    self._drop(order)
                else:
                    self._preempt(order)
        for model in range(len(self.profiles)):
            held = sum(request.model == model for request in self.waiting.values())
            assert self.scheduler.queued(model) == held, f"model {model} at {self.now_s}"

    def _dispatch(self, order: Dispatch) -> None:
        assert order.requests
        assert order.replica in self.hosts, f"{order.replica} is gone"
        assert order.model in self.hosts[order.replica], f"{order.replica} has no model {order.model}"
        assert order.replica not in self.running, f"{order.replica} is busy"
        profile = self.profiles[order.model]
        assert len(order.requests) <= profile.most
        assert order.start_s <= self.now_s + SLACK_S
        end_s = self.now_s + profile.latency_s(len(order.requests))
        for request in order.requests:
            assert self.waiting.pop(request.number) is request
            assert request.model == order.model
            assert request.number in self.demoted or end_s <= request.deadline_s + SLACK_S, request
        self.running[order.replica] = (end_s, order.requests)

    def _drop(self, order: Drop) -> None:
        assert order.requests
        for request in order.requests:
            assert self.waiting.pop(request.number) is request
            assert request.model == order.model
            assert request.number not in self.demoted, f"{request} was demoted and is dropped"
            if self.late_is_refused:
                self.end(request, "dropped")
            else:
                self.demoted.add(request.number)
                self.waiting[request.number] = request
                self.scheduler.demote(request, self.now_s)

    def _preempt(self, order: Preempt) -> None:
        for request in self.running.pop(order.replica)[1]:
            self.waiting[request.number] = request
