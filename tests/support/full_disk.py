"""Serves a pipeline whose state folder lies on a disk that becomes full: run in a mount namespace of its own.

`python full_disk.py BUNDLE HOME`; HOME is a small file system of memory. Prints what it found as JSON.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
from support.pipeline_world import Served, served, until

from keystage.bundle.store import load
from keystage.local.api import Deployment
from keystage.local.errors import NotKept
from keystage.local.pipeline import deployments_for


def fill(folder: Path) -> Path:
    """Leaves not a byte free."""
    path = folder / "filling"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return path


async def ask(pipeline: Served, i: int) -> bool:
    body = bytes([i % 256]) * 100
    async with pipeline.session.post(f"{pipeline.router}/", data=body) as answer:
        return answer.status == 200 and await answer.read() == body


async def answers(pipeline: Served, count: int) -> bool:
    return all(await asyncio.gather(*(ask(pipeline, i) for i in range(count))))


def another(bundle: Path) -> Deployment:
    deployment = deployments_for(bundle, load(bundle), device="emulated")[2]
    return msgspec.structs.replace(deployment, service="another")


async def scaled(pipeline: Served) -> bool:
    """Whether another replica of a stage comes up."""
    await pipeline.world.scale("em-stage-1", 2)
    await pipeline.world.wait_ready("em-stage-1", 2)
    return True


async def run(bundle: Path, home: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with served(bundle, home, device="emulated:beta=0.001", controller=True) as pipeline:
        found["before"] = await answers(pipeline, 20)
        filling = fill(home)
        # Many more events than a process keeps back would not fit; answers do not depend on them.
        found["full"] = [await answers(pipeline, 100) for _ in range(20)]
        (victim,) = pipeline.world.replicas("em-stage-1")
        os.kill(victim.pid, signal.SIGKILL)

        def is_new() -> bool:
            replicas = pipeline.world.replicas("em-stage-1")
            return any(r.state == "ready" and r.replica != victim.replica for r in replicas)

        await until(is_new, "a new replica of stage 1 on a full disk")
        found["full, after a death"] = await answers(pipeline, 50)
        found["numbers change"] = await scaled(pipeline)
        try:
            await pipeline.world.deploy(another(bundle))
            found["deployed"] = "and kept"
        except NotKept as error:
            found["deployed"] = str(error)
        filling.unlink()
        await pipeline.world.deploy(another(bundle))
        found["room again"] = await answers(pipeline, 50)
        await until(lambda: len(pipeline.log("batch", "em-stage-0")) > 0, "events of stage 0")
        before = len(pipeline.log("batch", "em-stage-0"))
        found["room again"] = await answers(pipeline, 50)
        await until(lambda: len(pipeline.log("batch", "em-stage-0")) > before, "events are written again")
        found["refused"] = (await pipeline.stats()).refused
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2])))))
