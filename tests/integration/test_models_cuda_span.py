"""Spans on a GPU: prompts in chunks, mixed waves and replayed steps give what the eager stages give."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from keystage.bundle import store
from keystage.bundle.split import split
from keystage.models import cuda_support
from keystage.models.base import Row, StageError
from keystage.models.decoder import DecoderStage
from keystage.models.loading import load_stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and cuda_support.is_available()), reason="no CUDA device with Triton"
    ),
]

LENGTHS = (70, 5, 33)
TOLERANCE = {"fp32": 1e-3, "bf16": 0.25, "fp16": 0.03}
"""Of logits of about 1 to 20; the eager stage itself is that far from float64."""
SHAPES = ("llama-tiny", "mistral-tiny", "qwen2-tiny", "qwen3-tiny", "opt-tiny", "gpt2-tiny")


def stages_of(folder: Path, shape: str, dtype: str) -> list[DecoderStage]:
    bundle = split(f"random:{shape}", 2, "uniform", folder, shape, dtype)
    pipeline = store.load(bundle)
    stages: list[DecoderStage] = []
    for spec in pipeline.stages:
        stage = load_stage(bundle, pipeline, spec.index, "cuda:0")
        assert isinstance(stage, DecoderStage)
        stages.append(stage)
    return stages


class Eager:
    """The same stages, one after another, as `DecoderStage` computes them."""

    def __init__(self, stages: list[DecoderStage]) -> None:
        self.stages = stages

    def open(self, slot: int, capacity: int) -> None:
        for stage in self.stages:
            stage.open(slot, capacity)

    def forward(self, x: torch.Tensor, rows: list[Row], want: list[int]) -> torch.Tensor:
        for stage in self.stages:
            x = stage.forward(x, rows, want)
        return x


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_span_equals_its_stages(tmp_path: Path, shape: str, dtype: str) -> None:
    from keystage.models.cuda_span import CudaSpan

    stages = stages_of(tmp_path, shape, dtype)
    eager, span = Eager(stages), CudaSpan(stages, 64)
    span.capture(most_rows=4)
    draws = random.Random(1)
    prompts = [[draws.randrange(512) for _ in range(length)] for length in LENGTHS]
    for slot, prompt in enumerate(prompts):
        eager.open(slot, len(prompt))
        span.open(slot, len(prompt))
    passes = [
        [Row(0, 0, 20)],
        [Row(0, 20, 30), Row(1, 0, 1)],
        [Row(1, 1, 1), Row(0, 50, 5), Row(2, 0, 17)],
        *([Row(0, 55 + step, 1), Row(2, 17 + step, 1)] for step in range(15)),
        [Row(2, 32, 1)],
    ]
    for rows in passes:
        ids = torch.tensor([t for row in rows for t in prompts[row.slot][row.start : row.start + row.count]])
        want = list(range(len(rows)))
        expected, found = eager.forward(ids, rows, want), span.forward(ids, rows, want)
        assert found.shape == expected.shape
        assert (found - expected).abs().max().item() < TOLERANCE[dtype], rows
        if dtype == "fp32":
            assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
    assert (span.replays, span.passes) == (16, 3)
    for slot in range(len(prompts)):
        span.close(slot)
    assert span.pool.free_and_total == (64, 64)


def test_part_of_a_span_and_activations_that_come_from_elsewhere(tmp_path: Path) -> None:
    from keystage.models.cuda_span import CudaSpan

    stages = stages_of(tmp_path, "llama-tiny", "fp32")
    span, halves = CudaSpan(stages, 16), [CudaSpan([stage], 16) for stage in stages]
    span.capture(0, 0, 2)
    span.capture(1, 1, 2)
    for half in halves:
        half.capture(most_rows=2)
    for each in (span, *halves):
        each.open(3, 40)
    x = torch.arange(18)
    for rows in ([Row(3, 0, 18)], [Row(3, 18, 1)]):
        ids = x[: rows[0].count]
        between = halves[0].forward(ids, rows, [])
        whole = span.forward(ids, rows, [], 0, 0)
        assert torch.equal(between, whole)
        expected = halves[1].forward(between, rows, [0])
        assert torch.equal(span.forward(whole, rows, [0], 1, 1), expected)


def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    from keystage.models.cuda_span import CudaSpan

    stages = stages_of(tmp_path, "llama-tiny", "fp32")
    span = CudaSpan(stages, 2)
    span.capture(most_rows=1)
    with pytest.raises(StageError, match="slot 1 is not open"):
        span.forward(torch.tensor([1]), [Row(1, 0, 1)], [0])
    span.open(1, 100)
    with pytest.raises(StageError, match="token ids 512 to 512, the vocabulary is 0 to 511"):
        span.forward(torch.tensor([512]), [Row(1, 0, 1)], [0])
    with pytest.raises(StageError, match=r"33 tokens need more than the \d free KV blocks of 2"):
        span.forward(torch.zeros(33, dtype=torch.int64), [Row(1, 0, 33)], [0])
    with pytest.raises(StageError, match="starts at position 5, the slot holds 0"):
        span.forward(torch.tensor([1]), [Row(1, 5, 1)], [0])
