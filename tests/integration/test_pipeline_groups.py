"""Workers that host several stages, and a key stage of a group scaled by a worker of its own.

A tiny random Llama in four stages. One group worker serves all; a second worker then hosts stage 1
alone, and running sessions move to the path (group, single, group, group). Tokens must be those of
the unsplit model, on the CPU in fp32, and on a GPU near it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
from support.pipeline_world import DEADLINE_S, Served, Stream, until
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.local.api import Deployment
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

PROMPTS = [list(range(3 + i, 20 + 2 * i)) for i in range(8)]
NEW_TOKENS = 400
CONTEXT = 512


def _grouped(bundle: Path, device: str, events: Path) -> tuple[Deployment, Deployment, Deployment]:
    """Router, one worker for all stages, and one for stage 1 alone."""
    env = {"KEYSTAGE_EVENTS": str(events)}
    router, first, single, *_ = deployments_for(bundle, load(bundle), device=device, slots=32, env=env)
    group = msgspec.structs.replace(first, envVars={**first.envVars, "KEYSTAGE_STAGES": "0-3"})
    return router, group, single


async def _run(bundle: Path, home: Path, device: str) -> tuple[list[Stream], list[dict[str, Any]]]:
    events = home / "events"
    router, group, single = _grouped(bundle, device, events)
    async with LocalWorld(home, gateway_port=None, controller=False) as world:
        await world.deploy(router, group)
        address = (await world.wait_ready(router.service, 1, DEADLINE_S))[0].address
        await world.wait_ready(group.service, 1, DEADLINE_S)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
            pipeline = Served(world, router.service, f"http://{address}", events, session)
            streams = [Stream() for _ in PROMPTS]
            running = asyncio.gather(
                *(
                    pipeline.stream(stream, prompt, max_tokens=NEW_TOKENS, temperature=0)
                    for stream, prompt in zip(streams, PROMPTS, strict=True)
                )
            )
            await until(lambda: all(len(s.tokens) >= 3 for s in streams), "three tokens each")
            await world.deploy(single)
            await world.wait_ready(single.service, 1, DEADLINE_S)
            await running
            # What begins now is spread over both workers of stage 1.
            again = [Stream() for _ in PROMPTS]
            await asyncio.gather(
                *(
                    pipeline.stream(stream, prompt, max_tokens=20, temperature=0)
                    for stream, prompt in zip(again, PROMPTS, strict=True)
                )
            )
            # The workers' logs are flushed with their heartbeats.
            await until(lambda: pipeline.log("wave", single.service), "its waves are logged")
            waves = pipeline.log("wave", single.service)
    for first, second in zip(streams, again, strict=True):
        assert second.tokens == first.tokens[:20]
    return streams, waves


def _check(streams: list[Stream], model: Any, near_tie: float) -> None:
    for prompt, stream in zip(PROMPTS, streams, strict=True):
        assert stream.error is None
        assert len(stream.tokens) == NEW_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + stream.tokens])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        for step, token in enumerate(stream.tokens):
            gap = float(best.values[step, 0] - best.values[step, 1])
            assert token == int(best.indices[step, 0]) or gap < near_tie


@pytest.mark.slow
def test_group_with_a_scaled_key_stage(tmp_path: Path) -> None:
    model = tiny_model(max_position_embeddings=CONTEXT)
    bundle = split(write_folder(model, tmp_path / "model"), 4, "uniform", tmp_path / "bundle", "tiny")
    streams, waves = asyncio.run(_run(bundle, tmp_path / "home", "cpu"))
    _check(streams, model, 1e-3)
    assert waves
    assert all(wave["stages"] == [1, 1] for wave in waves)


@pytest.mark.gpu
def test_group_with_a_scaled_key_stage_on_a_gpu(tmp_path: Path) -> None:
    model = tiny_model(max_position_embeddings=CONTEXT)
    bundle = split(write_folder(model, tmp_path / "model"), 4, "uniform", tmp_path / "bundle", "tiny")
    streams, waves = asyncio.run(_run(bundle, tmp_path / "home", "cuda:0"))
    _check(streams, model, 1e-2)
    assert waves
