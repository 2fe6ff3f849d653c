"""The single-pass executor: bytes to bytes, stages handed over in memory, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from support.tiny_bert import Chain, tiny_bert, write_folder

from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.models.base import AnyStage
from keystage.models.base import StageError as ModelStageError
from keystage.models.loading import load_single_pass
from keystage.models.single_pass import looping_stage
from keystage.worker.executor import Activation, BatchBound, StageError
from keystage.worker.torch_executor import TorchExecutor
from keystage.worker.torch_single import TorchSinglePass

ITEMS = [torch.tensor([5, 6, 7]), torch.tensor([8])]


def item(tensor: torch.Tensor, *, is_frozen: bool = True) -> Activation:
    raw = tensor.numpy().tobytes()
    name = str(tensor.dtype).removeprefix("torch.")
    return Activation(name, tuple(tensor.shape), memoryview(raw if is_frozen else bytearray(raw)))


def tensor_of(activation: Activation) -> torch.Tensor:
    data = bytearray(activation.data)
    return torch.frombuffer(data, dtype=getattr(torch, activation.dtype)).view(activation.shape)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    return split(write_folder(tiny_bert(), folder / "model"), 2, "uniform", folder / "bundle", "b")


def executor(bundle: Path, *stages: int, **options: Any) -> TorchSinglePass:
    return TorchSinglePass(bundle, load(bundle), stages, "cpu", "float32", 1, **options)


def test_an_item_computed_alone_is_the_same_to_the_last_bit_in_any_batch(bundle: Path) -> None:
    alone = executor(bundle, 0, 1, deterministic=True)
    together = alone.batch(0, 1, [item(ids) for ids in ITEMS])
    one_by_one = [alone.batch(0, 1, [item(ids)])[0] for ids in ITEMS]
    assert [bytes(part.data) for part in together] == [bytes(part.data) for part in one_by_one]


def test_stages_together_and_one_after_another_give_the_same(bundle: Path) -> None:
    both = executor(bundle, 0, 1)
    both.first_forward()
    both.warm_up()
    assert isinstance(both, BatchBound)
    assert both.kv_blocks == (0, 0)
    expected = Chain(bundle)(ITEMS)
    at_once = both.batch(0, 1, [item(ids) for ids in ITEMS])
    hidden = both.batch(0, 0, [item(ids) for ids in ITEMS])
    assert [part.shape for part in hidden] == [(3, 48), (1, 48)]
    in_turn = both.batch(1, 1, [item(tensor_of(part), is_frozen=False) for part in hidden])
    for found in (at_once, in_turn):
        assert all(part.dtype == "float32" for part in found)
        assert all(map(torch.equal, map(tensor_of, found), expected))


def test_a_stage_alone_takes_one_named_tensor(bundle: Path) -> None:
    hidden = load_safetensors(executor(bundle, 0).single(save_safetensors({"ids": ITEMS[0]})))["hidden"]
    last = load_safetensors(executor(bundle, 1).single(save_safetensors({"hidden": hidden})))["embedding"]
    whole = load_safetensors(executor(bundle, 0, 1).single(save_safetensors({"ids": ITEMS[0]})))["embedding"]
    assert torch.equal(last, whole)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"nonsense", "body is no safetensors"),
        (save_safetensors({"hidden": torch.zeros(1, 48)}), r"takes one tensor 'ids', got \['hidden'\]"),
        (save_safetensors({"ids": torch.zeros(3)}), r"int64 \[T\] is expected, T from 1 to 64"),
        (save_safetensors({"ids": torch.tensor([999])}), "the vocabulary is 0 to 130"),
    ],
)
def test_bodies_that_do_not_fit_are_refused_by_name(bundle: Path, body: bytes, message: str) -> None:
    with pytest.raises(StageError, match=message):
        executor(bundle, 0).single(body)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Activation("int64", (3,), memoryview(bytes(16))), r"16 bytes is no int64 \[3\]"),
        (Activation("int64", (3,), memoryview(bytes(23))), r"23 bytes is no int64 \[3\]"),
        (Activation("complex64", (1,), memoryview(bytes(8))), "type 'complex64': known are float32"),
        (Activation("int64", (65,), memoryview(bytes(520))), "failed: an item of type int64"),
    ],
)
def test_items_that_do_not_fit_are_refused_by_name(bundle: Path, given: Activation, message: str) -> None:
    with pytest.raises(StageError, match=message):
        executor(bundle, 0, 1).batch(0, 1, [item(ITEMS[0]), given])


def test_waves_are_for_looping_pipelines_and_batches_for_others(bundle: Path) -> None:
    with pytest.raises(StageError, match="keeps no sessions"):
        executor(bundle, 0).open(1, 8)
    with pytest.raises(ModelStageError, match="single-pass and keeps no sessions"):
        TorchExecutor(bundle, load(bundle), (0,), "cpu", "float32", 1)
    with pytest.raises(ModelStageError, match="single-pass and keeps no sessions"):
        looping_stage(load_single_pass(bundle, load(bundle), 0))


class Supply:
    """Has stage 1 in memory already."""

    def __init__(self, bundle: Path) -> None:
        self.given = load_single_pass(bundle, load(bundle), 1)
        self.told: list[str] = []

    def stage(self, pipeline: Any, index: int, device: str, dtype: str) -> AnyStage | None:
        return self.given if index == 1 else None

    def report(self, phase: Any, note: str = "") -> None:
        self.told.append(phase)

    def release(self) -> None:
        self.told.append("released")


def test_a_supplied_stage_is_used_and_not_warmed_again(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supply = Supply(bundle)
    both = executor(bundle, 0, 1, supply=supply)
    runs: list[int] = []
    forward = supply.given.forward
    monkeypatch.setattr(supply.given, "forward", lambda items: runs.append(len(items)) or forward(items))
    both.warm_up()
    assert runs == []
    found = both.batch(0, 1, [item(ids) for ids in ITEMS])
    assert runs == [2]
    assert all(map(torch.equal, map(tensor_of, found), Chain(bundle)(ITEMS)))
    assert supply.told == []  # on a CPU the host copy is what it computes with


def test_a_batch_that_is_too_large_for_the_device_is_computed_in_parts(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = executor(bundle, 0, 1)
    whole = both.batch(0, 1, [item(ids) for ids in ITEMS * 3])
    run, sizes = both._run, []

    def small(most: int) -> None:
        def limited(first: int, last: int, items: list[torch.Tensor]) -> list[torch.Tensor]:
            sizes.append(len(items))
            if len(items) > most:
                raise torch.OutOfMemoryError("device")
            return run(first, last, items)

        monkeypatch.setattr(both, "_run", limited)

    small(2)
    parts = both.batch(0, 1, [item(ids) for ids in ITEMS * 3])
    assert sizes == [6, 3, 1, 2, 3, 1, 2]
    for found, expected in zip(parts, whole, strict=True):
        assert torch.allclose(tensor_of(found), tensor_of(expected), atol=1e-5)
    small(0)
    with pytest.raises(StageError, match="out of device memory") as caught:
        both.batch(0, 1, [item(ids) for ids in ITEMS])
    assert caught.value.retryable
