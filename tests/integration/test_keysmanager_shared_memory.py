"""A stage's own tensors, moved in place into memory that other processes can map."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.keysmanager_forks import at_most, mappings, open_fds, random_bundle

from keystage.bundle import store
from keystage.models.base import Row
from keystage.models.linear import is_packable
from keystage.models.loading import build_stage, read_stage
from keystage.models.shared import SharedMemory, SharedMemoryError

MIB = 1 << 20


def logits(model: Any) -> torch.Tensor:
    model.open(1, 8)
    found: torch.Tensor = model.forward(torch.tensor([5, 6, 7]), [Row(1, 0, 3)], [0])
    model.close(1)
    return found


@pytest.mark.slow
def test_a_packed_matrix_gives_the_same_bits_and_is_anonymous_no_longer() -> None:
    tests = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "support.packed_matrix"]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


MOVES_AND_ENDS = """
import mmap
import torch
from keystage.models.shared import SharedMemory
memory = SharedMemory("end")
tensors = [torch.ones(25_600 + 16 * i) for i in range(1500)]  # some begin with a page
assert any(tensor.data_ptr() % mmap.PAGESIZE == 0 for tensor in tensors)
for tensor in tensors:
    memory.move(tensor)
memory.seal()
"""


def test_a_process_that_moved_tensors_ends_without_a_crash() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MOVES_AND_ENDS], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_memory_that_is_left_is_unmapped() -> None:
    memory = SharedMemory("left")
    memory.move(torch.ones(MIB))
    memory.seal()
    assert len(list(mappings(os.getpid(), "memfd:left"))) == 1
    memory.leave()
    assert list(mappings(os.getpid(), "memfd:left")) == []


def test_small_tensors_stay_and_descriptors_go() -> None:
    before = open_fds()
    memory = SharedMemory("small")
    memory.move(torch.ones(8 * 1024))
    assert memory.nbytes == 0
    memory.seal()
    assert open_fds() == before


def test_a_full_memory_is_named_and_leaves_the_tensor() -> None:
    memory = SharedMemory("full")
    tensor = torch.ones(MIB)
    with at_most(MIB), pytest.raises(SharedMemoryError, match=r"cannot share 4\d{6} bytes: File too large"):
        memory.move(tensor)
    tensor += 1
    assert int(tensor.sum()) == 2 * MIB
    memory.seal()


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_shared_stage_equals_an_unshared_one(variant: str, dtype: str, tmp_path: Path) -> None:
    bundle = random_bundle(tmp_path, hidden=256, width=512, vocab=600, **VARIANTS[variant])
    pipeline = store.load(bundle)
    tensors = read_stage(bundle, pipeline, 0)
    expected = logits(build_stage(pipeline, 0, tensors, "cpu", dtype))
    memory = SharedMemory("stage")
    model = build_stage(pipeline, 0, tensors, "cpu", dtype, share=memory.move)
    memory.seal()
    # All matrices are its own: packed, or converted from fp32.
    item = torch.finfo(getattr(torch, dtype)).bits // 8
    assert memory.nbytes > 0.9 * pipeline.stages[0].parameters * item - 100 * 4096
    assert torch.equal(logits(model), expected)


def test_what_can_be_used_in_place_is_neither_copied_nor_shared(tmp_path: Path) -> None:
    assert not is_packable(torch.device("cpu"), torch.float16)
    bundle = random_bundle(tmp_path, hidden=256, width=512, vocab=600, dtype="float16")
    pipeline = store.load(bundle)
    tensors = read_stage(bundle, pipeline, 0)
    moved: list[torch.Tensor] = []
    keep: Callable[[torch.Tensor], None] = moved.append
    model = build_stage(pipeline, 0, tensors, "cpu", "float16", share=keep)
    assert moved == []
    assert torch.equal(logits(model), logits(build_stage(pipeline, 0, tensors, "cpu", "float16")))
