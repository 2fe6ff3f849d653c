"""KEYSTAGE_DETERMINISTIC: no bit of an answer hangs on what is computed beside it, or on how it is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import tiny_whisper
from support.tiny_llama import tiny_model, write_folder
from support.tiny_whisper import FRAMES, sound

from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.wire.api import StepRows
from keystage.worker.executor import Activation
from keystage.worker.torch_executor import TorchExecutor

PROMPTS = [[5, 80, 3, 41, 7, 7, 12, 60, 33, 90, 4], [9, 8, 7], [15, 28, 9, 51, 66, 2, 70, 1]]
CAPACITY = 40


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deterministic")
    return split(write_folder(tiny_model(), folder / "model"), 2, "uniform", folder / "b", "tiny")


class Sessions:
    """The prompts as sessions of an executor with the first stage."""

    def __init__(self, bundle: Path, dtype: str, *, deterministic: bool) -> None:
        self.executor = TorchExecutor(
            bundle, load(bundle), (0,), "cpu", dtype, 1, deterministic=deterministic
        )
        for session in range(len(PROMPTS)):
            self.executor.open(session, CAPACITY)
            assert self.executor.reserve(session, CAPACITY)

    def step(self, *pieces: tuple[int, int, int]) -> list[bytes]:
        """One wave of (session, first position, tokens); what each position gave."""
        ids = [token for session, start, count in pieces for token in PROMPTS[session][start : start + count]]
        number = len(pieces)
        sessions, starts, counts = (list(column) for column in zip(*pieces, strict=True))
        rows = StepRows(
            sessions, [1] * number, starts, counts, [False] * number, [0] * number, [0.0] * number,
            [1.0] * number, [0] * number,
        )  # fmt: skip
        found = self.executor.step(0, 0, ids, None, rows).activation
        assert isinstance(found, Activation)
        width = found.data.nbytes // len(ids)
        return [bytes(found.data[at * width : (at + 1) * width]) for at in range(len(ids))]


def by_wave(sessions: Sessions) -> dict[int, list[bytes]]:
    """All prompts in one wave."""
    found = sessions.step(*((session, 0, len(prompt)) for session, prompt in enumerate(PROMPTS)))
    parts: dict[int, list[bytes]] = {}
    for session, prompt in enumerate(PROMPTS):
        parts[session], found = found[: len(prompt)], found[len(prompt) :]
    return parts


def by_pieces(sessions: Sessions, lengths: Sequence[int]) -> dict[int, list[bytes]]:
    """Each prompt by itself, cut at these lengths."""
    parts: dict[int, list[bytes]] = {}
    for session, prompt in enumerate(PROMPTS):
        at, parts[session] = 0, []
        while at < len(prompt):
            count = min(lengths[session], len(prompt) - at)
            parts[session] += sessions.step((session, at, count))
            at += count
    return parts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_is_the_same_in_any_wave(bundle: Path, dtype: str) -> None:
    together = by_wave(Sessions(bundle, dtype, deterministic=True))
    for lengths in ((1, 1, 1), (4, 2, 3)):
        assert by_pieces(Sessions(bundle, dtype, deterministic=True), lengths) == together


def test_a_wave_of_nobody_passes(bundle: Path) -> None:
    executor = TorchExecutor(bundle, load(bundle), (0, 1), "cpu", "float32", 1, deterministic=True)
    assert executor.step(0, 1, [], None, StepRows([], [], [], [], [], [], [], [], [])).tokens == []


def test_sound_is_heard_whole_and_tokens_alone(tmp_path: Path) -> None:
    bundle = split(
        tiny_whisper.write_folder(tiny_whisper.tiny_model(), tmp_path / "model"),
        2,
        "uniform",
        tmp_path / "b",
        "w",
    )
    pipeline = load(bundle)

    def heard(*sessions: int) -> list[int]:
        """First two tokens of each session, all of them in one wave."""
        executor = TorchExecutor(bundle, pipeline, (0, 1), "cpu", "float32", 1, deterministic=True)
        number, prompt, found = len(sessions), [0] * FRAMES + [3, 4], []
        for session in sessions:
            executor.open(session, FRAMES + 8)
            executor.take_input(session, sound(session).tobytes())
            assert executor.reserve(session, FRAMES + 8)
        ids, at, count = prompt * number, 0, len(prompt)
        for _ in range(2):
            rows = StepRows(
                list(sessions), [1] * number, [at] * number, [count] * number, [True] * number,
                [7] * number, [1.0] * number, [1.0] * number, [0] * number,
            )  # fmt: skip
            ids = executor.step(0, 1, ids, None, rows).tokens
            found.append(ids)
            at, count = at + count, 1
        return [token for tokens in zip(*found, strict=True) for token in tokens]

    assert heard(1, 2) == [*heard(1), *heard(2)]


def test_a_gpu_is_refused_by_name(bundle: Path, tmp_path: Path) -> None:
    env = {
        **os.environ, "KEYSTAGE_PIPELINE": "tiny", "KEYSTAGE_STAGES": "0", "KEYSTAGE_BUNDLE": str(bundle),
        "KEYSTAGE_ROUTER": f"ipc://{tmp_path}/r", "KEYSTAGE_REPLICA": "w", "KEYSTAGE_RUN": str(tmp_path),
        "KEYSTAGE_DEVICE": "cuda:0", "KEYSTAGE_DETERMINISTIC": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "keystage.worker.app"]
    said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 2
    assert "KEYSTAGE_DETERMINISTIC=1 with KEYSTAGE_DEVICE=cuda:0 and tiny (looping)" in said.stderr
