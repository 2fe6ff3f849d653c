"""What single-pass stages make for themselves is shared between processes, and computes the same there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny_bert import tiny_bert
from support.tiny_bert import write_folder as write_bert
from support.tiny_wide_resnet import tiny_wide_resnet
from support.tiny_wide_resnet import write_folder as write_resnet

from keystage.bundle import store
from keystage.bundle.split import split
from keystage.keysmanager import packed_segment
from keystage.keysmanager.packed_segment import PackedStage
from keystage.models.linear import is_packable
from keystage.models.loading import build_stage, rehearse, warm_up
from keystage.models.raw import tensors_in
from keystage.models.shared import SharedMemory
from keystage.models.single_pass import single_pass_stage

STAGES = 2
pytestmark = pytest.mark.skipif(
    not is_packable(torch.device("cpu"), torch.float32) or packed_segment._interface() is None,
    reason="this torch packs nothing, or makes no tensor of packed memory",
)


def bert(folder: Path) -> Path:
    return write_bert(tiny_bert(hidden_size=192, intermediate_size=512, vocab_size=512), folder)


def filler(folder: Path) -> Path:
    return write_bert(tiny_bert(fills_masks=True, hidden_size=192, intermediate_size=512), folder)


def network(folder: Path) -> Path:
    return write_resnet(*tiny_wide_resnet(width_per_group=64), folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", [bert, filler, network])
def test_a_stage_of_shared_parameters_computes_what_a_private_one_does(
    tmp_path: Path, model: Callable[[Path], Path], dtype: str
) -> None:
    bundle = split(model(tmp_path / "model"), STAGES, "uniform", tmp_path / "bundle", "s")
    pipeline = store.load(bundle)
    for index in range(STAGES):
        raw = memoryview((bundle / pipeline.stages[index].file).read_bytes())
        tensors = tensors_in(torch.frombuffer(bytearray(raw), dtype=torch.uint8), "raw")
        private = single_pass_stage(build_stage(pipeline, index, tensors, "cpu", dtype))
        items = private.samples(3)
        expected = [output.clone() for output in private.forward(items)]

        memory = SharedMemory("keystage-single-test")
        shared = single_pass_stage(build_stage(pipeline, index, tensors, "cpu", dtype, share=memory.move))
        published = packed_segment.publish(memory, raw, "raw", pipeline, index, dtype)
        memory.seal()
        assert memory.nbytes > 0
        warm_up(shared)
        rehearse(shared, -1, 4)
        assert all(map(torch.equal, shared.forward(items), expected))

        assert published is not None
        other = single_pass_stage(PackedStage(*published).build(pipeline, index, dtype))
        assert all(map(torch.equal, other.forward(items), expected))
