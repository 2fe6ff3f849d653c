"""Which sessions a worker holds, under which epoch, and how far their KV state reaches. Pure.

Every row of every wave passes `judge`, which finds what is stale; `release` leaves a tombstone so
that a late row cannot bring a session back, `drop` leaves none: the owner of the path may open a
preempted session again under the same epoch. Blocks are the executor's affair.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from enum import Enum

from keystage.models.blocks import BLOCK_TOKENS, blocks_for
from keystage.wire.api import StepRows

TOMBSTONES = 8192
"""Released sessions remembered: rows in flight are far fewer (slots x waves)."""


class Verdict(Enum):
    """What a row is.

    ADOPT goes on with the KV state of an earlier epoch; MISSING would, and there is none.
    """

    STALE = "stale"
    RUN = "run"
    OPEN = "open"
    ADOPT = "adopt"
    MISSING = "missing"


@dataclasses.dataclass(slots=True)
class Held:
    """A session held here.

    Attributes:
        epoch: path epoch.
        lengths: token positions in its KV state, by the stage at which a wave enters this worker: a
            path may leave a worker of several stages and come back to it.
        router: inbox address of the router that owns it.
    """

    epoch: int
    lengths: dict[int, int]
    router: str


class SessionTable:
    """Sessions by number."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self._released: OrderedDict[int, int] = OrderedDict()
        self._first: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def sessions(self) -> list[int]:
        """Numbers of the sessions held."""
        return list(self._held)

    def judge(self, rows: StepRows, row: int, router: str, stage: int) -> Verdict:
        """What a row of a wave is; changes nothing.

        Args:
            rows: the wave.
            row: index of the row.
            router: inbox address of the router that owns its path.
            stage: first stage that is to be run.
        """
        session, epoch = rows.sessions[row], rows.epochs[row]
        held = self._held.get(session)
        if epoch <= self._released.get(session, -1) or (held is not None and held.epoch > epoch):
            return Verdict.STALE
        if session < self._first.get(router, 0):
            return Verdict.STALE
        if held is None or held.epoch < epoch:
            return self._first_row(held, rows, row)
        if held.lengths.get(stage, 0) != rows.positions[row]:
            return Verdict.STALE
        return Verdict.RUN

    def _first_row(self, held: Held | None, rows: StepRows, row: int) -> Verdict:
        """What a row of an epoch is that is new here."""
        if not rows.opens[row]:
            return Verdict.STALE
        position = rows.positions[row]
        if not position:
            return Verdict.OPEN
        reaches = held is not None and min(held.lengths.values(), default=0) >= position
        return Verdict.ADOPT if reaches else Verdict.MISSING

    def adopt(self, session: int, epoch: int, position: int) -> None:
        """A session goes on under a higher epoch with what it has below `position`."""
        held = self._held[session]
        held.epoch = epoch
        held.lengths = dict.fromkeys(held.lengths, position)

    def place(self, session: int, epoch: int, router: str, stage: int, positions: int) -> bool:
        """A session's state came from another worker; False when nobody wants it here any more.

        Args:
            session: its number.
            epoch: epoch under which it was computed.
            router: inbox address of the router that owns it.
            stage: the stage; a wave will enter this worker there.
            positions: how far the state reaches.
        """
        if epoch <= self._released.get(session, -1) or session < self._first.get(router, 0):
            return False
        if session in self._held:
            return False
        self._held[session] = Held(epoch, {stage: positions}, router)
        return True

    def reach(self, session: int, epoch: int) -> int:
        """Positions that the state of a session reaches everywhere here, 0 when not held under `epoch`."""
        held = self._held.get(session)
        return min(held.lengths.values(), default=0) if held is not None and held.epoch == epoch else 0

    def open(self, session: int, epoch: int, router: str) -> None:
        """A session begins here, or begins anew under a higher epoch."""
        self._held[session] = Held(epoch, {}, router)

    def advance(self, rows: StepRows, row: int, stage: int) -> None:
        """The row is run: its session reaches further."""
        self._held[rows.sessions[row]].lengths[stage] = rows.positions[row] + rows.counts[row]

    def drop(self, session: int, epoch: int) -> bool:
        """Forgets a session held under `epoch` or a lower one; True when there is state to be freed."""
        held = self._held.get(session)
        if held is None or held.epoch > epoch:
            return False
        del self._held[session]
        return True

    def release(self, session: int, epoch: int) -> bool:
        """As `drop`, and rows of that epoch or lower ones are stale from now on."""
        self._released[session] = max(epoch, self._released.get(session, -1))
        self._released.move_to_end(session)
        if len(self._released) > TOMBSTONES:
            self._released.popitem(last=False)
        return self.drop(session, epoch)

    def void_below(self, router: str, first: int) -> None:
        """Sessions of a router numbered below `first` are of an earlier incarnation: never open them."""
        self._first[router] = first

    def positions(self, session: int) -> int:
        """KV positions in the blocks of a session, 0 when it is not held."""
        held = self._held.get(session)
        return BLOCK_TOKENS * blocks_for(max(held.lengths.values(), default=0)) if held is not None else 0

    def of_router(self, router: str) -> list[tuple[int, int]]:
        """(session, epoch) of all sessions a router owns."""
        return [(s, held.epoch) for s, held in self._held.items() if held.router == router]
