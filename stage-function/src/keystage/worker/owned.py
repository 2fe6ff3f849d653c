"""The sessions of a path as its owner keeps them, and which of them hold KV blocks. Pure.

A session *waits* (it holds no blocks: it is new, or was preempted) or *runs*. `waves` decides who
passes from one to the other; this module keeps the lists, the drops that the next wave has to carry,
and what a preempted session gives back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from keystage.models.blocks import BLOCK_TOKENS, blocks_for
from keystage.wire.api import SessionSpec
from keystage.worker.room import PathRoom


@dataclasses.dataclass(slots=True, eq=False)
class OwnedSession:
    """One session.

    Attributes:
        spec: as its router sent it.
        tokens: prompt and all tokens so far.
        sent: tokens whose KV state exists or is on its way.
        flying: its rows on their way.
        blocks: KV blocks it has, or will have when its rows have passed.
        sure_blocks: KV blocks that it is known to have at every stage.
        runs: whether it was admitted.
        is_replayed: whether it was preempted, or comes from another path with tokens generated there.
        is_starved: a stage had no blocks for it: it is preempted when its last row is back.
        is_void: a row of it vanished: its router moves or ends it.
        is_adopted: its next row is the first on this path, and goes on with KV state from another.
        is_leaving: it is about to: what it holds goes with it, or is freed by its router.
    """

    spec: SessionSpec
    tokens: list[int]
    sent: int = 0
    flying: int = 0
    blocks: int = 0
    sure_blocks: int = 0
    runs: bool = False
    is_replayed: bool = False
    is_starved: bool = False
    is_void: bool = False
    is_adopted: bool = False
    is_leaving: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether its last token ended it."""
        spec = self.spec
        generated = len(self.tokens) - spec.prompt_len
        return generated >= spec.max_tokens or (generated > 0 and self.tokens[-1] in spec.eos)

    @property
    def most(self) -> int:
        """Positions it can ever need."""
        return self.spec.prompt_len + self.spec.max_tokens

    @property
    def is_ready(self) -> bool:
        """Whether it may have a row in the next wave: it has known tokens that were not sent."""
        return (
            self.sent < len(self.tokens) and not self.is_finished and not self.is_starved and not self.is_void
        )

    @property
    def is_decoding(self) -> bool:
        """Whether its next row is one token behind others."""
        return self.sent > 0 and len(self.tokens) - self.sent == 1

    def chunk(self, room: int) -> int:
        """Tokens of its next row where the wave has room for so many.

        A front that is wanted whole goes in one row of its own, however long it is, and without what is
        known behind it: the opening row of a replay is that of the first run.
        """
        if self.spec.whole and not self.sent:
            return self.spec.whole
        return min(len(self.tokens) - self.sent, room)

    @property
    def entry_positions(self) -> int:
        """Positions for which there must be room before it is admitted.

        A new session's tokens. A replayed one's and one block more, so that each admission is
        worth new tokens and not just a replay.
        """
        known = len(self.tokens)
        return min(known + BLOCK_TOKENS, self.most) if self.is_replayed else known

    def held_after(self, count: int) -> int:
        """Positions that its next row, of so many tokens, needs blocks for.

        A replayed session takes all of `entry_positions` with its first row: two that were admitted to the
        same blocks by two owners would otherwise starve each other in the middle of their replays.
        """
        if self.is_replayed and not self.sent:
            return self.entry_positions
        return self.sent + count

    def growth(self, count: int) -> int:
        """Blocks that its next row, of so many tokens, takes."""
        return max(0, blocks_for(self.held_after(count)) - self.blocks)


@dataclasses.dataclass(slots=True)
class OwnedPath:
    """One path.

    Attributes:
        bound: waves that may be in flight.
        room: free blocks along it.
        next_wave: number of the last wave.
        flying: (session, epoch) of the rows of each wave in flight.
        order: its sessions; whoever stepped goes to the end.
        running: sessions that were admitted, unfinished.
        waiting: sessions that hold no blocks.
        starved: sessions to be preempted as soon as their rows are back.
        drops: (session, epoch) that the next wave frees.
        given: blocks that the sessions among them which were preempted give back.
        has_claim: the last wave said that somebody waits: when nobody does any more, one must say so.
        retry_s: nothing can be formed before that time, or before something happens.
    """

    bound: int
    room: PathRoom
    next_wave: int = 0
    flying: dict[int, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    order: dict[int, OwnedSession] = dataclasses.field(default_factory=dict)
    running: dict[int, OwnedSession] = dataclasses.field(default_factory=dict)
    waiting: dict[int, OwnedSession] = dataclasses.field(default_factory=dict)
    starved: list[OwnedSession] = dataclasses.field(default_factory=list)
    drops: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    given: int = 0
    has_claim: bool = False
    retry_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Waves on their way."""
        return len(self.flying)

    def add(self, session: OwnedSession) -> None:
        """A session comes, and waits."""
        number = session.spec.session
        self.order[number] = self.waiting[number] = session
        self.retry_s = 0.0

    def adopt(self, session: OwnedSession) -> None:
        """A session comes with KV state for its first `kept` tokens, and runs at once."""
        number, kept = session.spec.session, session.spec.kept
        self.order[number] = self.running[number] = session
        session.sent, session.runs, session.is_adopted = kept, True, True
        session.blocks = session.sure_blocks = blocks_for(kept)
        self.retry_s = 0.0

    def remove(self, session: OwnedSession) -> None:
        """A session leaves for good; the next wave frees its blocks."""
        self.finish(session)
        number = session.spec.session
        self.order.pop(number, None)
        self.waiting.pop(number, None)
        self.retry_s = 0.0

    def finish(self, session: OwnedSession) -> None:
        """A session needs its blocks no more; it is known until its router lets it go.

        They count as free when a wave has told so: its router frees them too, perhaps before.
        """
        if session.runs:
            session.runs = False
            if not session.is_leaving:
                self.drops.append((session.spec.session, session.spec.epoch))
            self.running.pop(session.spec.session, None)
            if session.is_starved:
                self.starved.remove(session)

    def admit(self, session: OwnedSession) -> None:
        """A waiting session takes its first blocks."""
        number = session.spec.session
        del self.waiting[number]
        self.running[number] = session
        session.runs = True

    def preempt(self, session: OwnedSession) -> None:
        """A running session without a row on its way gives all its blocks back, and waits."""
        assert not session.flying
        number = session.spec.session
        del self.running[number]
        self.waiting[number] = session
        self.drops.append((number, session.spec.epoch))
        self.given += session.sure_blocks
        session.runs, session.is_replayed, session.is_starved = False, True, False
        session.is_adopted = session.is_leaving = False
        session.sent = session.blocks = session.sure_blocks = 0
        self.rotate(session)

    def starve(self, session: OwnedSession) -> None:
        """A stage had no blocks for a row of a session."""
        if session.runs and not session.is_starved:
            session.is_starved = True
            self.starved.append(session)

    def rotate(self, session: OwnedSession) -> None:
        """Puts a session at the end of the order."""
        number = session.spec.session
        del self.order[number]
        self.order[number] = session

    def youngest(self, but: Iterable[OwnedSession], than: int) -> OwnedSession | None:
        """The running session that came last, after number `than`, and may be preempted now."""
        spared = set(but)
        candidates = (
            s for n, s in self.running.items() if n > than and not s.flying and s.is_ready and s not in spared
        )
        return max(candidates, key=lambda s: s.spec.session, default=None)

    def unfilled(self) -> int:
        """Blocks that prompts of running sessions still need."""
        return sum(
            max(0, blocks_for(len(s.tokens)) - s.blocks) for s in self.running.values() if not s.is_void
        )
