"""KV state that goes from one executor to another: copied as it is, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.models.blocks import BLOCK_TOKENS
from keystage.wire.api import StepRows
from keystage.worker.executor import Activation, CopiesState, EmulatedDevice, EmulatedExecutor
from keystage.worker.torch_executor import TorchExecutor

IDS = [5, 80, 3, 41, 7, 7, 12, 60, 33, 90, 4, 15, 28, 9, 51, 66, 2, 70]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handing")
    return split(write_folder(tiny_model(), folder / "model"), 2, "uniform", folder / "b", "tiny")


def executor(bundle: Path, stages: tuple[int, ...], blocks: int = 8) -> TorchExecutor:
    pipeline = load(bundle)
    made = TorchExecutor(bundle, pipeline, stages, "cpu", "float32", 1)
    return TorchExecutor(
        bundle, pipeline, stages, "cpu", "float32", 1, None, blocks * BLOCK_TOKENS * made.kv_token_bytes
    )


def rows(position: int, count: int) -> StepRows:
    return StepRows([1], [1], [position], [count], [True], [0], [0.0], [1.0], [0])


def hidden(source: TorchExecutor, ids: list[int], position: int) -> torch.Tensor:
    found = source.step(0, 0, ids, None, rows(position, len(ids))).activation
    assert found is not None
    return torch.frombuffer(found.data, dtype=torch.float32).view(found.shape).clone()


def opened(bundle: Path) -> TorchExecutor:
    source = executor(bundle, (0,))
    source.open(1, 40)
    assert source.reserve(1, len(IDS))
    hidden(source, IDS, 0)
    return source


def test_the_copy_goes_on_as_the_original_does(bundle: Path) -> None:
    source, target = opened(bundle), executor(bundle, (0,))
    assert isinstance(source, CopiesState)
    state = source.copy_out(1, 0)
    assert state is not None
    assert target.copy_in(1, 0, 40, state)
    assert target.kv_blocks == (6, 8)
    assert torch.equal(hidden(target, [9, 8], len(IDS)), hidden(source, [9, 8], len(IDS)))


def test_a_copy_may_be_rewound_and_computed_again_from_there(bundle: Path) -> None:
    source, target = opened(bundle), executor(bundle, (0,))
    state = source.copy_out(1, 0)
    assert state is not None
    assert target.copy_in(1, 0, 40, state)
    assert target.rewind(1, 10)
    again = hidden(target, [*IDS[10:], 9], 10)
    torch.testing.assert_close(again[-1:], hidden(source, [9], len(IDS)), rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused_and_leaves_nothing(bundle: Path) -> None:
    source = opened(bundle)
    state = source.copy_out(1, 0)
    assert state is not None
    assert source.copy_out(2, 0) is None
    assert source.copy_out(1, 1) is None
    assert not source.rewind(2, 1)
    other_stage = executor(bundle, (1,))
    few = executor(bundle, (0,), blocks=1)
    flat = Activation("float32", (state.data.nbytes // 4,), state.data)
    for target, stage, tokens, given in (
        (other_stage, 0, 40, state),
        (few, 0, 40, state),
        (executor(bundle, (0,)), 0, len(IDS) - 1, state),
        (executor(bundle, (0,)), 0, 1 << 20, state),
        (executor(bundle, (0,)), 0, 40, flat),
    ):
        free, total = target.kv_blocks
        assert not target.copy_in(1, stage, tokens, given)
        assert target.kv_blocks == (free, total)
        assert free == total


def test_an_emulated_device_hands_over_its_blocks() -> None:
    source = EmulatedExecutor(EmulatedDevice(), 2, 8, 64, 8)
    target = EmulatedExecutor(EmulatedDevice(), 2, 8, 64, 3)
    source.open(1, 100)
    assert source.copy_out(1, 0) is None
    assert source.reserve(1, 40)
    state = source.copy_out(1, 0)
    assert state is not None
    assert target.copy_in(1, 0, 100, state)
    assert target.kv_blocks == (0, 3)
    assert not target.copy_in(2, 0, 100, state)
