"""What happened to one traced request at the stages, noted as it happens. Pure; time comes in.

Before it: the cores note it, for requests that `router.traces` gave a trail; there are none while traces are
off, and a core looks no further than whether it has any. After it: `router.traces` makes spans of it.

What the router knows of a stage: when an item queued, was sent, and came back, and what compute the worker
counted. *Queue* is from queued to sent; *compute* the worker's own figure; *hand-off* what is left: the
message there, the fetch of the activation, the wait for the device, the message back. In a looping pipeline a
wave passes the stages without the router; the workers' own times come with its tokens (`Tokens.times`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol


class _Worker(Protocol):
    """What is told of a worker (`fleet.Worker`)."""

    @property
    def ready_s(self) -> float: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
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


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
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
        number: its number at the router, 0 until it is known.
        visits: of single-pass pipelines and stream programs, in order of their ends.
        bindings: of looping ones.
        steps: of looping ones: when a token came, and the workers' times: per stage hand-off, compute.
        moves: how often a looping one changed its path while it ran.
    """

    trace_id: bytes
    parent_id: bytes
    begun_s: float
    number: int = 0
    visits: list[Visit] = dataclasses.field(default_factory=list)
    bindings: list[Binding] = dataclasses.field(default_factory=list)
    steps: list[tuple[float, Sequence[float]]] = dataclasses.field(default_factory=list)
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

    def bound(self, at_s: float, addresses: tuple[str, ...], workers: Iterable[_Worker]) -> None:
        """It has a path."""
        self.bindings.append(Binding(at_s, addresses, tuple(worker.ready_s for worker in workers)))

    def stepped(self, at_s: float, times: Sequence[float] | None) -> None:
        """A token came."""
        self.steps.append((at_s, times or ()))


SPREAD = ("total_s", "p50_s", "p95_s", "max_s")
"""What `spread` tells."""


def spread(values_s: Sequence[float]) -> tuple[float, float, float, float]:
    """Sum, median, 95th percentile (nearest rank) and longest of at least one value."""
    ordered = sorted(values_s)
    count = len(ordered)
    p95_s = ordered[min(count - 1, count * 95 // 100)]
    return sum(ordered), ordered[(count - 1) // 2], p95_s, ordered[-1]
