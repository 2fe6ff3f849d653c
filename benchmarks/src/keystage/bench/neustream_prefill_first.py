"""A prefill-first engine as `bench neustream` emulates it: like vLLM without chunked prefill.

Whatever waits is prefilled as soon as its prompt has room in the KV pool, all sessions decode together
otherwise, and when the pool is full the youngest session is put back and computed anew. Driven by
`neustream_language`.
"""

from __future__ import annotations

import collections

from keystage.bench.neustream_models import Language
from keystage.bench.neustream_sessions import BLOCK_TOKENS, Offer, Session, advance

_WATERMARK_RATIO = 0.01


class PrefillFirst:
    """Like vLLM: prefill whatever fits, decode otherwise, put back the youngest when the pool is full.

    Args:
        model: its times and its pool.
        most_sessions: how many run at a time (max_num_seqs, tuned).
        most_batched: tokens of a prefill at most (max_num_batched_tokens, tuned).
    """

    modules = 1

    def __init__(self, model: Language, most_sessions: int, most_batched: int) -> None:
        self._model = model
        self._most = most_sessions
        self._most_batched = most_batched
        self._blocks = model.kv_tokens // BLOCK_TOKENS
        self._kept = max(1, int(self._blocks * _WATERMARK_RATIO))
        self._free = self._blocks
        self._waiting: collections.deque[Session] = collections.deque()
        self._running: list[Session] = []
        self._held: dict[int, int] = {}
        self._tokens = 0
        self.preempted = 0

    def enter(self, session: Session, now_s: float) -> None:
        """See `Agent`."""
        self._waiting.append(session)

    def given_up(self) -> list[Session]:
        """See `Agent`: nobody is refused."""
        return []

    def offer(self, module: int, now_s: float) -> Offer | None:
        """See `Agent`."""
        batch: list[Session] = []
        tokens = 0
        while self._waiting and len(self._running) + len(batch) < self._most:
            session = self._waiting[0]
            if batch and tokens + session.tokens > self._most_batched:
                break
            if self._free - session.blocks < self._kept:
                break
            self._take(session)
            batch.append(self._waiting.popleft())
            tokens += session.tokens
        if batch:
            return Offer(0, batch, self._model.prefill_time_s([s.tokens for s in batch]), True)
        if not self._running:
            return None
        self._make_room()
        whole_s = self._model.decode_time_s(self._tokens)
        return Offer(0, list(self._running), whole_s, False)

    def done(self, offer: Offer, now_s: float) -> list[Session]:
        """See `Agent`."""
        if offer.is_prefill:
            self._running += offer.sessions
            self._tokens += sum(session.tokens for session in offer.sessions)
        self._tokens += len(offer.sessions)
        ended = advance(offer.sessions, now_s)
        for session in ended:
            self._free += self._held.pop(session.number)
            self._tokens -= session.tokens
        if ended:
            self._running = [s for s in self._running if s.number in self._held]
        return ended

    def _take(self, session: Session) -> None:
        more = session.blocks - self._held.get(session.number, 0)
        self._held[session.number] = session.blocks
        self._free -= more

    def _make_room(self) -> None:
        """A place for the next token of each, the oldest first; the youngest give theirs."""
        kept = 0
        while kept < len(self._running):
            session = self._running[kept]
            if session.tokens <= self._held[session.number] * BLOCK_TOKENS:
                kept += 1
                continue
            if self._free > 0:
                self._take(session)
                kept += 1
                continue
            youngest = self._running.pop()
            self._free += self._held.pop(youngest.number)
            self._tokens -= youngest.tokens
            self._waiting.appendleft(youngest)
            self.preempted += 1
