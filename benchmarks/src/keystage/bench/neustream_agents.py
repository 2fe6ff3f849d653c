"""A language model as a stream program of two modules, as `bench neustream` emulates it.

Prefill and decode with the product's code: `PartialSlo` on a `RequestQueue` for prefills, decode batches no
larger than the partial SLO allows on the module's SPUs. Driven by `neustream_language`.
"""

from __future__ import annotations

import collections
import dataclasses

from keystage.batching.partial_slo import PartialSlo
from keystage.batching.queue import RequestQueue
from keystage.bench.neustream_models import Language
from keystage.bench.neustream_sessions import BLOCK_TOKENS, Offer, Session, advance


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What Algorithm 2 and tuning gave an agent.

    Attributes:
        decode_s: partial SLO of a step.
        decode_slowdown: K / a of the decode module: no step takes longer than so many times its time alone.
        horizon_ratio: of the answer's expected length, so much may be counted on to make up for a late begin.
        mean_output: tokens that a session is expected to generate until there is experience.
    """

    decode_s: float
    decode_slowdown: float
    horizon_ratio: float
    mean_output: float


_OLD_RATIO = 0.95
"""Weight of the past in the mean slowdown of decode steps."""


class PartialSloAgent:
    """Prefill and decode as modules of a stream program.

    A prefill is begun only if its session has a place in the decode batch and, at the expected length, in the
    KV pool, and if it can still be in time at the speed that decode then has; one that cannot is refused. If
    lengths turn out otherwise and the pool is full, the youngest session is put back.
    """

    modules = 2

    def __init__(self, model: Language, share: Share) -> None:
        self._model = model
        self._share = share
        self._queue = RequestQueue()
        self._policy = PartialSlo()  # each request has a share of its own: prompts differ
        self._active: list[Session] = []
        self._prefilling: list[Session] = []
        self._again: collections.deque[Session] = collections.deque()
        self._refused: list[Session] = []
        self._outputs, self._ended = share.mean_output * 10, 10
        self._slowdown = 1.0
        self._formed_s = 0.0
        self._tokens = 0
        self.preempted = 0
        self.decisions = 0

    def enter(self, session: Session, now_s: float) -> None:
        """See `Agent`."""
        session.arrived_s = now_s
        # Its prefill must end by its objective, or by as much later as decode steps alone could make up.
        session.deadline_s = session.due_first_s + self._gain_s(session, 1)
        self._queue.push(session)

    def given_up(self) -> list[Session]:
        """See `Agent`."""
        refused, self._refused = self._refused, []
        return refused

    def offer(self, module: int, now_s: float) -> Offer | None:
        """See `Agent`."""
        return self._prefill(now_s) if module == 0 else self._decode(now_s)

    def done(self, offer: Offer, now_s: float) -> list[Session]:
        """See `Agent`."""
        if offer.is_prefill:
            mine = {session.number for session in offer.sessions}
            self._prefilling = [s for s in self._prefilling if s.number not in mine]
            self._active += offer.sessions
            self._tokens += sum(session.tokens for session in offer.sessions)
        else:
            slowdown = (now_s - self._formed_s) / offer.whole_s
            self._slowdown = _OLD_RATIO * self._slowdown + (1 - _OLD_RATIO) * slowdown
        self._tokens += len(offer.sessions)
        ended = advance(offer.sessions, now_s)
        if ended:
            self._tokens -= sum(session.tokens for session in ended)
            gone = {session.number for session in ended}
            self._active = [s for s in self._active if s.number not in gone]
            self._outputs += sum(s.output for s in ended)
            self._ended += len(ended)
        return ended

    def _gain_s(self, session: Session, sessions: int) -> float:
        """By how much the steps of a session may be faster than its objective, among so many."""
        mean = self._outputs / self._ended
        tokens = int(session.prompt + mean / 2)
        slowdown = min(self._slowdown, self._share.decode_slowdown) if sessions > 1 else 1.0
        step_s = slowdown * self._model.decode_time_s(tokens * sessions)
        allowed_s = session.token_scale * self._model.decode_time_s(tokens)
        return max(0.0, self._share.horizon_ratio * mean * (allowed_s - step_s))

    def _has_room(self, session: Session) -> bool:
        """Whether the pool is expected to hold all sessions till their ends with this one among them.

        Sessions of r tokens to go, most first: when the k-th ends, k sessions have grown by its r.
        """
        mean = int(self._outputs / self._ended)
        held = sorted(
            (-max(BLOCK_TOKENS, mean - s.made), s.tokens) for s in (*self._active, *self._prefilling, session)
        )
        tokens = 0
        for count, (negative, mine) in enumerate(held, start=1):
            tokens += mine
            if tokens - count * negative > self._model.kv_tokens:
                return False
        return True

    def _prefill(self, now_s: float) -> Offer | None:
        tokens = self._again[0].tokens if self._again else self._prompt_tokens()
        if not tokens:
            return None
        self.decisions += 1
        places = self._places()
        if self._again:
            if places < 1 or not self._has_room(self._again[0]):
                return None
            batch = [self._again.popleft()]
            self._prefilling += batch
        else:
            profile = self._model.prefill(tokens)
            self._give_up_late(now_s)
            candidate = self._policy.candidate(self._queue, profile, now_s, now_s)
            self._refuse()
            if candidate is None:
                return None
            batch = []
            while len(batch) < min(candidate.size, places):
                head = self._queue.head
                if not isinstance(head, Session) or not self._has_room(head):
                    break
                self._queue.pop_front(1)
                batch.append(head)
                self._prefilling.append(head)
            if not batch:
                return None
        return Offer(0, batch, self._model.prefill_time_s([s.tokens for s in batch]), True)

    def _give_up_late(self, now_s: float) -> None:
        """Those at the head that would be late at the speed decode has with them."""
        count = len(self._active) + len(self._prefilling) + 1
        while isinstance(head := self._queue.head, Session):
            ends_s = now_s + self._model.prefill_time_s([head.prompt])
            if ends_s <= head.due_first_s + self._gain_s(head, count):
                return
            self._queue.give_up(1)

    def _prompt_tokens(self) -> int:
        head = self._queue.head
        return head.prompt if isinstance(head, Session) else 0

    def _refuse(self) -> None:
        self._refused += [s for s in self._queue.take_given_up() if isinstance(s, Session)]

    def _places(self) -> int:
        """Places in the decode batch that are free."""
        held = [*self._active, *self._prefilling]
        mean = sum(s.tokens for s in held) / len(held) if held else self._outputs / self._ended
        allowed_s = self._share.decode_s / min(self._slowdown, self._share.decode_slowdown)
        return max(1, self._model.decode(mean).largest_batch(allowed_s)) - len(held)

    def _decode(self, now_s: float) -> Offer | None:
        while self._active and self._is_full():
            youngest = self._active.pop()
            self._tokens -= youngest.tokens
            self._again.appendleft(youngest)
            self.preempted += 1
        if not self._active:
            return None
        self.decisions += 1
        self._formed_s = now_s
        whole_s = self._model.decode_time_s(self._tokens)
        return Offer(1, list(self._active), whole_s, False)

    def _is_full(self) -> bool:
        held = (*self._active, *self._prefilling)
        most = self._tokens + sum(s.tokens for s in self._prefilling) + len(held) * BLOCK_TOKENS
        if most <= self._model.kv_tokens:
            return False
        return sum(s.blocks for s in held) * BLOCK_TOKENS > self._model.kv_tokens
