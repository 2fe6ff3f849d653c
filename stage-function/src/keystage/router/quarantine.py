"""Where suspects of a looping pipeline run: alone on a worker of each stage they are suspected at. Pure.

Beside `suspects`, which says who is one. Before it: `looping` puts a session that lost its worker here, not
into the queue. After it: `looping` binds what `next` returns, one session to a worker that has nothing else;
nobody is bound there until it is over. It is over when the session has got past the place where the worker
died; then it steps aside if another one waits, and goes on where it is if not.

At most half of a stage's workers (and one at least) are kept for suspects. As a worker that died is started
anew and comes empty, a suspect waits for one; after `PATIENCE_S` the least used one is cleared for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from keystage.router.fleet import Fleet, Worker
from keystage.router.sessions import Session
from keystage.router.suspects import Suspects

PATIENCE_S = 3.0
"""A replica that is forked anew is ready well within it; others are not disturbed for less."""
ALONE_S = 10.0
"""A suspect that has run alone for so long while its worker lives ended none by where it is."""
AHEAD_TOKENS = 4
"""A worker may have computed a little further than its router had heard when it died."""


class Quarantine:
    """Sessions that wait to run apart, and those that do.

    Args:
        fleet: the workers.
        suspects: who is to run apart.

    Attributes:
        waiting: in order of their arrival.
    """

    def __init__(self, fleet: Fleet, suspects: Suspects) -> None:
        self._fleet = fleet
        self._suspects = suspects
        self.waiting: list[Session] = []
        self._since_s: dict[int, float] = {}
        # Sessions that run apart: the workers that are kept for each, and since when.
        self._apart: dict[int, tuple[tuple[str, ...], float]] = {}

    def takes(self, session: Session, now_s: float) -> bool:
        """Whether a session is to run apart; then it waits here from now on."""
        self.release(session.number)
        if self._suspects.apart(session.number) is None:
            return False
        self.waiting.append(session)
        self.waiting.sort(key=lambda s: s.number)
        self._since_s[session.number] = now_s
        return True

    def next(self, known: Iterable[tuple[str, ...]], now_s: float) -> tuple[Session, tuple[str, ...]] | None:
        """A session that can run apart now, with its path; None: there is none."""
        if not self.waiting:
            return None
        paths = list(known)
        for session in self.waiting:
            kept = self._kept_for(session)
            if kept is None:
                continue
            path = self._fleet.choose_path(session.reservation, paths, session.most_kv, kept)
            if path is None:
                continue
            self._leave(session)
            for address in kept.values():
                self._fleet.workers[address].only = session.number
            self._apart[session.number] = tuple(kept.values()), now_s
            return session, path
        return None

    def overdue(self, now_s: float) -> list[str]:
        """Workers that are to be cleared of sessions, because suspects have waited for too long.

        They are kept for the first that waits: nobody else is bound to them.
        """
        cleared: list[str] = []
        for session in self.waiting[:1]:
            if now_s - self._since_s[session.number] < PATIENCE_S:
                continue
            for stage in sorted(self._stages(session)):
                ready = self._of_stage(stage)
                workers = [(a, w) for a, w in ready if not w.is_resting] or ready
                if not workers or any(w.only is not None for _, w in workers):
                    continue
                address, worker = min(workers, key=lambda entry: (entry[1].held_slots, entry[0]))
                worker.only = session.number
                if worker.held_slots:
                    cleared.append(address)
        return cleared

    def steps_aside(self, session: Session) -> bool:
        """Whether another suspect waits for a stage at which this one, just cleared, is in the way."""
        stages = {k for a in self._apart.get(session.number, ((), 0.0))[0] for k in self._hosted(a)}
        return any(stages & self._stages(other) for other in self.waiting)

    def is_alone(self, number: int) -> bool:
        """Whether a session runs apart."""
        return number in self._apart

    def outlasted(self, now_s: float) -> list[int]:
        """Sessions that have run alone for long, whose workers live: they are cleared."""
        over = [number for number, (_, since_s) in self._apart.items() if now_s - since_s >= ALONE_S]
        for number in over:
            self._suspects.clear(number)
        return over

    def withdraw(self, session: Session) -> bool:
        """A session ends; whether it waited here."""
        if session.number not in self._suspects and session.number not in self._apart:
            return False
        self.release(session.number)
        self._suspects.forget(session.number)
        return self._leave(session)

    def release(self, number: int) -> tuple[str, ...]:
        """Nobody is kept for a session any more; returns the workers that were."""
        if number not in self._suspects and number not in self._apart:
            return ()
        kept, _ = self._apart.pop(number, ((), 0.0))
        for worker in self._fleet.workers.values():
            if worker.only == number:
                worker.only = None
        return tuple(address for address in kept if address in self._fleet.workers)

    # ------------------------------------------------------------ inside

    def _leave(self, session: Session) -> bool:
        if self._since_s.pop(session.number, None) is None:
            return False
        self.waiting.remove(session)
        return True

    def _stages(self, session: Session) -> set[int]:
        found = self._suspects.apart(session.number)
        return found.stages if found is not None else set()

    def _hosted(self, address: str) -> tuple[int, ...]:
        worker = self._fleet.workers.get(address)
        return worker.hello.stages if worker is not None else ()

    def _of_stage(self, stage: int) -> list[tuple[str, Worker]]:
        return [(a, w) for a, w in self._fleet.of_stage(stage) if w.is_ready]

    def _kept_for(self, session: Session) -> dict[int, str] | None:
        """A worker without anything for each stage at which a session is suspected; None: one has none."""
        chosen: dict[int, str] = {}
        stages = self._stages(session)
        for stage in sorted(stages):
            workers = self._of_stage(stage)
            kept = sum(w.only not in (None, session.number) for _, w in workers)
            mine = [a for a, w in workers if a in chosen.values()]
            if not mine and kept >= max(1, len(workers) // 2):
                return None
            free = mine or [
                a
                for a, w in workers
                if not w.held_slots
                and w.only in (None, session.number)
                and w.has_room(session.reservation, session.most_kv)
            ]
            if not free:
                return None
            chosen[stage] = min(free, key=lambda a: (-len(stages & set(self._hosted(a))), a))
        return chosen
