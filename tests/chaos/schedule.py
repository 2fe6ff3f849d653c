"""Which faults come when. Pure: the same seed gives the same schedule.

Before it: how often each class is asked for. After it: `faults` carries them out, one after the other in this
order, each when its gap since the one before has passed and somebody is at work.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Literal

Deed = Literal["kill", "stop", "cut"]
SHORT_S = (0.2, 2.0)
LONG_S = (1.0, 8.0)
"""A process is silent for so long; one in three is silent for longer than heartbeats are waited for (5 s)."""
CUT_S = (0.5, 14.0)
"""Longer than ZeroMQ's own pings are waited for (10 s), too."""


@dataclasses.dataclass(frozen=True, slots=True)
class FaultClass:
    """A kind of fault.

    Attributes:
        name: as the report has it.
        deed: what is done.
        part: to whom: `worker`, `router`, `gateway`, ...; of a cut, which links: `workers`: nothing of
            another node reaches a worker, not from its router either, while what workers tell the router
            does; `nodes`: nothing passes at all.
        hold_s: least and most seconds until a stopped process goes on, a killed Redis is started, or a cut
            link is mended; (0, 0) where the system itself does that.
    """

    name: str
    deed: Deed
    part: str
    hold_s: tuple[float, float] = (0.0, 0.0)


CLASSES: tuple[FaultClass, ...] = (
    FaultClass("kill-worker", "kill", "worker"),
    FaultClass("stop-worker", "stop", "worker", LONG_S),
    FaultClass("kill-router", "kill", "router"),
    FaultClass("stop-router", "stop", "router", LONG_S),
    FaultClass("kill-gateway", "kill", "gateway"),
    FaultClass("stop-gateway", "stop", "gateway", LONG_S),
    FaultClass("kill-controller", "kill", "controller"),
    FaultClass("stop-controller", "stop", "controller", LONG_S),
    FaultClass("kill-keysmanager", "kill", "keysmanager"),
    FaultClass("stop-keysmanager", "stop", "keysmanager", LONG_S),
    FaultClass("kill-holder", "kill", "holder"),
    FaultClass("kill-forkserver", "kill", "forkserver"),
    FaultClass("kill-redis", "kill", "redis", SHORT_S),
    FaultClass("stop-redis", "stop", "redis", LONG_S),
    FaultClass("cut-workers", "cut", "workers", CUT_S),
    FaultClass("cut-nodes", "cut", "nodes", CUT_S),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault to come.

    Attributes:
        kind: name of its class.
        gap_s: seconds since the one before began.
        hold_s: see `FaultClass`.
        pick: in [0, 1), chooses the victim among those at work.
    """

    kind: str
    gap_s: float
    hold_s: float
    pick: float


def by_name(name: str) -> FaultClass:
    """The class of that name.

    Raises:
        KeyError: there is none.
    """
    for one in CLASSES:
        if one.name == name:
            return one
    raise KeyError(f"no class of faults {name!r}; there are {', '.join(names())}")


def names() -> list[str]:
    """All classes."""
    return [one.name for one in CLASSES]


def schedule(seed: int, kinds: Sequence[str], times: int, gap_s: float) -> list[Fault]:
    """Draws faults.

    Args:
        seed: of the run.
        kinds: classes.
        times: of each.
        gap_s: mean time from one to the next.
    """
    rng = random.Random(f"{seed} faults")
    order = [kind for kind in kinds for _ in range(times)]
    rng.shuffle(order)
    return [drawn(rng, kind, gap_s) for kind in order]


def drawn(rng: random.Random, kind: str, gap_s: float) -> Fault:
    """Draws one fault of a class."""
    low_s, high_s = by_name(kind).hold_s
    gap = gap_s * rng.uniform(0.5, 1.5)
    return Fault(kind, round(gap, 3), round(rng.uniform(low_s, high_s), 2), rng.random())


def missing(least: int, reached: Mapping[str, int], kinds: Sequence[str]) -> list[str]:
    """Classes that were reached in mid-request less often than asked, each as often as it is short."""
    return [kind for kind in kinds for _ in range(max(0, least - reached.get(kind, 0)))]
