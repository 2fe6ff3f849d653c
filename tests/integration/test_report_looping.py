"""A looping pipeline whose sessions wait too long is told so, by the default objective if it states none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from support.pipeline_world import DEADLINE_S, Served, Stream
from typer.testing import CliRunner

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.cli.main import app
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

CLIENTS = 8
"""For one slot, which a session holds for 1.6 s: all but one of them wait, the last for some 11 s."""


@contextlib.asynccontextmanager
async def one_slot(home: Path) -> AsyncIterator[Served]:
    """Two emulated stages that never have more than one replica of one slot; no objective is stated."""
    (bundle := home / "bundle").mkdir()
    pipeline = emulated("em", 2, execution="looping", activation_bytes=512, context_length=64)
    write(bundle, pipeline)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with (
        LocalWorld(home, gateway_port=0, controller=True) as world,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        for function in deployments_for(bundle, pipeline, device="emulated:beta=0.02", slots=1):
            labels = {**function.labels, "com.openfaas.scale.max": "1"}
            await world.deploy(msgspec.structs.replace(function, labels=labels))
        router, *_ = [
            (await world.wait_ready(name, 1, DEADLINE_S))[0] for name in ("em", "em-stage-0", "em-stage-1")
        ]
        yield Served(world, "em", f"http://{router.address}", home / "events", session)


@contextlib.asynccontextmanager
async def asking(pipeline: Served) -> AsyncIterator[None]:
    """Clients that ask again and again."""

    async def client() -> None:
        while True:
            await pipeline.stream(into := Stream(), [1, 2, 3], max_tokens=40)
            assert into.error is None, into.error

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    try:
        yield
        assert not any(task.done() for task in clients)
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def status(pipeline: Served) -> tuple[int, dict[str, Any]]:
    """The exit code of `keystage status`, and what it says of the pipeline."""
    to = ("--gateway", pipeline.world.gateway_url, "--home", str(pipeline.world.home.path))
    done = await asyncio.to_thread(CliRunner().invoke, app, ["status", "em", "--json", *to])
    return done.exit_code, json.loads(done.stdout) if done.exit_code != 2 else {}


def is_told(found: dict[str, Any]) -> bool:
    """Whether it says all that such a load gives to say."""
    (one,) = found["report"]["pipelines"]
    words = " ".join(fault["text"] for fault in found["faults"])
    return (
        "of requests met the objective of TTFT 2 s, at least 90 %" in words
        and "the last waits about" in words
        and one["ttft_s"] == 2
        and one["entry_wait_s"] > 2
        and all(stage.get("utilisation_ratio", 0.0) > 0.2 for stage in one["stages"])
    )


@pytest.mark.slow
def test_sessions_that_wait_beyond_the_default_objective_are_a_fault(tmp_path: Path) -> None:
    async def run() -> None:
        async with one_slot(tmp_path) as pipeline, asking(pipeline):
            end_s = time.monotonic() + DEADLINE_S
            while True:
                code, found = await status(pipeline)
                if code == 1 and is_told(found):
                    break
                assert time.monotonic() < end_s, found
                await asyncio.sleep(0.3)

    asyncio.run(run())
