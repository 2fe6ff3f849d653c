"""`keystage up`: the local world in the foreground, until SIGTERM or SIGINT.

The command line calls `run`; what it starts is `local.world`. Exit codes: 0 ended on request,
1 the state folder cannot be used, 2 corrupt functions.json, a bad deployment or a bad setting, 3 port in use,
4 state folder held by another `up`, 5 something did not become ready.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from pathlib import Path

from pydantic import ValidationError

from keystage.local.api import Deployment
from keystage.local.config import LocalSettings
from keystage.local.errors import LocalError
from keystage.local.world import LocalWorld
from keystage.wire.descriptors import raise_descriptors

__all__ = ["LocalWorld", "UpOptions", "run", "up"]


@dataclasses.dataclass(frozen=True, slots=True)
class UpOptions:
    """What `keystage up` is asked for.

    Attributes:
        home: state folder, None for KEYSTAGE_HOME or `.keystage`.
        gateway_port: None for KEYSTAGE_GATEWAY_PORT or 8080, 0 picks a free one.
        controller: run the controller.
        nodes: KeysManagers, each a node of its own to replicas and controller.
        deployments: functions to deploy once up.
        ready_s: seconds to wait for the first replica of each of them.
        job: command to run once all is ready; `{gateway}` in it becomes the gateway's address.
        once: end when the job ends, with its exit code.
    """

    home: Path | None = None
    gateway_port: int | None = None
    controller: bool = True
    nodes: int = 1
    deployments: tuple[Deployment, ...] = ()
    ready_s: float = 300.0
    job: tuple[str, ...] = ()
    once: bool = False


async def up(options: UpOptions) -> int:
    """Brings everything up, says where, and waits for SIGTERM or SIGINT, or for a job run once.

    Returns:
        The job's exit code if it is run once, else 0.

    Raises:
        LocalError: see the module's exit codes.
    """
    settings = LocalSettings()
    raise_descriptors()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    world = LocalWorld(
        options.home or settings.home,
        gateway_port=settings.gateway_port if options.gateway_port is None else options.gateway_port,
        controller=options.controller,
        nodes=options.nodes,
    )
    try:
        async with world:
            say(f"gateway {world.gateway_url}, credentials in {world.home.credentials}")
            await world.deploy(*options.deployments)
            await _until_ready(world, options, ended)
            code = await _run_job(world, options, ended) if options.job and not ended.is_set() else 0
            if not options.once:
                if not ended.is_set():
                    say(f"serving at {world.gateway_url} until Ctrl-C")
                await ended.wait()
                code = 0
            say("ending")
            return code
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _until_ready(world: LocalWorld, options: UpOptions, ended: asyncio.Event) -> None:
    async def wait() -> None:
        for deployment in options.deployments:
            if world.function(deployment.service).desired != 0:
                await world.wait_ready(deployment.service, 1, options.ready_s)
                say(f"{deployment.service} is ready")

    waits = asyncio.create_task(wait())
    stop = asyncio.create_task(ended.wait())
    try:
        await asyncio.wait([waits, stop], return_when=asyncio.FIRST_COMPLETED)
        if waits.done():
            waits.result()
    finally:
        waits.cancel()
        stop.cancel()
        await asyncio.gather(waits, stop, return_exceptions=True)


async def _run_job(world: LocalWorld, options: UpOptions, ended: asyncio.Event) -> int:
    """Runs the job to its end; a request to end `up` ends the job too."""
    argv = [part.replace("{gateway}", world.gateway_url) for part in options.job]
    lifeline = world.supervisor.lifeline.read_fd
    environment = {
        **os.environ,
        "KEYSTAGE_HOME": str(world.home.path),
        "KEYSTAGE_LIFELINE_FD": str(lifeline),
    }
    job = await asyncio.create_subprocess_exec(*argv, env=environment, pass_fds=(lifeline,))
    world.upgrades.hindrance = f"{argv[0]} (process {job.pid}), which this `up` waits for, has not ended"
    finished = asyncio.create_task(job.wait())
    stop = asyncio.create_task(ended.wait())
    await asyncio.wait([finished, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    await asyncio.gather(stop, return_exceptions=True)
    if not finished.done():
        job.terminate()
    code = await finished
    world.upgrades.hindrance = ""
    return code


def say(text: str) -> None:
    """A line for who started `up`."""
    sys.stderr.write(f"keystage: {text}\n")
    sys.stderr.flush()


def run(options: UpOptions) -> int:
    """Runs `up` to its end and returns the process's exit code."""
    try:
        return asyncio.run(up(options))
    except LocalError as error:
        say(str(error))
        return error.exit_code
    except ValidationError as error:
        for fault in error.errors():
            name = "_".join(str(part) for part in fault["loc"]).upper()
            say(f"KEYSTAGE_{name}={fault['input']}: {fault['msg']}")
        return 2
