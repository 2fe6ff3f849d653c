"""`keystage status`, `explain` and `doctor` on a real world: gateway, controller, a pipeline of processes."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from support.local_function import authorization
from support.pipeline_world import DEADLINE_S, Served, served
from typer.testing import CliRunner

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.cli.main import app


async def _told(pipeline: Served, *arguments: str) -> tuple[int, str]:
    """A command's exit code and output."""
    to = ("--gateway", pipeline.world.gateway_url, "--home", str(pipeline.world.home.path))

    def run() -> tuple[int, str]:
        done = CliRunner().invoke(app, [*arguments, *to])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output

    return await asyncio.to_thread(run)


async def _until(pipeline: Served, words: str, *arguments: str, code: int = 0) -> str:
    """Asks until the command ends with a code and says something."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        found, text = await _told(pipeline, *arguments)
        if found == code and words in text:
            return text
        assert time.monotonic() < end_s, f"{arguments}: {found}: {text}"
        await asyncio.sleep(0.2)


async def _scale(pipeline: Served, function: str, replicas: int) -> None:
    async with aiohttp.ClientSession(headers=authorization(*pipeline.world.credentials)) as session:
        url = f"{pipeline.world.gateway_url}/system/scale-function/{function}"
        async with session.post(url, data=msgspec.json.encode({"replicas": replicas})) as answer:
            assert answer.status == 202, await answer.text()


@pytest.mark.slow
def test_what_runs_and_why(tmp_path: Path) -> None:
    async def run() -> None:
        bundle = tmp_path / "bundle"
        bundle.mkdir()
        write(bundle, emulated("em", 3, execution="single-pass", activation_bytes=512))
        async with served(bundle, tmp_path, controller=True, device="emulated") as pipeline:
            table = await _until(pipeline, "all is well", "status", "em")
            assert [line.split()[0] for line in table.splitlines()[1:4]] == ["0", "1", "2"]
            await _scale(pipeline, "em-stage-1", 2)
            why = await _until(pipeline, "1 -> 2, a person asked for 2", "explain", "em/1")
            assert "em-stage-1: stage 1 of pipeline em (single-pass)" in why
            code, text = await _told(pipeline, "explain", "em/7")
            assert code == 2
            assert "stages 0 to 2" in text
            found: dict[str, Any] = json.loads((await _told(pipeline, "doctor", "--json"))[1])
            ours = {check["thing"]: check for check in found["checks"] if check["area"] == "gateway"}
            assert {ours[thing]["level"] for thing in ("clocks", "versions", "controller's report")} == {"ok"}
            assert "the gateway" in ours["clocks"]["actual"]  # its stream told the clock
            await _until(pipeline, "all is well", "status")

    asyncio.run(run())
