"""Which sessions a worker holds, under which epoch, and how far their KV state reaches. Pure.

Every row of every wave passes `admit`, which drops what is stale; `release` leaves a tombstone so
that a late row cannot bring a session back.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from keystage.wire.api import StepRows

TOMBSTONES = 8192
"""Released sessions remembered: rows in flight are far fewer (slots x waves)."""


@dataclasses.dataclass(slots=True)
class Held:
    """A session held here.

    Attributes:
        epoch: path epoch.
        lengths: token positions in its KV state, by the stage at which a wave enters this worker: a
            path may leave a worker of several stages and come back to it.
        reserved: token positions reserved.
        router: inbox address of the router that owns it.
    """

    epoch: int
    lengths: dict[int, int]
    reserved: int
    router: str


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """What `admit` decided.

    Attributes:
        keep: indices of rows to run.
        opened: (session, reserved tokens) whose state must be (re)opened first.
        refused: indices of rows that would exceed `kv_tokens`.
    """

    keep: list[int]
    opened: list[tuple[int, int]]
    refused: list[int]


class SessionTable:
    """Sessions by number.

    Args:
        kv_tokens: token positions the KV state holds in all.
    """

    def __init__(self, kv_tokens: int) -> None:
        self.kv_tokens = kv_tokens
        self.reserved = 0
        self._held: dict[int, Held] = {}
        self._released: OrderedDict[int, int] = OrderedDict()
        self._first: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, rows: StepRows, router: str, stage: int) -> Admission:
        """Checks every row and advances the lengths of those that run.

        Args:
            rows: the wave.
            router: inbox address of the router that owns its path.
            stage: first stage that is to be run.
        """
        keep: list[int] = []
        opened: list[tuple[int, int]] = []
        refused: list[int] = []
        first = self._first.get(router, 0)
        for i, session in enumerate(rows.sessions):
            epoch, position, opens = rows.epochs[i], rows.positions[i], rows.opens[i]
            held = self._held.get(session)
            if epoch <= self._released.get(session, -1) or (held is not None and held.epoch > epoch):
                continue
            if session < first:
                continue
            if opens and (held is None or held.epoch < epoch):
                before = held.reserved if held is not None else 0
                if self.reserved - before + opens > self.kv_tokens:
                    refused.append(i)
                    continue
                self.reserved += opens - before
                held = self._held[session] = Held(epoch, {}, opens, router)
                opened.append((session, opens))
            if held is None or held.epoch != epoch or held.lengths.get(stage, 0) != position:
                continue
            held.lengths[stage] = position + rows.counts[i]
            keep.append(i)
        return Admission(keep, opened, refused)

    def release(self, session: int, epoch: int) -> bool:
        """Forgets a session up to `epoch`; True when it was held and its state is to be freed."""
        self._released[session] = max(epoch, self._released.get(session, -1))
        self._released.move_to_end(session)
        if len(self._released) > TOMBSTONES:
            self._released.popitem(last=False)
        held = self._held.get(session)
        if held is None or held.epoch > epoch:
            return False
        self.reserved -= held.reserved
        del self._held[session]
        return True

    def void_below(self, router: str, first: int) -> None:
        """Sessions of a router numbered below `first` are of an earlier incarnation: never open them."""
        self._first[router] = first

    def reservation(self, session: int) -> int:
        """Reserved positions of a session, 0 when it is not held."""
        held = self._held.get(session)
        return held.reserved if held is not None else 0

    def of_router(self, router: str) -> list[tuple[int, int]]:
        """(session, epoch) of all sessions a router owns."""
        return [(s, held.epoch) for s, held in self._held.items() if held.router == router]


def select_rows(rows: StepRows, keep: list[int]) -> StepRows:
    """The rows at the given indices."""
    return StepRows(
        [rows.sessions[i] for i in keep],
        [rows.epochs[i] for i in keep],
        [rows.positions[i] for i in keep],
        [rows.counts[i] for i in keep],
        [rows.sample[i] for i in keep],
        [rows.opens[i] for i in keep],
        [rows.temperatures[i] for i in keep],
        [rows.top_ps[i] for i in keep],
        [rows.seeds[i] for i in keep],
    )
