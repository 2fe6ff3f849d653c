"""The controller as a process beside the real supervisor: it steers, ends on SIGTERM and with its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keystage.controller.decisions import replay
from keystage.local.api import Deployment, Intent, Override
from keystage.local.events import Intended
from keystage.local.world import LocalWorld

FUNCTION = Deployment(
    service="files",
    envProcess=f"{sys.executable} -m http.server --bind 127.0.0.1 --directory /dev/null $PORT",
)


async def _until_desired(world: LocalWorld, replicas: int) -> None:
    async with asyncio.timeout(30):
        while world.function("files").desired != replicas:
            await world.supervisor.watch(world.supervisor.view().version, 1.0)


@pytest.mark.slow
def test_an_override_is_acted_on_and_expires(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with LocalWorld(tmp_path / "home", gateway_port=None, controller=True) as world:
            await world.deploy(FUNCTION)
            await world.wait_ready("files", 1, 30)
            override = Override(2, time.time() + 4)
            world.supervisor.handle(Intended("files", Intent(override=override)))
            await _until_desired(world, 2)
            async with asyncio.timeout(30):
                while world.function("files").override is not None:
                    await world.supervisor.watch(world.supervisor.view().version, 1.0)
            assert time.time() >= override.expires_at_s
            assert world.controller is not None
            assert world.controller.restarts == 0

    asyncio.run(scenario())
    count, differences = replay(tmp_path / "home" / "decisions.jsonl")
    assert count > 0
    assert differences == []


def _start(tmp_path: Path, lifeline_fd: int) -> subprocess.Popen[bytes]:
    """A controller whose supervisor does not answer: it must live on and try again."""
    env = {
        **os.environ,
        "KEYSTAGE_CONTROL": str(tmp_path / "nobody.sock"),
        "KEYSTAGE_HOME": str(tmp_path),
        "KEYSTAGE_LIFELINE_FD": str(lifeline_fd),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "keystage.controller.app"],
        env=env,
        pass_fds=[lifeline_fd],
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    assert b"cannot observe" in process.stderr.readline()
    return process


def test_sigterm_ends_it_with_code_0(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    process = _start(tmp_path, read_fd)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert process.stderr is not None
    process.stderr.close()
    os.close(read_fd)
    os.close(write_fd)


def test_the_end_of_its_owner_ends_it(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    process = _start(tmp_path, read_fd)
    os.close(read_fd)
    os.close(write_fd)
    process.wait(10)
    assert process.stderr is not None
    process.stderr.close()
