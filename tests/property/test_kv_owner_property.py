"""An owner against stages with few KV blocks, of which strangers take some and give them back.

Waves pass real intakes one after another, as many on their way as the path allows; sessions are
cancelled at any moment, and their releases reach the stages late. No row runs without its blocks at
every stage, every token is computed once per life, all sessions end, and all blocks come back.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.models.blocks import BLOCK_TOKENS
from keystage.wire.api import SessionSpec, Step
from keystage.worker.claims import Claims
from keystage.worker.executor import EmulatedDevice, EmulatedExecutor, emulated_token
from keystage.worker.intake import Intake
from keystage.worker.rows import select_rows
from keystage.worker.sessions import SessionTable
from keystage.worker.waves import Wave, WaveFormer

PATH = 7
STRANGER = 1_000_000


@dataclasses.dataclass(slots=True)
class Stage:
    """One worker's stage: blocks, table, and the waves before it."""

    executor: EmulatedExecutor
    table: SessionTable
    intake: Intake
    waves: deque[Step] = dataclasses.field(default_factory=deque)
    releases: deque[int] = dataclasses.field(default_factory=deque)
    strangers: int = 0


class Ring:
    """A path of stages, its owner, and what its clients have."""

    def __init__(self, rng: random.Random, stages: int, blocks: int, bound: int) -> None:
        self.rng = rng
        self.blocks = blocks
        self.former = WaveFormer(32, rng.choice((1, 3, 8)))
        self.former.add_path(PATH, bound, blocks)
        self.names = [f"s{k}" for k in range(stages)]
        self.stages = [self._stage() for _ in range(stages)]
        self.back: deque[Step] = deque()
        self.got: dict[int, list[int]] = {}
        self.want: dict[int, tuple[int, int]] = {}
        self.now_s = 0.0

    def _stage(self) -> Stage:
        executor = EmulatedExecutor(EmulatedDevice(), 1, 8, 64, self.blocks)
        table = SessionTable()
        return Stage(executor, table, Intake("s", executor, table, Claims()))

    def start(self, number: int, prompt: int, max_tokens: int) -> None:
        spec = SessionSpec(number, 1, PATH, list(range(prompt)), prompt, max_tokens, [], 0.0, 1.0, 0)
        assert self.former.start(spec) is None
        self.got[number], self.want[number] = [], (prompt, max_tokens)

    def end(self, number: int) -> None:
        """The router lets a session go: the owner hears at once, the stages when they come to it."""
        self.want.pop(number, None)
        self.former.drop(number, 1)
        for stage in self.stages:
            stage.releases.append(number)

    def release(self, stage: Stage) -> None:
        number = stage.releases.popleft()
        if stage.table.release(number, 1):
            stage.executor.close(number)

    def stranger(self, stage: Stage) -> None:
        """Another path over this stage takes blocks, or ends and gives all it has back."""
        if stage.strangers and self.rng.random() < 0.5:
            stage.executor.close(STRANGER)
            stage.strangers = 0
        elif stage.executor.reserve(STRANGER, stage.strangers + 2 * BLOCK_TOKENS):
            stage.strangers += 2 * BLOCK_TOKENS

    def form(self) -> bool:
        if not self.former.can_form(self.now_s):
            return False
        wave = self.former.form(PATH, self.now_s)
        if wave is None:
            return False
        self.stages[0].waves.append(self._step(wave))
        return True

    def _step(self, wave: Wave) -> Step:
        return Step(
            PATH, wave.wave, 0, "r", self.names, self.names, "s0", wave.rows, [], None,
            wave.drops, wave.drop_epochs, claim=wave.claim, claim_blocks=wave.claim_blocks,
        )  # fmt: skip

    def run(self, k: int) -> None:
        """A stage runs the next wave and hands it on."""
        stage = self.stages[k]
        step = msgspec.structs.replace(stage.waves.popleft(), stage=k)
        taken = stage.intake.take(step, is_first_visit=True, has_input=True)
        assert not taken.failures
        rows = select_rows(step.rows, taken.keep)
        for i, session in enumerate(rows.sessions):
            held = len(stage.executor._pool.table(session)) * BLOCK_TOKENS
            assert held >= rows.positions[i] + rows.counts[i]
        step = msgspec.structs.replace(
            step,
            rows=rows,
            starved=[*step.starved, *(step.rows.sessions[i] for i in taken.starved)],
            free_blocks=min(step.free_blocks, taken.free_blocks),
            room_blocks=min(step.room_blocks, taken.room_blocks),
        )
        if k + 1 < len(self.stages):
            self.stages[k + 1].waves.append(step)
            return
        tokens = [
            emulated_token(session, rows.positions[i] + rows.counts[i], 64) if rows.sample[i] else -1
            for i, session in enumerate(rows.sessions)
        ]
        self.back.append(msgspec.structs.replace(step, tokens=tokens))

    def take_back(self) -> None:
        step = self.back.popleft()
        for i, number in enumerate(step.rows.sessions):
            if step.tokens[i] >= 0 and number in self.want:
                prompt, _ = self.want[number]
                # A replay ends where the stream does: no token comes twice.
                assert step.rows.positions[i] + step.rows.counts[i] == prompt + len(self.got[number])
                self.got[number].append(step.tokens[i])
        for number in self.former.returned(step, self.now_s):
            prompt, max_tokens = self.want[number]
            assert self.got[number] == [emulated_token(number, prompt + k, 64) for k in range(max_tokens)]
            self.end(number)

    def turn(self) -> bool:
        """Something that can happen, drawn; False when nothing can."""
        choices = [self.form] if self.former.can_form(self.now_s) else []
        choices += [lambda k=k: self.run(k) for k, stage in enumerate(self.stages) if stage.waves]
        choices += [lambda s=stage: self.release(s) for stage in self.stages if stage.releases]
        choices += [self.take_back] if self.back else []
        if not choices:
            return False
        self.rng.choice(choices)()
        return True


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    stages=st.integers(1, 4),
    blocks=st.integers(5, 14),
    bound=st.integers(1, 3),
    wishes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 30)), min_size=1, max_size=9),
    strangers=st.sampled_from((0.0, 0.05, 0.2)),
    cancels=st.sampled_from((0.0, 0.01)),
    seed=st.integers(0, 2**32),
)
def test_all_end_and_all_blocks_come_back(
    stages: int,
    blocks: int,
    bound: int,
    wishes: list[tuple[int, int]],
    strangers: float,
    cancels: float,
    seed: int,
) -> None:
    rng = random.Random(seed)
    ring = Ring(rng, stages, blocks, bound)
    waiting = list(enumerate(wishes))
    for _ in range(400):
        if waiting and rng.random() < 0.2:
            number, (prompt, max_tokens) = waiting.pop(0)
            ring.start(number, prompt, max_tokens)
        if ring.want and rng.random() < cancels:
            ring.end(rng.choice(list(ring.want)))
        if rng.random() < strangers:
            ring.stranger(rng.choice(ring.stages))
        ring.turn()
        ring.now_s += rng.choice((0.0, 0.001))
    for number, (prompt, max_tokens) in waiting:
        ring.start(number, prompt, max_tokens)
    for stage in ring.stages:
        stage.executor.close(STRANGER)
    # From here on only the path itself moves: each turn of the clock lets it ask again.
    idle = 0
    while ring.want and idle < 4:
        idle = 0 if ring.turn() else idle + 1
        ring.now_s += 0.03 if idle else 0.0
    assert not ring.want, "sessions wait and nothing moves"
    while ring.turn():
        pass
    for stage in ring.stages:
        assert stage.executor.kv_blocks == (blocks, blocks)
        assert len(stage.table) == 0
    assert not ring.former.sessions
