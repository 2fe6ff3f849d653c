"""Waves over any set of sessions: every token is sent once and in order, within the bounds, and all end."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from keystage.wire.api import SessionSpec, Step
from keystage.worker.waves import MIN_CHUNK_TOKENS, Wave, WaveFormer

PATH = 7


def spec(session: int, prompt: int, max_tokens: int, epoch: int = 1) -> SessionSpec:
    return SessionSpec(session, epoch, PATH, list(range(prompt)), prompt, max_tokens, [], 0.0, 1.0, 0)


@given(
    sessions=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 6)), min_size=1, max_size=12),
    bound=st.integers(1, 4),
    budget=st.integers(16, 64),
    max_rows=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_every_token_is_sent_once_and_in_order(
    sessions: list[tuple[int, int]], bound: int, budget: int, max_rows: int, seed: int
) -> None:
    rng = random.Random(seed)
    former = WaveFormer(budget, max_rows)
    former.add_path(PATH, bound)
    known: dict[int, list[int]] = {}
    sent: dict[int, list[int]] = {}
    waiting = list(enumerate(sessions))
    flying: list[Wave] = []
    finished: set[int] = set()
    last_served: dict[int, int] = {}
    turn = 0
    while len(finished) < len(sessions):
        if waiting and (rng.random() < 0.3 or (not flying and not former.can_form())):
            number, (prompt, max_tokens) = waiting.pop()
            assert former.start(spec(number, prompt, max_tokens)) is None
            known[number], sent[number] = list(range(prompt)), []
            last_served[number] = turn
        can = former.can_form()
        wave = former.form(PATH) if rng.random() < 0.7 or not flying else None
        if wave is not None:
            turn += 1
            assert can
            flying.append(wave)
            assert len(flying) <= bound
            rows = wave.rows
            assert 1 <= len(rows.sessions) <= max_rows
            assert len(set(rows.sessions)) == len(rows.sessions)
            assert len(wave.ids) == sum(rows.counts) <= budget + MIN_CHUNK_TOKENS
            at = 0
            for session, position, count, sample, opens in zip(
                rows.sessions, rows.positions, rows.counts, rows.sample, rows.opens, strict=True
            ):
                assert position == len(sent[session])
                assert (opens > 0) == (position == 0)
                sent[session] += wave.ids[at : at + count]
                at += count
                assert sent[session] == known[session][: len(sent[session])]
                assert sample == (len(sent[session]) == len(known[session]))
                # Nobody waits longer than all others and their prompts take.
                assert turn - last_served[session] <= 40 * len(sessions)
                last_served[session] = turn
        elif flying:
            # A path keeps order: the oldest wave is back first.
            back = flying.pop(0)
            tokens = []
            for session, sample in zip(back.rows.sessions, back.rows.sample, strict=True):
                tokens.append(1000 + len(known[session]) if sample else -1)
                if sample:
                    known[session].append(tokens[-1])
            step = Step(PATH, back.wave, 0, "", [], [], "", back.rows, tokens, None)
            for session in former.returned(step):
                assert session not in finished
                finished.add(session)
                former.drop(session, 1)
        else:
            assert waiting, "sessions are unfinished and nothing can be formed"
    assert not former.can_form()
    for number, (prompt, max_tokens) in enumerate(sessions):
        assert len(known[number]) == prompt + max_tokens
        assert sent[number] == known[number][:-1]
