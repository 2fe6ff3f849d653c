"""Moves that wait for a copy of KV state: whose, from where to where, with the credit they take. Pure.

`looping` begins one when a session is to leave a worker for another of the same node, and moves the
session when the copy is there, or by replay when it cannot be, or is late. Meanwhile the session
runs where it is, and counts where it goes.

A worker copies one session at a time. Its copies go through the ring that its activations need, and a ring
that is full stops it: if half of a worker's sessions left at once for a replica that is new, all of its
sessions would stand still until the last copy is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystage.router.fleet import Fleet
from keystage.router.paths import is_copied
from keystage.router.sessions import Handing, Session
from keystage.wire import api

COPIED_TOKENS = 32
"""Sessions shorter than that are replayed: it is one chunk of a wave, a copy takes two messages more."""

HANDING_S = 5.0
"""A copy that takes longer is not waited for; its worker would count as dead by then."""

DISTRUST_S = 60.0
"""A worker whose copy was late is asked for none for so long: its sessions are replayed, not one in 5 s."""


class Handings:
    """The copies under way.

    Args:
        fleet: the workers.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._sessions: dict[int, Session] = {}
        self._later: dict[int, set[str]] = {}
        self._distrusted: dict[str, float] = {}

    def begin(
        self, session: Session, before: Sequence[str], addresses: tuple[str, ...], stage: int, now_s: float
    ) -> list[tuple[str, api.Hand]] | None:
        """Has a session's KV state of a stage copied, where that is possible and worth it.

        Returns:
            Worker and message; nothing: later, when the worker's copy under way has ended (`due`); None: it
            is to be replayed.
        """
        source, target = before[stage], addresses[stage]
        if len(session.tokens) < COPIED_TOKENS or not is_copied(self._fleet, before, stage, target):
            return None
        if now_s < self._distrusted.get(source, now_s):
            return None
        if source in self._sources():
            self._later.setdefault(stage, set()).add(source)
            return []
        session.handing = Handing(addresses, source, target, now_s)
        self._sessions[session.number] = session
        self._fleet.hold([target], session.held_kv)
        return [(source, api.Hand(session.number, session.epoch, stage, target, session.most_kv))]

    def due(self) -> list[int]:
        """Stages whose moves waited for a worker that copies nothing any more; each is told once."""
        busy = self._sources() if self._later else set()
        stages = [stage for stage, sources in self._later.items() if sources - busy]
        for stage in stages:
            del self._later[stage]
        return stages

    def _sources(self) -> set[str]:
        return {s.handing.source for s in self._sessions.values() if s.handing}

    def end(self, session: Session) -> str | None:
        """The copy has come, or is not wanted any more; returns the worker it was for, if there was one."""
        handing, session.handing = session.handing, None
        if handing is None:
            return None
        del self._sessions[session.number]
        self._fleet.give_back([handing.target], session.held_kv)
        return handing.target

    def answered(self, sender: str, message: api.Handed) -> tuple[Session, Handing] | None:
        """The session that a `Handed` is about; None when nobody waits for it any more."""
        session = self._sessions.get(message.session)
        handing = session.handing if session is not None else None
        if session is None or handing is None or session.epoch != message.epoch:
            return None
        return (session, handing) if sender in (handing.target, handing.source) else None

    def to(self, address: str) -> list[tuple[Session, Handing]]:
        """Copies that a worker was to get."""
        return [(s, s.handing) for s in self._sessions.values() if s.handing and s.handing.target == address]

    def late(self, now_s: float) -> list[tuple[Session, Handing]]:
        """Copies that take too long; their workers are asked for none for a while."""
        late = [
            (s, s.handing)
            for s in self._sessions.values()
            if s.handing and now_s - s.handing.since_s >= HANDING_S
        ]
        living = self._fleet.workers
        kept = {a: until_s for a, until_s in self._distrusted.items() if a in living and now_s < until_s}
        self._distrusted = kept | {handing.source: now_s + DISTRUST_S for _, handing in late}
        return late
