"""A scheduler like Nexus's (Shen et al., SOSP 2019), for comparison. Pure.

As Symphony describes it (section 2.2): every 10 seconds a plan says which models, at which batch sizes, each
GPU runs (`nexus_plan`); a frontend routes every request to one of its model's GPUs at once; a GPU runs its
models in turn, each with at most its planned batch, and drops heads that would keep a batch smaller.

Choices of ours, all in its favour: there is one frontend, and it deals requests to GPUs evenly by their
planned rates instead of at random; the rates of the epoch just gone are known exactly, those of the first
beforehand; a new plan costs no loading and no pause, and requests that wait are routed anew by it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Sequence

from keystage.batching.api import Dispatch, Drop, Order, Request
from keystage.batching.rivals.line import SLACK_S, Line
from keystage.batching.rivals.nexus_backend import Backend
from keystage.batching.rivals.nexus_plan import Node, Session, plan

EPOCH_S = 10.0
_NOWHERE = -1


class NexusScheduler:
    """A `Scheduler` that plans by epochs and routes at arrival.

    Args:
        sessions: profile and SLO of each model.
        rates_rps: expected in the first epoch, None: all models alike.
        epoch_s: seconds from plan to plan.
        slo_share: see `nexus_plan.plan`.
        early_drop: a head that its planned batch, or all that follow, would make late is dropped; otherwise
            the batch is as large as the head allows.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        rates_rps: Sequence[float] | None = None,
        *,
        epoch_s: float = EPOCH_S,
        slo_share: float = 0.5,
        early_drop: bool = True,
    ) -> None:
        self._sessions = dict(enumerate(sessions))
        self._profiles = {model: session.profile for model, session in self._sessions.items()}
        self._rates_rps = dict(enumerate(rates_rps if rates_rps is not None else [1.0] * len(sessions)))
        self._epoch_s, self._slo_share, self._early_drop = epoch_s, slo_share, early_drop
        self._backends: dict[int, Backend] = {}
        # By model, a heap of (when it is this GPU's turn, replica, 1 / planned rate).
        self._routes: list[list[tuple[float, int, float]]] = [[] for _ in sessions]
        self._homeless = {model: Line(session.profile) for model, session in self._sessions.items()}
        self._came = dict.fromkeys(self._sessions, 0)
        self._epoch_began_s = math.inf
        self._is_planned = False
        self._timers: list[tuple[float, int, int]] = []
        self._orders: list[Order] = []

    def add_replica(self, replica: int, models: Collection[int], now_s: float) -> None:
        """See `Scheduler`; a plan is made when one is needed."""
        if replica in self._backends:
            raise ValueError(f"replica {replica} is there already")
        if unknown := [model for model in models if model not in self._sessions]:
            raise ValueError(
                f"replica {replica} is to serve {unknown}, models are 0..{len(self._sessions) - 1}"
            )
        self._backends[replica] = Backend(replica, frozenset(models))
        self._is_planned = False
        if any(len(line) for line in self._homeless.values()):
            self._plan(now_s)

    def remove_replica(self, replica: int, now_s: float) -> None:
        """See `Scheduler`; what was routed there is routed anew."""
        gone = self._backends.pop(replica, None)
        if gone is not None:
            self._plan(now_s, list(gone.lines.values()))

    def arrive(self, request: Request, now_s: float) -> None:
        """See `Scheduler`; the first of an epoch brings a new plan."""
        lasted_s = now_s - self._epoch_began_s
        if lasted_s >= self._epoch_s:
            self._rates_rps = {model: came / lasted_s for model, came in self._came.items()}
            self._is_planned = False
        if lasted_s >= self._epoch_s or self._epoch_began_s == math.inf:
            self._epoch_began_s = now_s
            self._came = dict.fromkeys(self._came, 0)
        self._came[request.model] += 1
        if not self._is_planned:
            self._plan(now_s)
        self._route(request, now_s)

    def demote(self, request: Request, now_s: float) -> None:
        """See `Scheduler`."""
        if not self._is_planned:
            self._plan(now_s)
        self._line(request.model)[1].queue.demote(request)
        self._run_idle(now_s)

    def cancel(self, request: Request, now_s: float) -> bool:
        """See `Scheduler`."""
        return any(line.queue.remove(request) for line in self._lines(request.model))

    def finished(self, replica: int, now_s: float) -> None:
        """See `Scheduler`."""
        backend = self._backends.get(replica)
        if backend is not None:
            backend.is_busy = False
            self._run(backend, now_s)

    def queued(self, model: int) -> int:
        """See `Scheduler`."""
        return sum(len(line) for line in self._lines(model))

    def next_timer_s(self) -> float:
        """See `Scheduler`: when a head could be lost. Plans need no timer."""
        return self._timers[0][0] if self._timers else math.inf

    def on_timer(self, now_s: float) -> None:
        """See `Scheduler`."""
        while self._timers and self._timers[0][0] <= now_s:
            _, replica, model = heapq.heappop(self._timers)
            line = self._line_at(replica, model)
            if line is not None:
                line.is_watched = False
                self._drop(line.expire(now_s))
                self._watch(replica, model, line)

    def take(self) -> list[Order]:
        """See `Scheduler`."""
        orders = self._orders
        if orders:
            self._orders = []
        return orders

    def _plan(self, now_s: float, orphans: Sequence[Line] = ()) -> None:
        """Plans for the rates of the last epoch and routes all that waits by it."""
        self._is_planned = True
        waiting = [*orphans, *self._homeless.values()]
        self._homeless = {model: Line(profile) for model, profile in self._profiles.items()}
        self._routes = [[] for _ in self._sessions]
        for backend, node in self._nodes():
            waiting += backend.adopt(node.parts, self._profiles)
            for model, part in node.parts.items():
                heapq.heappush(self._routes[model], (0.0, backend.number, 1 / max(part.rate_rps, 1e-9)))
        requests = [request for line in waiting for request in line.queue.pop_front(line.queue.in_time)]
        late = [request for line in waiting for request in line.queue.pop_front(len(line))]
        for request in sorted(requests, key=lambda request: (request.deadline_s, request.number)):
            self._route(request, now_s)
        for request in late:
            self._line(request.model)[1].queue.demote(request)
        self._run_idle(now_s)

    def _nodes(self) -> list[tuple[Backend, Node]]:
        """Each GPU's part; GPUs with the same models share a plan, a model's rate is split among them."""
        by_models: dict[frozenset[int], list[Backend]] = {}
        for backend in self._backends.values():
            by_models.setdefault(backend.hosted, []).append(backend)
        hosts = dict.fromkeys(self._sessions, 0)
        for models, backends in by_models.items():
            for model in models:
                hosts[model] += len(backends)
        nodes: list[tuple[Backend, Node]] = []
        for models, backends in by_models.items():
            rates = {model: self._rates_rps[model] * len(backends) / hosts[model] for model in models}
            chosen = {model: self._sessions[model] for model in sorted(models)}
            planned = plan(chosen, rates, len(backends), self._slo_share)
            idle = itertools.repeat(Node({}, math.inf, 0.0))
            nodes += zip(backends, itertools.chain(planned, idle), strict=False)
        return nodes

    def _route(self, request: Request, now_s: float) -> None:
        """To the GPU whose turn it is."""
        replica, line = self._line(request.model)
        line.queue.push(request)
        self._watch(replica, request.model, line)
        if replica != _NOWHERE:
            self._run(self._backends[replica], now_s)

    def _line(self, model: int) -> tuple[int, Line]:
        """Where the next request of a model goes: replica and line."""
        routes = self._routes[model]
        if not routes:
            return _NOWHERE, self._homeless[model]
        turn, replica, gap = routes[0]
        heapq.heapreplace(routes, (turn + gap, replica, gap))
        return replica, self._backends[replica].lines[model]

    def _line_at(self, replica: int, model: int) -> Line | None:
        if replica == _NOWHERE:
            return self._homeless[model]
        backend = self._backends.get(replica)
        return None if backend is None else backend.lines.get(model)

    def _lines(self, model: int) -> list[Line]:
        routed = (backend.lines.get(model) for backend in self._backends.values())
        return [self._homeless[model], *(line for line in routed if line is not None)]

    def _run_idle(self, now_s: float) -> None:
        for backend in self._backends.values():
            self._run(backend, now_s)

    def _run(self, backend: Backend, now_s: float) -> None:
        """Gives a GPU its next batch if it is idle and has one."""
        if backend.is_busy:
            return
        batch, dropped = backend.next_batch(now_s, early_drop=self._early_drop)
        self._drop(dropped)
        if batch:
            backend.is_busy = True
            self._orders.append(Dispatch(batch[0].model, backend.number, batch, now_s))

    def _drop(self, requests: Sequence[Request]) -> None:
        for model, gone in itertools.groupby(requests, key=lambda request: request.model):
            self._orders.append(Drop(model, list(gone)))

    def _watch(self, replica: int, model: int, line: Line) -> None:
        """Sets a timer for the head of a line, one at a time."""
        head = line.queue.head
        if head is not None and not line.is_watched:
            line.is_watched = True
            last_s = head.deadline_s - line.profile.latency_s(1)
            heapq.heappush(self._timers, (last_s + 2 * SLACK_S, replica, model))
