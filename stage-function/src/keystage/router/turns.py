"""A request of a stream program and its turns at modules. Pure.

`streams.flow` knows the way of one request; `program.ProgramCore` carries it out. A *turn* is one execution
of a module for one request: it waits in the module's queue, then runs at a worker.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import insort
from collections.abc import Iterator, Mapping

from keystage.batching.partial_slo import BudgetRequest
from keystage.router.fleet import Fleet
from keystage.router.trails import Trail
from keystage.streams.flow import RequestFlow, Work
from keystage.wire.api import StreamMessage


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A message between two modules.

    Attributes:
        message: what, and where it lies.
        allowed_s: sum of the partial SLOs of the modules on its way.
    """

    message: StreamMessage
    allowed_s: float = 0.0


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """A request.

    Attributes:
        number: router-unique.
        entry: its body as the entry's message, kept for replay.
        arrived_s: when it was admitted.
        deadline_s: when it is given up.
        due_s: when it should be answered, `math.inf` where nobody said.
        flow: its way, anew in each epoch.
        epoch: grows when it starts over.
        losses: failures suffered.
        is_alone: a batch failed with it: from now on its turns are batches of their own.
        turns: what waits or runs, by number.
        homes: by module the worker that has state of it, or is running it.
    """

    number: int
    entry: StreamMessage
    arrived_s: float
    deadline_s: float
    due_s: float
    flow: RequestFlow[Parcel]
    epoch: int = 0
    losses: int = 0
    is_alone: bool = False
    turns: dict[int, Turn] = dataclasses.field(default_factory=dict)
    homes: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps at the router."""
        return len(self.entry.body)

    def uses(self, address: str) -> bool:
        """Whether a worker has something of it: a turn, state, or tensors."""
        return (
            any(turn.worker == address for turn in self.turns.values())
            or address in self.homes.values()
            or any(parcel.message.producer == address for parcel in self.at_rest())
        )

    def too_late(self, now_s: float) -> str:
        """Why it is given up at its deadline."""
        taken_s = now_s - self.arrived_s
        return f"deadline of {self.deadline_s - self.arrived_s:.3g} s passed after {taken_s:.3g} s"

    def at_rest(self) -> Iterator[Parcel]:
        """Messages at rest: in turns that wait, and at joins."""
        for turn in self.turns.values():
            if turn.worker is None:
                yield from turn.parcels
        yield from self.flow.parked


class Turn(BudgetRequest):
    """One execution of a module for a request.

    Args:
        number: router-unique.
        call: whose.
        stage: the module.
        work: the same as the request's flow has it.
        deadline_s: when it should have ended, `math.inf` where nobody said.
        now_s: when it begins to wait.

    Attributes:
        share_s: what this visit may take of the request's objective, `math.inf` where nobody said.
        dispatched_s: when it was sent.
        worker: where it runs, None while it waits.
        is_late: its budget is spent: it waits behind those that can be in time.
    """

    __slots__ = ("call", "dispatched_s", "is_late", "work", "worker")

    def __init__(
        self, number: int, call: Call, stage: int, work: Work[Parcel], deadline_s: float, now_s: float
    ) -> None:
        super().__init__(number, stage, now_s, deadline_s, math.inf)
        self.call = call
        self.work = work
        self.dispatched_s = 0.0
        self.worker: str | None = None
        self.is_late = False

    @property
    def home(self) -> str | None:
        """The only worker that can run it, None: any."""
        return self.call.homes.get(self.model)

    @property
    def parcels(self) -> list[Parcel]:
        """Its inputs."""
        return [parcel for _, parcel in self.work.parts]

    @property
    def visits(self) -> int:
        """How often its request will still pass the module, this visit included; 0: not known."""
        return max(parcel.message.visits for parcel in self.parcels)

    @property
    def rounds(self) -> int:
        """How often its request has passed the module before."""
        return self.call.flow.executed[self.work.module]

    @property
    def has_begun(self) -> bool:
        """Whether its request has passed the module before."""
        return self.rounds > 0

    @property
    def allowed_s(self) -> float:
        """What its request may have taken until now, by the partial SLOs on its way."""
        return max(parcel.allowed_s for parcel in self.parcels)

    def note(self, trails: Mapping[int, Trail], fleet: Fleet, now_s: float, compute_s: float) -> None:
        """It has run; noted where its request is traced."""
        trail = trails.get(self.call.number)
        address = self.call.homes.get(self.model, "")
        worker = fleet.workers.get(address)
        if trail is not None:
            times_s = self.arrived_s, self.dispatched_s, now_s, compute_s
            trail.visited((self.model, self.model), times_s, address, worker.ready_s if worker else 0.0)

    def too_late(self, now_s: float) -> str:
        """Why its request is refused before its own deadline."""
        begun_s = self.call.arrived_s
        return (
            f"module {self.work.module} was to end within {self.deadline_s - begun_s:.3g} s of the request's "
            f"arrival and cannot any more: {now_s - begun_s:.3g} s have passed (KEYSTAGE_LATE=refuse)"
        )

    @property
    def order(self) -> tuple[bool, float, float, int]:
        """Place in its queue: by its deadline, then by when its request came; late ones last."""
        return self.is_late, self.deadline_s, self.call.arrived_s, self.number


class TurnQueue:
    """The turns that wait for one module, in their order."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns)

    def add(self, turn: Turn) -> None:
        """A turn begins to wait."""
        insort(self._turns, turn, key=_order)

    def remove(self, turn: Turn) -> None:
        """It waits no longer."""
        self._turns.remove(turn)

    def demote(self, turn: Turn) -> None:
        """It is late from now on."""
        self._turns.remove(turn)
        turn.is_late = True
        self.add(turn)


def _order(turn: Turn) -> tuple[bool, float, float, int]:
    return turn.order
