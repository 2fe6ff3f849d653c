"""What must be remembered of functions behind a gateway that tells two numbers of each. Pure.

Before it: `replicas` and `availableReplicas` of every function, at every observation. After it:
`openfaas_view`. Such a gateway names no replicas and no times, so here the missing ones are counted and
timed: as many starts are on their way as replicas are missing, the oldest ends first. What was stated
lately counts as wanted until the gateway's cache had time to show it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from keystage.openfaas.types import FunctionStatus

SETTLE_S = 2.0
"""A stock gateway answers from a cache that follows the cluster within a fraction of a second."""
KEPT = 9
"""Start times kept per function; their median is used."""


@dataclasses.dataclass(frozen=True, slots=True)
class Starts:
    """Replicas of one function on their way.

    Attributes:
        available: ready replicas seen last.
        began_s: when each missing replica was first missed, oldest first (steady Unix seconds).
        took_s: seconds the last starts took, as seen from here.
    """

    available: int = 0
    began_s: tuple[float, ...] = ()
    took_s: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Stated:
    """A number that was stated, and when."""

    replicas: int
    at_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """All functions.

    Attributes:
        starts: by function.
        stated: what was stated last, by function.
    """

    starts: Mapping[str, Starts] = dataclasses.field(default_factory=dict)
    stated: Mapping[str, Stated] = dataclasses.field(default_factory=dict)


def state(memory: Memory, function: str, replicas: int, at_s: float) -> Memory:
    """A number was stated and taken."""
    return dataclasses.replace(memory, stated={**memory.stated, function: Stated(replicas, at_s)})


def wanted(memory: Memory, status: FunctionStatus, at_s: float) -> int:
    """Replicas wanted: as stated just now, else as the gateway tells."""
    stated = memory.stated.get(status.name)
    if stated is not None and 0 <= at_s - stated.at_s < SETTLE_S:
        return stated.replicas
    return status.replicas


def see(memory: Memory, statuses: Sequence[FunctionStatus], at_s: float) -> tuple[Memory, list[str]]:
    """Takes in what a gateway tells.

    Returns:
        The new memory, and one sentence for each function whose number somebody else changed.
    """
    starts, stated, said = {}, {}, []
    for status in statuses:
        before = memory.starts.get(status.name, Starts())
        starts[status.name] = _step(before, wanted(memory, status, at_s), status.availableReplicas, at_s)
        kept = memory.stated.get(status.name)
        if kept is None:
            continue
        if at_s - kept.at_s >= SETTLE_S and status.replicas != kept.replicas:
            said.append(
                f"function {status.name}: {kept.replicas} replicas were stated, the gateway has "
                f"{status.replicas} (a redeploy, its own alerts, a person, or a bound of its own)"
            )
        else:
            stated[status.name] = kept
    return Memory(starts, stated), said


def _step(before: Starts, replicas: int, available: int, at_s: float) -> Starts:
    missing = max(0, replicas - available)
    began, took = before.began_s, before.took_s
    arrived = min(len(began), max(0, available - before.available))
    took = (*took, *(at_s - start_s for start_s in began[:arrived]))[-KEPT:]
    began = began[arrived:]
    began = (*began, *[at_s] * (missing - len(began)))[:missing]  # too many: the youngest are given up
    return Starts(available, began, took)
