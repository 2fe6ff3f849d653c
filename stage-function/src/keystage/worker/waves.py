"""Waves: which sessions of a path step together, and which hold KV blocks. Pure; lives in the path's owner.

The engine feeds it `start`, `returned`, `drop`; it answers `form` with the next wave, if the path
may have one in flight. Later stages run a wave as received, so this is the only place where batches
of a looping pipeline are made, and the only one where sessions are admitted, preempted and resumed.

A session is ready when it has known tokens that were not sent yet: one for a decode step, many for
a prefill. Prefill chunks of one session may follow each other around the ring without waiting,
because a path keeps order.

Who waits is admitted oldest first, nobody overtakes; who runs and needs a block that is not there
takes it from the youngest. So the oldest session of a path always goes on, and all end.
"""

from __future__ import annotations

import dataclasses
import math

from keystage.models.blocks import blocks_for
from keystage.wire import api
from keystage.wire.api import UNBOUNDED, SessionSpec, StepRows
from keystage.worker.owned import OwnedPath, OwnedSession
from keystage.worker.room import PROBE_S, PathRoom

MIN_CHUNK_TOKENS = 16
"""A prefill chunk shorter than this wastes a pass over the weights; it waits unless it is the rest."""

WATERMARK_RATIO = 0.25
"""Blocks per running session that admission leaves free: they take one each in 16 steps, so a quarter
lets everybody go on for four steps before anybody is preempted or somebody ends."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wave:
    """One wave to run; without rows it only frees blocks, and asks how many are free.

    Attributes:
        path: path identifier.
        wave: number within the path.
        rows: who steps.
        ids: token ids of all rows, flattened, sum(rows.counts) of them.
        prefill_rows: rows with more than one token or an opening.
        drops: sessions to be freed first.
        drop_epochs: epoch of each.
        claim: oldest session that waits for room, -1 for none.
        claim_blocks: KV blocks it waits for.
        is_timed: whether the times that it takes are wanted, for the trace of one of its sessions.
    """

    path: int
    wave: int
    rows: StepRows
    ids: list[int]
    prefill_rows: int
    drops: list[int]
    drop_epochs: list[int]
    claim: int
    claim_blocks: int
    is_timed: bool = False


@dataclasses.dataclass(slots=True)
class _Draft:
    """Rows chosen so far.

    Attributes:
        left: KV blocks that further rows may take.
        entering: sessions that may be admitted.
        rows: (session, tokens).
        taken: blocks the rows take.
        stalled: rows that found no blocks.
    """

    left: int
    entering: dict[int, OwnedSession]
    rows: list[tuple[OwnedSession, int]] = dataclasses.field(default_factory=list)
    taken: int = 0
    stalled: list[tuple[OwnedSession, int]] = dataclasses.field(default_factory=list)

    def add(self, session: OwnedSession, count: int) -> None:
        need = session.growth(count)
        self.rows.append((session, count))
        self.taken += need
        self.left -= need


class WaveFormer:
    """Sessions and paths owned by this worker.

    Args:
        budget_tokens: tokens of one wave: decode rows plus prefill chunks.
        max_rows: sessions of one wave at most.

    Attributes:
        preemptions: sessions preempted so far.
    """

    def __init__(self, budget_tokens: int, max_rows: int) -> None:
        self.budget_tokens = budget_tokens
        self.max_rows = max_rows
        self.preemptions = 0
        self._paths: dict[int, OwnedPath] = {}
        self._sessions: dict[int, OwnedSession] = {}
        self._timed: set[int] = set()

    @property
    def paths(self) -> list[int]:
        """Known paths."""
        return list(self._paths)

    @property
    def sessions(self) -> list[int]:
        """Known sessions, waiting, running or just finished."""
        return list(self._sessions)

    def input_of(self, session: int) -> bytes:
        """What the first stage works on beside a session's tokens; empty for none."""
        known = self._sessions.get(session)
        return known.spec.input if known is not None else b""

    def waiting(self, path: int) -> list[int]:
        """Sessions of a path that hold no KV blocks."""
        return list(self._paths[path].waiting)

    def add_path(self, path: int, waves: int, kv_blocks: int = UNBOUNDED) -> None:
        """Learns of a path, how many waves it may have in flight, and its workers' least KV blocks."""
        if path not in self._paths:
            self._paths[path] = OwnedPath(max(1, waves), PathRoom(kv_blocks))

    def remove_path(self, path: int) -> None:
        """Forgets a path with its waves; its sessions go on elsewhere or are gone."""
        gone = self._paths.pop(path, None)
        if gone is not None:
            for session in gone.order:
                self._sessions.pop(session, None)
                self._timed.discard(session)

    def start(self, spec: SessionSpec) -> str | None:
        """Takes a session, or its continuation under a higher epoch; one of an old epoch is ignored.

        Returns:
            Why the session can never run on its path, None when it can.
        """
        session = OwnedSession(spec, list(spec.tokens), is_replayed=len(spec.tokens) > spec.prompt_len)
        path = self._paths[spec.path]
        if blocks_for(session.most) > path.room.blocks:
            return (
                f"prompt + max_tokens is {session.most} positions, {blocks_for(session.most)} KV blocks; "
                f"a worker on path {spec.path} has {path.room.blocks}"
            )
        known = self._sessions.get(spec.session)
        if known is not None:
            if spec.epoch <= known.spec.epoch:
                return None
            known.is_leaving = known.is_leaving or spec.kept > 0
            self._unlink(known)
        self._sessions[spec.session] = session
        if spec.is_timed:
            self._timed.add(spec.session)
        if spec.kept:
            path.adopt(session)
        else:
            path.add(session)
        return None

    def leave(self, session: int, epoch: int) -> None:
        """A session is about to go on elsewhere with its KV state: it is not to be dropped on its path."""
        known = self._sessions.get(session)
        if known is not None and known.spec.epoch == epoch:
            known.is_leaving = True

    def drop(self, session: int, epoch: int) -> None:
        """Forgets a session up to the given epoch."""
        known = self._sessions.get(session)
        if known is not None and known.spec.epoch <= epoch:
            self._unlink(known)
            del self._sessions[session]
            self._timed.discard(session)

    def can_form(self, now_s: float = 0.0) -> bool:
        """Whether any path may send a wave and has someone to put in, or something to ask."""
        return any(
            path.in_flight < path.bound
            and path.retry_s <= now_s
            and (
                path.waiting
                or (path.has_claim and not path.flying)
                or any(session.is_ready for session in path.running.values())
            )
            for path in self._paths.values()
        )

    def wake_s(self, now_s: float) -> float:
        """When, after now, `can_form` may become true without anything happening; infinite for never."""
        later = (p.retry_s for p in self._paths.values() if p.waiting and p.retry_s > now_s)
        return min(later, default=math.inf)

    def form(self, path_id: int, now_s: float = 0.0) -> Wave | None:
        """The next wave of a path, or None when none may or can be formed.

        Args:
            path_id: the path.
            now_s: time, by which a path on which somebody waits asks for the free blocks again.
        """
        path = self._paths[path_id]
        if path.in_flight >= path.bound:
            return None
        entering, claim = self._entering(path)
        draft = self._choose(path, entering)
        if not draft.rows and draft.stalled and not path.in_flight:
            # Nothing of this path will free blocks. The oldest asks the stages for them; if there are
            # none it gives back its own, which is what another path may wait for.
            draft.add(*min(draft.stalled, key=lambda row: row[0].spec.session))
        asks = path.waiting and not path.in_flight
        if draft.rows or (asks and (path.drops or now_s >= path.room.told_s + PROBE_S)):
            return self._send(path_id, path, draft, claim)
        if path.has_claim and not path.waiting and not path.in_flight:
            return self._send(path_id, path, draft, claim)
        path.retry_s = path.room.told_s + PROBE_S if asks else math.inf
        return None

    def returned(self, step: api.Step, now_s: float = 0.0) -> list[int]:
        """A wave is back: appends sampled tokens; returns the sessions that are finished by them.

        Args:
            step: the wave; one of an unknown path, or that is back already, is ignored.
            now_s: time, as for `form`.
        """
        path = self._paths.get(step.path)
        sent = path.flying.pop(step.wave, None) if path is not None else None
        if path is None or sent is None:
            return []
        path.retry_s = 0.0
        path.room.told(step.wave, step.free_blocks, step.room_blocks, now_s)
        finished = self._append(path, step.rows, step.tokens)
        came, starved = set(step.rows.sessions), set(step.starved)
        for number, epoch in sent:
            session = self._sessions.get(number)
            if session is None or session.spec.epoch != epoch:
                continue
            session.flying -= 1
            if number in starved:
                path.starve(session)
            elif number not in came and not session.is_starved:
                session.is_void = True
            if session.is_starved and not session.flying:
                path.starved.remove(session)
                self._preempt(path, session)
        return finished

    # ------------------------------------------------------------ inside

    def _append(self, path: OwnedPath, rows: StepRows, tokens: list[int]) -> list[int]:
        finished = []
        for i, number in enumerate(rows.sessions):
            session = self._sessions.get(number)
            if session is None or session.spec.epoch != rows.epochs[i]:
                continue
            session.sure_blocks = max(session.sure_blocks, blocks_for(rows.held_after(i)))
            if i >= len(tokens) or tokens[i] < 0:
                continue
            if len(session.tokens) != rows.positions[i] + rows.counts[i]:
                continue
            session.tokens.append(tokens[i])
            if session.is_finished:
                path.finish(session)
                finished.append(number)
        return finished

    def _entering(self, path: OwnedPath) -> tuple[dict[int, OwnedSession], tuple[int, int]]:
        """Waiting sessions that there is room for, and (session, blocks) of the first there is none for.

        The oldest first, and nobody before one that is older: many small sessions could keep the
        blocks of a large one busy for ever.
        """
        entering: dict[int, OwnedSession] = {}
        if not path.waiting:
            return entering, (-1, 0)
        left = path.room.room + path.given - path.unfilled()
        active = len(path.running)
        for number in sorted(path.waiting):
            session = path.waiting[number]
            need = blocks_for(session.entry_positions)
            if need + math.ceil(WATERMARK_RATIO * active) > left:
                return entering, (number, need)
            left -= need
            active += 1
            entering[number] = session
        return entering, (-1, 0)

    def _choose(self, path: OwnedPath, entering: dict[int, OwnedSession]) -> _Draft:
        """The rows of the next wave.

        Rows are at most a fair share, ceil(active sessions / waves), so that the waves of a path
        fill evenly. Decode rows come first; what is left of the budget goes to prefill chunks.
        """
        draft = _Draft(path.room.free + path.given, entering)
        ready = [s for n, s in path.order.items() if (s.runs and s.is_ready) or n in entering]
        if not ready:
            return draft
        share = min(self.max_rows, math.ceil((len(path.running) + len(entering)) / path.bound))
        decode = [s for s in ready if s.is_decoding]
        prefill = [s for s in ready if not s.is_decoding]
        if share == 1 and not (decode and decode[0] is ready[0]):
            # With one row a wave neither kind may always go first: who waited longest does.
            decode = []
        # A waiting prompt has a row at least, or a full set of decoding sessions would starve it.
        most = min(share - bool(prefill and share > 1), self.budget_tokens)
        for session in decode:
            if len(draft.rows) >= most:
                break
            self._take(path, draft, session, 1)
        left = max(self.budget_tokens - len(draft.rows), MIN_CHUNK_TOKENS)
        for session in prefill[: max(share - len(draft.rows), 0 if draft.rows else 1)]:
            want = len(session.tokens) - session.sent
            if left <= 0 or (want > left and left < MIN_CHUNK_TOKENS):
                break
            count = session.chunk(left)
            if self._take(path, draft, session, count):
                left -= count
        return draft

    def _take(self, path: OwnedPath, draft: _Draft, session: OwnedSession, count: int) -> bool:
        """Adds a row if there are blocks for it, or a younger session to take them from."""
        number = session.spec.session
        if not session.runs and number not in draft.entering:
            return False  # preempted for a row before
        while session.growth(count) > draft.left:
            chosen = (row[0] for row in draft.rows)
            youngest = path.youngest(chosen, number) if session.runs else None
            if youngest is None:
                if session.runs:
                    draft.stalled.append((session, count))
                return False
            draft.left += youngest.sure_blocks
            self._preempt(path, youngest)
        if not session.runs:
            path.admit(session)
        draft.add(session, count)
        return True

    def _preempt(self, path: OwnedPath, session: OwnedSession) -> None:
        path.preempt(session)
        self.preemptions += 1

    def _send(self, path_id: int, path: OwnedPath, draft: _Draft, claim: tuple[int, int]) -> Wave:
        ids: list[int] = []
        rows = StepRows([], [], [], [], [], [], [], [], [])
        holds: list[int] = []
        prefill_rows = 0
        for session, count in draft.rows:
            spec, start = session.spec, session.sent
            holds.append(session.held_after(count))
            ids.extend(session.tokens[start : start + count])
            session.sent = start + count
            session.flying += 1
            session.blocks = max(session.blocks, blocks_for(holds[-1]))
            rows.sessions.append(spec.session)
            rows.epochs.append(spec.epoch)
            rows.positions.append(start)
            rows.counts.append(count)
            rows.sample.append(session.sent == len(session.tokens))
            rows.opens.append(session.most if session.is_adopted or not start else 0)
            session.is_adopted = False
            rows.temperatures.append(spec.temperature)
            rows.top_ps.append(spec.top_p)
            rows.seeds.append(spec.seed)
            prefill_rows += count > 1 or start == 0
            # Whoever stepped goes to the end, so that a share smaller than the path rotates.
            path.rotate(session)
        if any(hold > rows.positions[i] + rows.counts[i] for i, hold in enumerate(holds)):
            rows.holds.extend(holds)
        path.next_wave += 1
        path.flying[path.next_wave] = list(zip(rows.sessions, rows.epochs, strict=True))
        path.room.sent(path.next_wave, draft.taken - path.given)
        path.has_claim = claim[0] >= 0
        drops, path.drops, path.given = path.drops, [], 0
        return Wave(
            path_id, path.next_wave, rows, ids, prefill_rows,
            [session for session, _ in drops], [epoch for _, epoch in drops], *claim,
            bool(self._timed) and not self._timed.isdisjoint(rows.sessions),
        )  # fmt: skip

    def _unlink(self, session: OwnedSession) -> None:
        path = self._paths.get(session.spec.path)
        if path is not None:
            path.remove(session)
