"""What a model's policy may know beyond its own queue: rate, replicas, its part of them. Pure.

(Loops here are written out: each is gone through at every event of a model, and mostly has one turn.) Kept
current by the scheduler (arrivals, load) and the rank side (replicas, batches under way); read by
policies that plan for the cluster (`deferred`). A model's *load* is the number of replicas that would be busy
with it if all its batches were of the staggered size. Replicas with equal sets of models make a `Pool`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

from keystage.batching.profile import LatencyProfile

SCARCE = 2
"""Replicas are plentiful while more than so many of a pool are idle; in small pools, more than one."""

SMALL_POOL = 4
"""Replicas of a small pool, at most."""

_Found = TypeVar("_Found")

_ALONE_RATIO = 0.02
"""Other models may have this much of a model's own load for it to have its replicas to itself."""


class Parts(NamedTuple):
    """How a model stands to the replicas that serve it, and to the others there.

    Attributes:
        replicas: that serve it.
        share: those of them that are its part, by loads.
        typical_share: those that are a model's part there, the mean over the load.
        scv: burstiness of all arrivals there, the mean over the load; 1 when nothing is known.
        utilisation: load over replicas; above 1 not even staggered batches keep up.
    """

    replicas: int
    share: float
    typical_share: float
    scv: float
    utilisation: float


class Pool:
    """Replicas that serve the same models.

    Attributes:
        replicas: how many.
        ends_s: of those that run something, by number, when they are to be free.
        load: of all its models, in replicas.
        squares: sum of their squares.
        bursts: sum of load x scv.
        typical_share: as in `Parts`, 0 when nothing is known.
        scv: as in `Parts`.
        changes: how often replicas came or went, or a load changed.
    """

    __slots__ = ("bursts", "changes", "ends_s", "load", "replicas", "scv", "squares", "typical_share")

    def __init__(self) -> None:
        self.replicas = 0
        self.changes = 0
        self.ends_s: dict[int, float] = {}
        self.load = self.squares = self.bursts = self.typical_share = 0.0
        self.scv = 1.0

    def resize(self, by: int) -> None:
        """So many more replicas are there, or fewer."""
        self.replicas += by
        self._set_means()

    def add(self, load: float, scv: float, sign: int = 1) -> None:
        """A model loads it from now on, or with a sign of -1 no more."""
        self.load = max(0.0, self.load + sign * load)
        self.squares = max(0.0, self.squares + sign * load * load)
        self.bursts = max(0.0, self.bursts + sign * load * scv)
        self._set_means()

    def _set_means(self) -> None:
        is_loaded = self.load > 0
        self.typical_share = self.replicas * self.squares / self.load**2 if is_loaded else 0.0
        self.scv = self.bursts / self.load if is_loaded else 1.0
        self.changes += 1

    @property
    def idle(self) -> int:
        """How many run nothing."""
        return self.replicas - len(self.ends_s)

    @property
    def is_plentiful(self) -> bool:
        """Whether so many are idle that a batch may take its time."""
        return self.replicas - len(self.ends_s) > (SCARCE if self.replicas > SMALL_POOL else 1)


class Surroundings:
    """One model's.

    Attributes:
        rate_rps: its arrival rate, 0 until it is known.
        scv: squared coefficient of variation of the gaps between its arrivals; 1 when they come at random.
        batches: of this model, under way.
        ends_s: sum of the times at which they are to end.
        service: l(b) on a replica, without the time it takes to get there.
        staggered: the batch of staggered execution (Symphony, equation 1), see `deferred`.
        is_granted: a replica is offered: what the policy says now is sent.
    """

    __slots__ = (
        "_derived",
        "_derived_at",
        "_load",
        "_pools",
        "batches",
        "ends_s",
        "is_granted",
        "rate_rps",
        "scv",
        "service",
        "staggered",
    )

    def __init__(self, service: LatencyProfile) -> None:
        self.service = service
        self.rate_rps = 0.0
        self.scv = 1.0
        self.batches = 0
        self.ends_s = 0.0
        self.staggered = 1
        self.is_granted = False
        self._load = 0.0
        self._pools: list[Pool] = []
        self._derived: Any = None
        self._derived_at = -1

    @property
    def replicas(self) -> int:
        """Those that serve the model."""
        replicas = 0
        for pool in self._pools:
            replicas += pool.replicas
        return replicas

    def join(self, pool: Pool) -> None:
        """The model is served by one pool more; its load is spread evenly."""
        self._put(self._load, self.scv, [*self._pools, pool])

    def leave(self, pool: Pool) -> None:
        """By one less."""
        self._put(self._load, self.scv, [other for other in self._pools if other is not pool])

    def set_service(self, service: LatencyProfile) -> None:
        """A replica serves it in other times from now on."""
        self.service = service
        self._derived_at = -1

    def set_load(self, load: float, scv: float) -> None:
        """The model would keep so many replicas busy, and its arrivals are so bursty."""
        self._put(load, scv, self._pools)

    def derived(self, find: Callable[[Surroundings], _Found]) -> _Found:
        """What a policy makes of replicas and loads, made anew only when they have changed.

        Args:
            find: makes it; always the same function.
        """
        changes = 0
        for pool in self._pools:
            changes += pool.changes
        if changes != self._derived_at:
            self._derived, self._derived_at = find(self), changes
        found: _Found = self._derived
        return found

    def parts(self) -> Parts:
        """How it stands to its replicas."""
        if len(self._pools) == 1:
            (pool,) = self._pools
            replicas, load = pool.replicas, pool.load
            share = replicas * self._load / load if load > 0 else 0.0
            return Parts(replicas, share, pool.typical_share, pool.scv, load / replicas if replicas else 0.0)
        replicas, share, typical_share, scv, load = 0, 0.0, 0.0, 0.0, 0.0
        for pool in self._pools:
            replicas += pool.replicas
            load += pool.load
            if pool.load > 0:
                share += pool.replicas * self._load / len(self._pools) / pool.load
            if pool.typical_share > typical_share:
                typical_share = pool.typical_share
            if pool.scv > scv:
                scv = pool.scv
        return Parts(
            replicas, share, typical_share, scv if self._pools else 1.0, load / replicas if replicas else 0.0
        )

    def ends_if_alone(self, most: int) -> Collection[float] | None:
        """When its busy replicas end; None when others load them, or there are more than so many."""
        if len(self._pools) != 1:
            return None
        (pool,) = self._pools
        if pool.replicas > most or pool.load > (1 + _ALONE_RATIO) * self._load:
            return None
        return pool.ends_s.values()

    def _put(self, load: float, scv: float, pools: list[Pool]) -> None:
        for pool in self._pools:
            pool.add(self._load / len(self._pools), self.scv, -1)
        self._load, self.scv, self._pools = load, scv, pools
        self._derived_at = -1
        for pool in pools:
            pool.add(load / len(pools), scv)
