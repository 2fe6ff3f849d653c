"""The whole path against the unsplit model: router, four worker processes, mixed waves, fp32.

Twenty prompts of 1 to 500 tokens, 28 greedy tokens each, ten in flight. Every token must be the
reference's best given the same prefix; only where the reference's own top two are closer than
5e-4 another is accepted, and what follows is compared with that token in the prefix.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.pipeline_world import Served, Stream, served, until
from tokenizers import Tokenizer

LENGTHS = [1, 2, 3, 5, 8, 13, 17, 21, 34, 40, 55, 64, 89, 100, 144, 177, 233, 300, 377, 500]
NEW_TOKENS = 28
IN_FLIGHT = 10
NEAR_TIE = 5e-4

TEXT = (
    "The capital of France is Paris, and the river that runs through it is the Seine. "
    "A pipeline of stages passes activations from one worker to the next. def add(a, b):\n    return a + b\n"
    "In 1969 people walked on the moon; 3 * 7 = 21. Wie geht es dir? Once upon a time there was a fox. "
)


def _prompts(bundle: Path) -> list[list[int]]:
    ids = Tokenizer.from_file(str(bundle / "tokenizer.json")).encode(TEXT * 40).ids
    starts = np.random.default_rng(7).integers(0, len(ids) - max(LENGTHS), len(LENGTHS))
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


async def _generate(
    bundle: Path, home: Path, prompts: list[list[int]]
) -> tuple[list[Stream], list[dict[str, Any]]]:
    async with served(bundle, home) as pipeline:
        streams = [Stream() for _ in prompts]
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def one(pipe: Served, stream: Stream, prompt: list[int]) -> None:
            async with gate:
                await pipe.stream(stream, prompt, max_tokens=NEW_TOKENS, temperature=0)

        await asyncio.gather(
            *(one(pipeline, stream, prompt) for stream, prompt in zip(streams, prompts, strict=True))
        )
        stages = [f"smollm2-stage-{stage}" for stage in range(4)]
        for function in stages:
            await pipeline.world.scale(function, 0)
        # A worker that has ended has written its log to the end.
        await until(lambda: not any(map(pipeline.world.replicas, stages)), "all workers have ended")
        waves = pipeline.log("wave", "smollm2-stage-2")
    return streams, waves


@pytest.mark.slow
def test_tokens_equal_the_unsplit_model(smollm2_bundle: Path, smollm2_reference: Any, tmp_path: Path) -> None:
    prompts = _prompts(smollm2_bundle)
    streams, waves = asyncio.run(_generate(smollm2_bundle, tmp_path, prompts))
    ties = 0
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.error is None
        assert len(stream.tokens) == NEW_TOKENS
        assert stream.finish_reason == "length"
        with torch.inference_mode():
            sequence = torch.tensor([prompt + stream.tokens])
            logits = smollm2_reference(sequence).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        for step, token in enumerate(stream.tokens):
            if token != int(best.indices[step, 0]):
                gap = float(best.values[step, 0] - best.values[step, 1])
                assert gap < NEAR_TIE, f"prompt of {len(prompt)}, step {step}: {token} (gap {gap:.2e})"
                ties += 1
    mixed = [wave for wave in waves if wave["rows"] >= 4 and wave["prefill_rows"] and wave["decode_rows"]]
    print(f"{len(waves)} waves at stage 2, {len(mixed)} of 4 rows and more mix both, {ties} near ties")
    assert mixed
