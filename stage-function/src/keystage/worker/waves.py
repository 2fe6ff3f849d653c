"""Waves: which sessions of a path step together. Pure; lives in the path's owner (stage 0).

The engine feeds it `start`, `returned`, `drop`; it answers `form` with the next wave, if the path
may have one in flight. Later stages run a wave as received, so this is the only place where
batches of a looping pipeline are made.

A session is ready when it has known tokens that were not sent yet: one for a decode step, many for
a prefill. Prefill chunks of one session may follow each other around the ring without waiting,
because a path keeps order.
"""

from __future__ import annotations

import dataclasses
import math

from keystage.wire.api import SessionSpec, StepRows

MIN_CHUNK_TOKENS = 16
"""A prefill chunk shorter than this wastes a pass over the weights; it waits unless it is the rest."""


@dataclasses.dataclass(slots=True)
class _Session:
    spec: SessionSpec
    tokens: list[int]
    sent: int = 0

    @property
    def is_finished(self) -> bool:
        spec = self.spec
        generated = len(self.tokens) - spec.prompt_len
        return generated >= spec.max_tokens or (generated > 0 and self.tokens[-1] in spec.eos)

    @property
    def reservation(self) -> int:
        return self.spec.prompt_len + self.spec.max_tokens


@dataclasses.dataclass(slots=True)
class _Path:
    bound: int
    next_wave: int = 0
    in_flight: int = 0
    order: dict[int, None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Wave:
    """One wave to run.

    Attributes:
        path: path identifier.
        wave: number within the path.
        rows: who steps.
        ids: token ids of all rows, flattened, sum(rows.counts) of them.
        prefill_rows: rows with more than one token or an opening.
    """

    path: int
    wave: int
    rows: StepRows
    ids: list[int]
    prefill_rows: int


class WaveFormer:
    """Sessions and paths owned by this worker.

    Args:
        budget_tokens: tokens of one wave: decode rows plus prefill chunks.
        max_rows: sessions of one wave at most.
    """

    def __init__(self, budget_tokens: int, max_rows: int) -> None:
        self.budget_tokens = budget_tokens
        self.max_rows = max_rows
        self._paths: dict[int, _Path] = {}
        self._sessions: dict[int, _Session] = {}

    @property
    def paths(self) -> list[int]:
        """Known paths."""
        return list(self._paths)

    def add_path(self, path: int, waves: int) -> None:
        """Learns of a path and how many waves it may have in flight."""
        if path not in self._paths:
            self._paths[path] = _Path(bound=max(1, waves))

    def remove_path(self, path: int) -> None:
        """Forgets a path with its waves; its sessions go on elsewhere or are gone."""
        gone = self._paths.pop(path, None)
        if gone is not None:
            for session in gone.order:
                self._sessions.pop(session, None)

    def start(self, spec: SessionSpec) -> bool:
        """Takes a session, or its continuation under a higher epoch; False when the epoch is old."""
        known = self._sessions.get(spec.session)
        if known is not None:
            if spec.epoch <= known.spec.epoch:
                return False
            self._unlink(known.spec)
        self._sessions[spec.session] = _Session(spec, list(spec.tokens))
        self._paths[spec.path].order[spec.session] = None
        return True

    def drop(self, session: int, epoch: int) -> None:
        """Forgets a session up to the given epoch."""
        known = self._sessions.get(session)
        if known is not None and known.spec.epoch <= epoch:
            self._unlink(known.spec)
            del self._sessions[session]

    def can_form(self) -> bool:
        """Whether any path may send a wave and has someone to put in."""
        return any(
            path.in_flight < path.bound and any(self._is_ready(s) for s in path.order)
            for path in self._paths.values()
        )

    def form(self, path_id: int) -> Wave | None:
        """The next wave of a path, or None when none may or can be formed.

        Rows are at most a fair share, ceil(active sessions / waves), so that the waves of a path
        fill evenly. Decode rows come first; what is left of the budget goes to prefill chunks.
        """
        path = self._paths[path_id]
        if path.in_flight >= path.bound:
            return None
        ready = [self._sessions[s] for s in path.order if self._is_ready(s)]
        if not ready:
            return None
        active = sum(not self._sessions[s].is_finished for s in path.order)
        share = min(self.max_rows, math.ceil(active / path.bound))
        decode = [s for s in ready if s.sent and len(s.tokens) - s.sent == 1]
        prefill = [s for s in ready if not (s.sent and len(s.tokens) - s.sent == 1)]
        if share == 1 and not (decode and decode[0] is ready[0]):
            # With one row a wave neither kind may always go first: who waited longest does.
            decode = []
        # A waiting prompt has a row at least, or a full set of decoding sessions would starve it.
        decode = decode[: min(share - bool(prefill and share > 1), self.budget_tokens)]
        chosen = [(session, 1) for session in decode]
        left = max(self.budget_tokens - len(chosen), MIN_CHUNK_TOKENS)
        for session in prefill[: max(share - len(chosen), 0 if chosen else 1)]:
            want = len(session.tokens) - session.sent
            if left <= 0 or (want > left and left < MIN_CHUNK_TOKENS):
                break
            chosen.append((session, min(want, left)))
            left -= min(want, left)
        return self._send(path_id, path, chosen)

    def returned(self, path_id: int, rows: StepRows, tokens: list[int]) -> list[int]:
        """A wave is back: appends sampled tokens; returns the sessions that are finished by them.

        Args:
            path_id: path of the wave; unknown paths are ignored.
            rows: rows of the wave.
            tokens: sampled token per row, -1 for none.
        """
        path = self._paths.get(path_id)
        if path is None:
            return []
        path.in_flight -= 1
        finished = []
        for i, token in enumerate(tokens):
            session = self._sessions.get(rows.sessions[i])
            if session is None or session.spec.epoch != rows.epochs[i] or token < 0:
                continue
            if len(session.tokens) != rows.positions[i] + rows.counts[i]:
                continue
            session.tokens.append(token)
            if session.is_finished:
                finished.append(session.spec.session)
        return finished

    def _send(self, path_id: int, path: _Path, chosen: list[tuple[_Session, int]]) -> Wave | None:
        if not chosen:
            return None
        ids: list[int] = []
        rows = StepRows([], [], [], [], [], [], [], [], [])
        prefill_rows = 0
        for session, count in chosen:
            spec, start = session.spec, session.sent
            ids.extend(session.tokens[start : start + count])
            session.sent = start + count
            rows.sessions.append(spec.session)
            rows.epochs.append(spec.epoch)
            rows.positions.append(start)
            rows.counts.append(count)
            rows.sample.append(session.sent == len(session.tokens))
            rows.opens.append(0 if start else session.reservation)
            rows.temperatures.append(spec.temperature)
            rows.top_ps.append(spec.top_p)
            rows.seeds.append(spec.seed)
            prefill_rows += count > 1 or start == 0
            # Whoever stepped goes to the end, so that a share smaller than the path rotates.
            del path.order[spec.session]
            path.order[spec.session] = None
        path.next_wave += 1
        path.in_flight += 1
        return Wave(path_id, path.next_wave, rows, ids, prefill_rows)

    def _is_ready(self, session: int) -> bool:
        known = self._sessions[session]
        return known.sent < len(known.tokens) and not known.is_finished

    def _unlink(self, spec: SessionSpec) -> None:
        path = self._paths.get(spec.path)
        if path is not None:
            path.order.pop(spec.session, None)
