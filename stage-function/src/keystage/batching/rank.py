"""What is known of all models and replicas together: who waits, who is free, who gets whom. Pure.

Symphony's RankThread (section 4.2, appendix D): it sees each model's candidate, no request, and grants
replicas. Replicas with equal sets of models form a group with one tree of free times and one heap of the
models that wait for a replica. An event costs O(log M + log G) for each group of its model: heaps with lazy
deletion, entries being valid while they carry their model's present version.

Replicas are granted in two situations: a model's time comes and a replica is free in time, the one of the
smallest number then; or a replica gets free and models wait, the one of the most urgent batch then.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from keystage.batching.ahead import Ahead
from keystage.batching.api import Candidate, Delays
from keystage.batching.free_times import NEVER_S
from keystage.batching.group import IDLE_S, Group, Replica
from keystage.batching.profile import ROUNDING_S
from keystage.batching.surroundings import Surroundings


class Grant(NamedTuple):
    """A model may send its batch to a replica, if it still wants to.

    Attributes:
        model: which.
        replica: to whom; None: nothing is granted, the candidate has passed its latest time and must be
            computed anew.
        free_s: when the replica is free, `IDLE_S` when it is.
    """

    model: int
    replica: int | None
    free_s: float


class RankSide:
    """Candidates of all models, free times of all replicas.

    Args:
        arounds: of each model, numbered from 0; kept current here as far as replicas go.
        delays: from a word to the start of a batch.
    """

    def __init__(self, arounds: Sequence[Surroundings], delays: Delays) -> None:
        models = len(arounds)
        self._arounds = arounds
        self._ahead = Ahead(delays)
        self._candidates: list[Candidate | None] = [None] * models
        self._versions = [0] * models
        self._is_waiting = [False] * models
        self._groups_of: list[list[Group]] = [[] for _ in range(models)]
        self._groups: dict[frozenset[int], Group] = {}
        self._replicas: dict[int, Replica] = {}
        self._model_timers: list[tuple[float, int, int]] = []
        self._offered: list[Group] = []

    def add_replica(self, replica: int, models: Collection[int]) -> None:
        """A replica is there and free.

        Raises:
            ValueError: the number is in use, or a model does not exist, or there is none.
        """
        if replica in self._replicas:
            raise ValueError(f"replica {replica} is there already")
        served = frozenset(models)
        for model in served:
            if not 0 <= model < len(self._candidates):
                raise ValueError(f"model {model} of replica {replica} is none of {len(self._candidates)}")
        if not served:
            raise ValueError(f"replica {replica} serves no model")
        group = self._groups.get(served)
        if group is None:
            group = self._groups[served] = Group(served)
            for model in served:
                self._groups_of[model].append(group)
                self._arounds[model].join(group.pool)
                if self._is_waiting[model]:
                    self._wait(model, [group])
        self._replicas[replica] = Replica(group)
        group.pool.resize(1)
        group.free.add(replica)
        group.free.put(replica, IDLE_S)
        self._offer(group)

    def remove_replica(self, replica: int) -> None:
        """It is granted no more; unknown ones are ignored."""
        known = self._replicas.pop(replica, None)
        if known is None:
            return
        group = known.group
        group.free.discard(replica)
        group.pool.resize(-1)
        group.pool.ends_s.pop(replica, None)
        for model, end_s, _ in known.running:
            self._count(model, -1, -end_s)
        if not len(group.free):
            del self._groups[group.models]
            for model in group.models:
                self._groups_of[model].remove(group)
                self._arounds[model].leave(group.pool)

    def start(self, model: int, replica: int, start_s: float, takes_s: float) -> None:
        """A granted replica was given a batch; `start_s` lies ahead when it runs another until then."""
        known = self._replicas[replica]
        known.until_s = start_s + takes_s
        known.running.append((model, known.until_s, takes_s))
        self._count(model, 1, known.until_s)
        self._set_busy(replica, known)

    def finish(self, replica: int, now_s: float) -> int | None:
        """A replica has ended a batch; unknown ones, and those that run nothing, are ignored.

        Returns:
            The batch's model.
        """
        known = self._replicas.get(replica)
        if known is None or not known.running:
            return None
        model, end_s, _ = known.running.pop(0)
        self._count(model, -1, -end_s)
        if known.running:
            ahead, end_s, takes_s = known.running[0]
            # Not before it has arrived, which may be later than this end.
            known.until_s = max(end_s, now_s + takes_s)
            known.running[0] = (ahead, known.until_s, takes_s)
            self._count(ahead, 0, known.until_s - end_s)
            self._set_busy(replica, known)
        else:
            known.until_s = IDLE_S
            del known.group.pool.ends_s[replica]
            known.group.free.put(replica, IDLE_S)
        self._offer(known.group)
        return model

    def set_delays(self, delays: Delays) -> None:
        """The delays are others from now on."""
        self._ahead.set_delays(delays)
        for replica, known in self._replicas.items():
            if known.running:
                self._set_busy(replica, known)

    def idle(self, model: int) -> int:
        """Replicas of a model that run nothing."""
        return sum(group.pool.idle for group in self._groups_of[model])

    def _count(self, model: int, batches: int, ends_s: float) -> None:
        around = self._arounds[model]
        around.batches += batches
        # A sum of many times keeps their rounding; with nothing under way it is known.
        around.ends_s = around.ends_s + ends_s if around.batches else 0.0

    def _set_busy(self, replica: int, known: Replica) -> None:
        group = known.group
        group.pool.ends_s[replica] = known.until_s
        # Without delays the end itself is the event; one batch ahead of the running one is enough.
        if self._ahead.is_on and len(known.running) == 1:
            group.free.put(replica, known.until_s)
            self._ahead.expect_end(replica, known.until_s)
            self._wake(group)
        else:
            group.free.put(replica, NEVER_S)
        # What waits for replicas to be scarce may start now.
        if group.has_waiting and not group.pool.is_plentiful:
            self._offer(group)

    def inform(self, model: int, candidate: Candidate | None, now_s: float) -> None:
        """A model's candidate is another."""
        before = self._candidates[model]
        self._candidates[model] = candidate
        if candidate is None:
            self._versions[model] += 1
            self._is_waiting[model] = False
        elif not self._is_waiting[model]:
            self._versions[model] = version = self._versions[model] + 1
            heapq.heappush(self._model_timers, (candidate.start_s, model, version))
        elif candidate.start_s > now_s:
            self._versions[model] = version = self._versions[model] + 1
            self._is_waiting[model] = False
            heapq.heappush(self._model_timers, (candidate.start_s, model, version))
        elif before is None or before.latest_s != candidate.latest_s or before.size != candidate.size:
            self._versions[model] = version = self._versions[model] + 1
            self._wait(model, self._groups_of[model])
            if before is not None and (candidate.relaxed_s > -math.inf or before.relaxed_s > -math.inf):
                heapq.heappush(self._model_timers, (candidate.relaxed_s, model, version))

    def sent(self, model: int) -> None:
        """A model's batch is on its way: it waits no more; `inform` with the next candidate follows."""
        self._versions[model] += 1
        self._is_waiting[model] = False
        self._candidates[model] = None

    def contend(self, model: int, now_s: float) -> None:
        """A model that may start by now takes part in what is offered just now, not only after it."""
        candidate = self._candidates[model]
        if candidate is None or self._is_waiting[model] or candidate.start_s > now_s or not self._offered:
            return
        self._begin_waiting(model, candidate, now_s)

    def next_grant(self, now_s: float) -> Grant | None:
        """Who gets whom, one at a time; None when nothing is to be done now.

        The caller carries it out, or informs of another candidate, before it asks again.
        """
        if self._ahead.is_on:
            for group in self._ahead.due(self._replicas, now_s):
                self._offer(group)
        while self._offered:
            group = self._offered[-1]
            grant = self._most_urgent(group, now_s)
            if grant is not None:
                return grant
            group.is_offered = False
            self._offered.pop()
            self._wake(group, now_s)
        timers = self._model_timers
        while timers and timers[0][0] <= now_s:
            _, model, version = heapq.heappop(timers)
            if version != self._versions[model]:
                continue
            candidate = self._candidates[model]
            assert candidate is not None
            grant = self._first_free(model, candidate, now_s)
            if grant is not None:
                return grant
            if not self._is_waiting[model]:
                self._begin_waiting(model, candidate, now_s)
        return None

    def next_timer_s(self) -> float:
        """When `next_grant` has something to do at the latest."""
        timers, versions = self._model_timers, self._versions
        while timers and timers[0][2] != versions[timers[0][1]]:
            heapq.heappop(timers)
        next_s = timers[0][0] if timers else math.inf
        return min(next_s, self._ahead.next_timer_s()) if self._ahead.is_on else next_s

    def _first_free(self, model: int, candidate: Candidate, now_s: float) -> Grant | None:
        if candidate.relaxed_s > now_s and self._has_plenty(model):
            return None
        by_s = now_s + self._ahead.delays.of(candidate.size) if self._ahead.is_on else now_s
        best: int | None = None
        free_s = IDLE_S
        for group in self._groups_of[model]:
            replica = group.free.first(by_s)
            if replica is not None and (best is None or replica < best):
                best, free_s = replica, group.free.of(replica)
        return None if best is None else Grant(model, best, free_s)

    def _has_plenty(self, model: int) -> bool:
        # Written out: it is asked at every event of a model, which mostly has one group.
        for group in self._groups_of[model]:  # noqa: SIM110
            if group.pool.is_plentiful:
                return True
        return False

    def _most_urgent(self, group: Group, now_s: float) -> Grant | None:
        model = group.most_urgent(self._versions)
        if model is None:
            return None
        candidate = self._candidates[model]
        assert candidate is not None
        grant = self._first_free(model, candidate, now_s)
        if grant is not None and candidate.latest_s < now_s - ROUNDING_S:
            return Grant(model, None, grant.free_s)
        return grant

    def _begin_waiting(self, model: int, candidate: Candidate, now_s: float) -> None:
        self._is_waiting[model] = True
        self._wait(model, self._groups_of[model])
        if candidate.relaxed_s > now_s:
            heapq.heappush(self._model_timers, (candidate.relaxed_s, model, self._versions[model]))

    def _wait(self, model: int, groups: Sequence[Group]) -> None:
        candidate = self._candidates[model]
        assert candidate is not None
        for group in groups:
            group.wait(model, candidate.latest_s, candidate.size, self._versions)
            if self._ahead.is_on:
                self._wake(group)

    def _wake(self, group: Group, after_s: float = -math.inf) -> None:
        """With delays, who waits wakes up when a batch can be sent ahead."""
        if not self._ahead.is_on:
            return
        urgent = group.most_urgent(self._versions)
        candidate = None if urgent is None else self._candidates[urgent]
        if candidate is not None:
            self._ahead.wake(group, candidate.size, after_s)

    def _offer(self, group: Group) -> None:
        if group.has_waiting and not group.is_offered:
            group.is_offered = True
            self._offered.append(group)
