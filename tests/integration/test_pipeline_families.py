"""Every decoder family served: two stages each, in workers of their own, give transformers' greedy tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
import torch
from support.pipeline_world import DEADLINE_S, Served, Stream
from support.tiny_decoders import decoder
from support.tiny_llama import write_folder

from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

VARIANTS = ("mistral-window", "qwen3", "opt", "gpt2")
PROMPTS = [list(range(3 + i, 20 + 3 * i)) for i in range(4)]
NEW_TOKENS = 40


async def _stream(world: LocalWorld, bundle: Path, home: Path) -> list[Stream]:
    """Deploys a bundle and streams all prompts at once."""
    deployments = deployments_for(bundle, load(bundle), device="cpu", env={"OMP_NUM_THREADS": "1"})
    await world.deploy(*deployments)
    address = ""
    for deployment in deployments:
        replicas = await world.wait_ready(deployment.service, 1, DEADLINE_S)
        address = address or replicas[0].address
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        name = deployments[0].service
        pipeline = Served(world, name, f"http://{address}", home / "events", session)
        streams = [Stream() for _ in PROMPTS]
        await asyncio.gather(
            *(
                pipeline.stream(stream, prompt, max_tokens=NEW_TOKENS, temperature=0)
                for stream, prompt in zip(streams, PROMPTS, strict=True)
            )
        )
    return streams


@pytest.mark.slow
def test_every_family_is_served_as_transformers_computes_it(tmp_path: Path) -> None:
    bundles = {
        variant: split(
            write_folder(decoder(variant), tmp_path / variant / "model"),
            2, "parameters", tmp_path / variant / "bundle", variant,
        )
        for variant in VARIANTS
    }  # fmt: skip

    async def run() -> dict[str, list[Stream]]:
        async with LocalWorld(tmp_path / "home", gateway_port=None, controller=False) as world:
            found = await asyncio.gather(
                *(_stream(world, bundle, tmp_path / "home") for bundle in bundles.values())
            )
        return dict(zip(bundles, found, strict=True))

    for variant, streams in asyncio.run(run()).items():
        model = decoder(variant)
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            assert stream.error is None, variant
            assert (len(stream.tokens), stream.finish_reason) == (NEW_TOKENS, "length")
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + stream.tokens])).logits[0, len(prompt) - 1 : -1]
            best = logits.topk(2)
            for step, token in enumerate(stream.tokens):
                gap = float(best.values[step, 0] - best.values[step, 1])
                assert token == int(best.indices[step, 0]) or gap < 1e-3, (variant, step)
