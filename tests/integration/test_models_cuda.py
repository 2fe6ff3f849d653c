"""Stages on a GPU: the same logits as on the CPU, in fp32, and near them in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_llama import Chain, tiny_model, write_folder

from keystage.bundle.split import split
from keystage.models.base import Row
from keystage.models.loading import warm_up
from keystage.worker.sampling import sample

pytestmark = pytest.mark.gpu


def waves(chain: Chain, ids: list[int]) -> torch.Tensor:
    """Logits of two sessions: prefill in chunks, mixed with decode, then decode alone."""
    for slot in (0, 1):
        chain.open(slot, 64)
    first = chain.forward([*ids[:20], *ids[:7]], [Row(0, 0, 20), Row(1, 0, 7)], [0, 1])
    second = chain.forward([*ids[20:40], ids[7]], [Row(0, 20, 20), Row(1, 7, 1)], [0, 1])
    third = chain.forward([ids[8], ids[40]], [Row(1, 8, 1), Row(0, 40, 1)], [0, 1])
    return torch.cat((first, second, third)).cpu()


def test_cuda_equals_cpu(tmp_path: Path) -> None:
    bundle = split(write_folder(tiny_model(), tmp_path / "m"), 2, "uniform", tmp_path / "bundle", "tiny")
    ids = torch.randint(97, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = waves(Chain(bundle), ids)
    single, half = Chain(bundle, "cuda"), Chain(bundle, "cuda", "bf16")
    for stage in (*single.stages, *half.stages):
        warm_up(stage)
    found = waves(single, ids)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    likeness = torch.nn.functional.cosine_similarity(waves(half, ids), expected, -1)
    assert float(likeness.min()) > 0.98
    wish = ([7] * 6, list(range(6)), [0.0, 0.8] * 3, [1.0, 0.9] * 3)
    assert sample(found.cuda(), *wish) == sample(found, *wish)
