"""The ports of batch scheduling: requests in, batches and drops out. Pure.

A *scheduler* knows all models (in a pipeline: stages) and all replicas of a cluster. Whoever owns one (the
router live, `bench.batching_cluster` and the simulator in emulated time) tells it what happens and carries
out what it says; it reads no clock and keeps no timer of its own: `next_timer_s` says when it wants
`on_timer`. Times are seconds on one clock of the owner's.

A *batch policy* is the model side's rule: of what waits, which requests would make the next batch, when may
it start at the earliest and at the latest (Symphony, section 3.1).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import NamedTuple, Protocol, TypeAlias


class Request:
    """One request as schedulers see it; its owner may subclass it.

    Attributes:
        number: the owner's number, unique.
        model: index of its model.
        arrived_s: when it came, to this model's queue.
        deadline_s: when its batch must have ended.
    """

    __slots__ = ("arrived_s", "deadline_s", "model", "number")

    def __init__(self, number: int, model: int, arrived_s: float, deadline_s: float) -> None:
        self.number = number
        self.model = model
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s

    def __repr__(self) -> str:
        return f"Request({self.number}, {self.model}, {self.arrived_s:.6g}, {self.deadline_s:.6g})"


class Candidate(NamedTuple):
    """The next batch of a model as things stand.

    Attributes:
        size: requests in it, at least 1, from the front of the queue.
        start_s: when it may start at the earliest: Algorithm 1's exec.
        latest_s: when it must have started for its earliest deadline to hold.
        relaxed_s: when it may start at the earliest while replicas are plentiful; not above `start_s`: the
            same.
    """

    size: int
    start_s: float
    latest_s: float
    relaxed_s: float = -math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Delays:
    """Time from the scheduler's word to the start of the work, high percentiles (Symphony, appendix D).

    Attributes:
        control_s: d_ctrl, for each batch.
        data_s: d_data, for each request in it.
    """

    control_s: float = 0.0
    data_s: float = 0.0

    def of(self, batch: int) -> float:
        """Seconds for a batch of this size."""
        return self.control_s + self.data_s * batch


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatch:
    """Send these requests to a replica now.

    Attributes:
        model: whose they are.
        replica: to whom.
        requests: at least one, in queue order.
        start_s: when the replica is to start them: now, or when it is free.
    """

    model: int
    replica: int
    requests: list[Request]
    start_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """These requests cannot meet their deadlines any more, or would spoil the batch of those behind them.

    The owner refuses them (`late: refuse`) or gives them back with `demote`.
    """

    model: int
    requests: list[Request]


@dataclasses.dataclass(frozen=True, slots=True)
class Preempt:
    """Cancel what the replica runs: its requests are back in the scheduler's queue (Shepherd only)."""

    replica: int


Order: TypeAlias = Dispatch | Drop | Preempt


class Scheduler(Protocol):
    """Which requests run together, where and when."""

    def add_replica(self, replica: int, models: Collection[int], now_s: float) -> None:
        """A replica serves these models from now on and is free. Smaller numbers are preferred.

        Raises:
            ValueError: the number is in use, or a model does not exist.
        """

    def remove_replica(self, replica: int, now_s: float) -> None:
        """It is given nothing more; a batch it runs is the owner's business. Unknown ones are ignored."""

    def arrive(self, request: Request, now_s: float) -> None:
        """A request comes, or comes back after its replica was lost (it keeps its deadline)."""

    def demote(self, request: Request, now_s: float) -> None:
        """A dropped request waits on, behind all that can still be in time; it is never dropped again."""

    def cancel(self, request: Request, now_s: float) -> bool:
        """Its client went away. Returns whether it waited here (else it was dispatched or dropped)."""

    def finished(self, replica: int, now_s: float) -> None:
        """A replica has ended its batch and is free."""

    def queued(self, model: int) -> int:
        """Requests of a model that wait."""

    def next_timer_s(self) -> float:
        """When `on_timer` is to be called at the latest, `math.inf` for never."""

    def on_timer(self, now_s: float) -> None:
        """Time has passed."""

    def take(self) -> list[Order]:
        """What is to be carried out, in order; forgets it."""
