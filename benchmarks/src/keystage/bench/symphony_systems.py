"""The schedulers that Symphony's figures compare, made for given models.

Before it: models and their shares. After it: `batching_cluster.goodput` and `serve`, with a new one for every
run. Names and rivals are those of `batching_systems`; ours is made here too, since it alone reckons with a
network's delays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from keystage.batching.api import Delays, Scheduler
from keystage.batching.policies import Deferred
from keystage.batching.scheduler import CentralScheduler
from keystage.bench import batching_systems
from keystage.bench.batching_models import Model

Make: TypeAlias = Callable[[float], Scheduler]
"""A new scheduler without replicas, told the total rate (requests/s)."""

OURS = "deferred"
SYSTEMS = (OURS, "algorithm-1", "eager", "shepherd", "nexus", "clockwork")
"""In the order of the tables; `algorithm-1` is Symphony's as it is printed."""
RIVALS = SYSTEMS[2:]


def system(name: str, models: Sequence[Model], shares: Sequence[float], delays: Delays | None = None) -> Make:
    """Makes schedulers of this system for these models.

    Args:
        name: one of `SYSTEMS`.
        models: served.
        shares: of the requests, one a model.
        delays: only ours takes any.

    Raises:
        KeyError: there is no such system.
        ValueError: delays for another one.
    """
    if delays is None:
        return lambda rate_rps: batching_systems.make(name, models, shares, rate_rps)
    if name != OURS:
        raise ValueError(f"{name} reckons with no delays, {OURS} does")
    return lambda _: CentralScheduler([(model.profile, Deferred()) for model in models], delays)
