"""Batching live: real router and worker processes of emulated devices, the same arrivals in every mode.

Deadlines are generous against the times computed, so that a busy machine is no reason to fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from support.pipeline_world import Served, until

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

DEVICE = "emulated:alpha=0.002,beta=0.04"
GAP_S = 0.01
ITEMS = 60
DEADLINE_S = 1.5


@contextlib.asynccontextmanager
async def pipelines(home: Path, workers: int, **modes: dict[str, str]) -> AsyncIterator[list[Served]]:
    """One pipeline of one stage for each name, with these variables."""
    async with LocalWorld(home / "home", gateway_port=None, controller=False) as world:
        for name, env in modes.items():
            pipeline = emulated(name, 1, execution="single-pass", activation_bytes=64)
            bundle = home / name
            bundle.mkdir()
            write(bundle, pipeline)
            env = {"KEYSTAGE_EVENTS": str(home / "events"), **env}
            await world.deploy(*deployments_for(bundle, pipeline, device=DEVICE, env=env))
            await world.scale(f"{name}-stage-0", workers)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            served = []
            for name in modes:
                await world.wait_ready(f"{name}-stage-0", workers, 60)
                address = (await world.wait_ready(name, 1, 60))[0].address
                served.append(Served(world, name, f"http://{address}", home / "events", session))
            yield served


async def ask(pipeline: Served, deadline_s: float | None = DEADLINE_S) -> tuple[int, bytes, float]:
    """Status, body and latency."""
    headers = {} if deadline_s is None else {"X-Keystage-Deadline-S": str(deadline_s)}
    began_s = time.monotonic()
    async with pipeline.session.post(f"{pipeline.router}/", data=b"x" * 64, headers=headers) as answer:
        return answer.status, await answer.read(), time.monotonic() - began_s


async def steady(pipeline: Served, deadline_s: float | None = DEADLINE_S) -> list[tuple[int, bytes, float]]:
    """The arrivals that every mode gets."""
    tasks = []
    for _ in range(ITEMS):
        tasks.append(asyncio.create_task(ask(pipeline, deadline_s)))
        await asyncio.sleep(GAP_S)
    return await asyncio.gather(*tasks)


def rows(pipeline: Served) -> list[int]:
    return [batch["rows"] for batch in pipeline.log("batch", f"{pipeline.name}-stage-0")]


@pytest.mark.slow
def test_deferred_batches_are_larger_and_deadlines_hold(tmp_path: Path) -> None:
    async def work() -> None:
        modes = {
            "eager": {"KEYSTAGE_BATCHING": "eager"},
            "waits": {"KEYSTAGE_BATCHING": "timeout:100"},
            "defers": {"KEYSTAGE_BATCHING": "deferred"},
        }
        async with pipelines(tmp_path, 3, **modes) as (eager, waits, defers):
            for pipeline in (eager, waits, defers):
                await asyncio.gather(
                    *(ask(pipeline, None) for _ in range(5))
                )  # its first batches are its fit
            answers = await asyncio.gather(*(steady(pipeline) for pipeline in (eager, waits, defers)))
            stats = [await pipeline.stats() for pipeline in (eager, waits, defers)]
        for answered in answers:
            assert {status for status, _, _ in answered} == {200}
        # Event logs are complete once the workers have ended.
        means = [sum(found) / len(found) for found in map(rows, (eager, waits, defers))]
        assert means[1] > 1.5 * means[0]
        assert means[2] > 1.5 * means[0]
        for found, of_pipeline in zip(stats, (eager, waits, defers), strict=True):
            counters = found.stages[0]
            assert sum(counters.batch_sizes) == len(rows(of_pipeline))
            assert (counters.due, counters.dropped) == (ITEMS, 0)
        idle = [[r.idle_s / r.served_s for r in found.replicas] for found in stats]
        assert sum(idle[2]) > sum(idle[0])

    asyncio.run(work())


@pytest.mark.slow
def test_late_requests_are_refused_or_wait_behind(tmp_path: Path) -> None:
    async def work() -> None:
        common = {
            "KEYSTAGE_BATCHING": "deferred",
            "KEYSTAGE_MAX_BATCH": "2",
            "KEYSTAGE_SLO": '{"deadline_s": 0.4}',
        }
        modes = {"strict": {**common, "KEYSTAGE_LATE": "refuse"}, "mild": common}
        async with pipelines(tmp_path, 1, **modes) as (strict, mild):
            for pipeline in (strict, mild):
                assert (await ask(pipeline, None))[0] == 200
                assert (await ask(pipeline, None))[0] == 200
            # 40 items of 22 ms at least, at once: half a second's work more than the objective allows.
            refused = await asyncio.gather(*(ask(strict, None) for _ in range(40)))
            served = await asyncio.gather(*(ask(mild, None) for _ in range(40)))
            strict_stats, mild_stats = await strict.stats(), await mild.stats()
        assert {status for status, _, _ in refused} == {200, 504}
        errors = [msgspec.json.decode(body)["error"] for status, body, _ in refused if status == 504]
        assert {error["code"] for error in errors} == {"deadline_exceeded"}
        said = (
            "its deadline of 0.4 s cannot be met any more",
            "left of its deadline of 0.4 s, which is less",
        )
        assert all(any(words in error["message"] for words in said) for error in errors)
        assert {status for status, _, _ in served} == {200}
        assert strict_stats.stages[0].dropped == strict_stats.refused["deadline_exceeded"] > 0
        assert mild_stats.stages[0].late > 0
        assert mild_stats.stages[0].dropped == 0

    asyncio.run(work())


@pytest.mark.slow
def test_a_worker_killed_mid_batch_costs_no_item_and_clients_may_leave(tmp_path: Path) -> None:
    async def work() -> None:
        async with pipelines(tmp_path, 2, defers={"KEYSTAGE_BATCHING": "deferred"}) as (pipeline,):
            assert (await ask(pipeline, None))[0] == 200
            waiting = asyncio.create_task(ask(pipeline, 10.0))
            leaving = [asyncio.create_task(ask(pipeline, 10.0)) for _ in range(3)]
            arriving = asyncio.create_task(steady(pipeline, 10.0))
            await asyncio.sleep(0.1)
            for task in leaving:
                task.cancel()
            (victim, _) = pipeline.world.replicas("defers-stage-0")
            os.kill(victim.pid, signal.SIGKILL)
            answers = [*(await arriving), await waiting]
            assert {status for status, _, _ in answers} == {200}
            stats = await pipeline.stats()
            # Those that left may have been served before they did.
            assert 1 + len(answers) <= stats.completed <= 1 + len(answers) + len(leaving)
            assert [stage.in_flight + stage.queue for stage in stats.stages] == [0]
            await until(
                lambda: sum(r.state == "ready" for r in pipeline.world.replicas("defers-stage-0")) == 2,
                "a new worker",
            )
            assert (await ask(pipeline, 5.0))[0] == 200

    asyncio.run(work())


def test_nonsense_ends_the_router_by_name(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    write(bundle, emulated("p", 1, execution="single-pass"))
    env = {
        **os.environ,
        "KEYSTAGE_PIPELINE": "p",
        "KEYSTAGE_BUNDLE": bundle.as_uri(),
        "KEYSTAGE_ROUTER": f"ipc://{tmp_path}/r",
        "KEYSTAGE_BATCHING": "timeout:soon",
        "KEYSTAGE_LATE": "ignore",
        "KEYSTAGE_SLO": '{"deadline_s": -1}',
    }
    ended = subprocess.run(
        [sys.executable, "-m", "keystage.router.app"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "timeout needs milliseconds, 0 to 60000 (timeout:5), not 'soon'" in ended.stderr
    assert "'ignore' must be demote or refuse" in ended.stderr
    assert "deadline_s must be more than 0 and finite, it is -1" in ended.stderr
