"""Single-pass stages on a GPU against the CPU: types, padding, parameters filled in later, a worker.

Convolutions in fp32 multiply in TF32 there, as torch does by itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny_bert import Chain, tiny_bert
from support.tiny_bert import write_folder as write_bert
from support.tiny_wide_resnet import tiny_wide_resnet
from support.tiny_wide_resnet import write_folder as write_resnet

from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.keysmanager.device_copy import load_stage_from_segment
from keystage.models.loading import warm_up
from keystage.models.single_pass import single_pass_stage
from keystage.worker.executor import Activation
from keystage.worker.torch_single import TorchSinglePass

DEVICE = "cuda:0"
pytestmark = pytest.mark.gpu


def bert(folder: Path) -> Path:
    return write_bert(tiny_bert(), folder)


def filler(folder: Path) -> Path:
    return write_bert(tiny_bert(fills_masks=True), folder)


def network(folder: Path) -> Path:
    return write_resnet(*tiny_wide_resnet(), folder)


def items_of(chain: Chain, count: int = 12) -> list[torch.Tensor]:
    """Inputs of the first stage; texts of many lengths, more than attend in groups on a GPU."""
    if chain.stages[0].input_name == "image":
        return chain.stages[0].samples(count)
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(131, (3 + 5 * index,), generator=generator) for index in range(count)]


def near(found: torch.Tensor, expected: torch.Tensor, ratio: float) -> bool:
    if expected.dim() == 3:  # tokens for places: near ties may change places
        found, expected = found[:, 0], expected[:, 0]
    scale = max(1.0, float(expected.abs().max()))
    return bool((found.cpu() - expected).abs().max() < ratio * scale)


@pytest.mark.parametrize(("dtype", "ratio"), [("fp32", 1e-2), ("bf16", 0.1), ("fp16", 0.02)])
@pytest.mark.parametrize("model", [bert, filler, network])
def test_a_gpu_computes_what_the_cpu_does(
    tmp_path: Path, model: Callable[[Path], Path], dtype: str, ratio: float
) -> None:
    bundle = split(model(tmp_path / "model"), 3, "uniform", tmp_path / "bundle", "b")
    host, device = Chain(bundle), Chain(bundle, DEVICE, dtype)
    items = items_of(host)
    for found, expected in zip(device(items), host(items), strict=True):
        assert (found.device.type, found.dtype) == (torch.device(DEVICE).type, torch.float32)
        assert near(found, expected, ratio)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [bert, network])
def test_parameters_that_arrive_in_an_arena_are_used_where_they_lie(
    tmp_path: Path, model: Callable[[Path], Path], dtype: str
) -> None:
    bundle = split(model(tmp_path / "model"), 2, "uniform", tmp_path / "bundle", "b", dtype)
    pipeline = load(bundle)
    plain = Chain(bundle, DEVICE)
    items = items_of(plain)
    for index, stage in enumerate(plain.stages):
        with (bundle / pipeline.stages[index].file).open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        segment = load_stage_from_segment(pipeline, index, memoryview(content), DEVICE, pipeline.dtype)
        copied = single_pass_stage(segment)
        warm_up(copied)
        outputs = stage.forward(items)
        for found, expected in zip(copied.forward(items), outputs, strict=True):
            assert near(found.float(), expected.float().cpu(), 1e-2 if dtype == "fp32" else 0.1)
        items = outputs


@pytest.mark.parametrize("model", [bert, network])
def test_a_worker_brings_a_batch_to_the_gpu_and_back(tmp_path: Path, model: Callable[[Path], Path]) -> None:
    bundle = split(model(tmp_path / "model"), 3, "uniform", tmp_path / "bundle", "b")
    executor = TorchSinglePass(bundle, load(bundle), (0, 1, 2), DEVICE, "float32", 1)
    executor.first_forward()
    executor.warm_up()
    host = Chain(bundle)
    items = items_of(host)
    inputs = [
        Activation(
            str(item.dtype).removeprefix("torch."), tuple(item.shape), memoryview(item.numpy().tobytes())
        )
        for item in items
    ]
    in_turn = executor.batch(1, 2, executor.batch(0, 0, inputs))
    for outputs in (executor.batch(0, 2, inputs), in_turn):
        for output, expected in zip(outputs, host(items), strict=True):
            found = torch.frombuffer(bytearray(output.data), dtype=torch.float32).view(output.shape)
            assert near(found, expected, 1e-2)
