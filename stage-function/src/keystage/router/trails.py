"""What happened to one traced request at the stages, noted as it happens. Pure; time comes in.

Before it: the cores note it, for requests that `router.traces` gave a trail; there are none while traces are
off, and a core looks no further than whether it has any. After it: `router.traces` makes spans of it.

What the router knows of a stage: when an item queued, was sent, and came back, and what compute the worker
counted. *Queue* is from queued to sent; *compute* the worker's own figure; *hand-off* what is left: the
message there, the fetch of the activation, the wait for the device, the message back. In a looping pipeline a
wave passes the stages without the router; the workers' own times come with its tokens (`Tokens.times`), and
are packed once for all sessions of the wave.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class _Worker(Protocol):
    """What is told of a worker (`fleet.Worker`)."""

    @property
    def ready_s(self) -> float: ...


class Visit(NamedTuple):
    """One batch that the request was in, at one stage or several that a worker runs as one.

    Attributes:
        stage: first stage.
        last: last stage.
        queued_s: when it began to wait.
        sent_s: when it was sent to the worker.
        done_s: when its answer came.
        compute_s: seconds of compute of the whole batch.
        worker: address of the worker.
        ready_s: when that worker became ready.
    """

    stage: int
    last: int
    queued_s: float
    sent_s: float
    done_s: float
    compute_s: float
    worker: str
    ready_s: float

    @property
    def handoff_s(self) -> float:
        """Seconds that were neither queue nor compute."""
        return max(0.0, self.done_s - self.sent_s - self.compute_s)

    @property
    def is_cold(self) -> bool:
        """Whether the worker became ready only while the request waited."""
        return self.ready_s > self.queued_s


class Binding(NamedTuple):
    """One path that a looping session had.

    Attributes:
        at_s: since when.
        addresses: its worker per stage.
        ready_s: when each became ready.
    """

    at_s: float
    addresses: tuple[str, ...]
    ready_s: tuple[float, ...]


@dataclasses.dataclass(slots=True)
class Trail:
    """One request's, from when it was admitted.

    Attributes:
        trace_id: the trace it belongs to.
        parent_id: the span it is under.
        begun_s: when it was admitted.
        visits: of single-pass pipelines and stream programs, in order of their ends.
        bindings: of looping ones.
        steps: of looping ones, a token each: see `packed`.
        moves: how often a looping one changed its path while it ran.
    """

    trace_id: bytes
    parent_id: bytes
    begun_s: float
    visits: list[Visit] = dataclasses.field(default_factory=list)
    bindings: list[Binding] = dataclasses.field(default_factory=list)
    steps: list[bytes] = dataclasses.field(default_factory=list)
    moves: int = 0

    def visited(
        self,
        stages: tuple[int, int],
        times_s: tuple[float, float, float, float],
        address: str,
        ready_s: float,
    ) -> None:
        """A batch with it came back.

        Args:
            stages: first and last.
            times_s: queued, sent, done, compute.
            address: the worker.
            ready_s: when that became ready.
        """
        self.visits.append(Visit(*stages, *times_s, address, ready_s))

    def bound(self, at_s: float, addresses: tuple[str, ...], workers: Mapping[str, _Worker]) -> None:
        """It has a path, of some of the workers."""
        self.bindings.append(Binding(at_s, addresses, tuple([workers[a].ready_s for a in addresses])))


def packed(at_s: float, times: Sequence[float] | None) -> bytes:
    """A step of a wave: when its tokens came, and per stage seconds of hand-off and compute, where told."""
    return array("d", (at_s, *times) if times else (at_s,)).tobytes()


def unpacked(step: bytes) -> array[float]:
    """What was packed, in that order."""
    return array("d", step)


SPREAD = ("total_s", "p50_s", "p95_s", "max_s")
"""What `spread` tells."""


def spread(values_s: Sequence[float]) -> tuple[float, float, float, float]:
    """Sum, median, 95th percentile (nearest rank) and longest of at least one value."""
    ordered = sorted(values_s)
    count = len(ordered)
    p95_s = ordered[min(count - 1, count * 95 // 100)]
    return sum(ordered), ordered[(count - 1) // 2], p95_s, ordered[-1]
