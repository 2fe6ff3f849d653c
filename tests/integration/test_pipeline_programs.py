"""Stream programs as stages: real processes and sockets give what one process gives, whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_world import Served, served, until
from support.program_handlers import write_fork, write_paced

from keystage.bundle.program import bundle_program, program_path
from keystage.bundle.store import load
from keystage.streams.handler import open_allowed
from keystage.streams.local import run_local
from keystage.streams.programs.diffusion import request as diffusion_request

READY: dict[str, tuple[dict[str, Any], list[bytes]]] = {
    "diffusion": (
        {"image": "npy"},
        [diffusion_request(f"picture {i}", 1 + 3 * (i % 4), i) for i in range(8)],
    ),
    "language": (
        {},
        [json.dumps({"prompt": "w" * (3 + i), "max_tokens": 2 + 3 * i}).encode() for i in range(5)],
    ),
    "agents": ({}, [json.dumps({"question": f"why {i}?", "max_tokens": 3 + i}).encode() for i in range(4)]),
}


async def ask(pipeline: Served, body: bytes, path: str = "/") -> tuple[int, bytes, str]:
    headers = {"content-type": "application/json"}
    async with pipeline.session.post(f"{pipeline.router}{path}", data=body, headers=headers) as answer:
        return answer.status, await answer.read(), answer.headers["content-type"]


async def workers_are_empty(pipeline: Served) -> bool:
    stats = await pipeline.stats()
    return all(stage.queue == stage.in_flight == 0 for stage in stats.stages) and all(
        replica.held_slots == 0 for replica in stats.replicas
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["diffusion", *(pytest.param(name, marks=pytest.mark.slow) for name in ("language", "agents"))]
)
def test_ready_programs_answer_as_in_one_process(name: str, tmp_path: Path) -> None:
    options, bodies = READY[name]
    bundle = bundle_program(f"program:{name}", tmp_path / "bundle", name, options)
    run = run_local(open_allowed(program_path(name), options), bodies)
    expected = [(200, answer.body, answer.content_type) for answer in run.answers]
    visits = sum(run.executed, Counter())

    async def work() -> None:
        async with served(bundle, tmp_path / "home") as pipeline:
            together = await asyncio.gather(*(ask(pipeline, body) for body in bodies))
            assert together == expected
            for body, alone in zip(bodies, expected, strict=True):
                assert await ask(pipeline, body) == alone
            stats = await pipeline.stats()
            assert stats.execution == "program"
            assert (stats.requests, stats.completed, stats.refused) == (2 * len(bodies), 2 * len(bodies), {})
            names = [module.name for module in load(bundle).graph.modules]  # type: ignore[union-attr]
            arrivals = {names[stage.stage]: stage.arrivals for stage in stats.stages}
            assert arrivals == {module: 2 * visits[module] for module in names}
            status, body, kind = await ask(pipeline, b"{}")
            assert (status, kind) == (400, "application/json")
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
            assert await workers_are_empty(pipeline)

    asyncio.run(work())


async def held(pipeline: Served, stage: int) -> dict[str, int]:
    """Requests that each replica of a module holds: turns, and state."""
    found = {}
    for replica in pipeline.world.replicas(f"{pipeline.name}-stage-{stage}"):
        if replica.state != "ready":
            continue
        async with pipeline.session.get(f"http://{replica.address}/metrics") as answer:
            text = await answer.text()
        line = next(line for line in text.splitlines() if line.startswith("keystage_worker_sessions{"))
        found[replica.replica] = int(float(line.rpartition(" ")[2]))
    return found


async def until_held(
    pipeline: Served, stage: int, holds: Callable[[dict[str, int]], bool], what: str
) -> None:
    end_s = time.monotonic() + 60.0
    while not holds(found := await held(pipeline, stage)):
        assert time.monotonic() < end_s, f"not within 60 s: {what}, {found}"
        await asyncio.sleep(0.05)


@pytest.mark.slow
def test_workers_die_drain_and_requests_are_cancelled_in_the_loop(tmp_path: Path) -> None:
    handler, path = write_paced(tmp_path / "function"), "paced_handler:program"
    bundle = bundle_program(path, tmp_path / "bundle", "d", {"pace_s": 0.005}, handler)
    # Five seconds and more: workers tell once a second what they hold.
    bodies = [json.dumps({"x": i, "rounds": 1000 + 10 * i}).encode() for i in range(6)]
    run = run_local(open_allowed(path, {}, handler), bodies)
    expected = [(200, answer.body, answer.content_type) for answer in run.answers]
    loop = "d-stage-0"

    def both(has: dict[str, int]) -> bool:
        return len(has) == 2 and min(has.values()) > 0

    async def work() -> None:
        async with served(bundle, tmp_path / "home", env={"KEYSTAGE_HANDLER": handler}) as pipeline:
            await pipeline.world.scale(loop, 2)
            await pipeline.world.wait_ready(loop, 2)

            # One of two workers is killed while both have state.
            asking = asyncio.gather(*(ask(pipeline, body) for body in bodies))
            await until_held(pipeline, 0, both, "state at both")
            os.kill(pipeline.world.replicas(loop)[0].pid, signal.SIGKILL)
            assert await asking == expected
            replayed = (await pipeline.stats()).replayed_tokens
            assert replayed > 0

            # The one that drains ends its loops there: nothing is computed again.
            await pipeline.world.wait_ready(loop, 2)
            asking = asyncio.gather(*(ask(pipeline, body) for body in bodies))
            await until_held(pipeline, 0, both, "state at both")
            await pipeline.world.scale(loop, 1)
            assert await asking == expected
            await until(lambda: len(pipeline.world.replicas(loop)) == 1, "one is gone")
            assert (await pipeline.stats()).replayed_tokens == replayed

            # A client that goes away takes its state with it.
            call = asyncio.ensure_future(ask(pipeline, json.dumps({"x": 1, "rounds": 90_000}).encode()))
            await until_held(pipeline, 0, lambda has: sum(has.values()) > 0, "state of the request")
            call.cancel()
            await until_held(pipeline, 0, lambda has: not any(has.values()), "nothing is left")
            assert await workers_are_empty(pipeline)
            stats = await pipeline.stats()
            assert stats.completed == 2 * len(bodies)
            # Different lengths share batches: alone each visit of the loop would be one.
            assert sum(stats.stages[0].batch_sizes) < stats.stages[0].arrivals / 1.5

    asyncio.run(work())


@pytest.mark.slow
def test_a_handler_s_fork_and_join_with_faults_of_its_own(tmp_path: Path) -> None:
    handler = write_fork(tmp_path / "function")
    bundle = bundle_program("fork_handler:program", tmp_path / "bundle", handler=handler)
    bodies = [json.dumps({"x": [i / 3, -i], "rounds": 1 + i % 5}).encode() for i in range(12)]
    program = open_allowed("fork_handler:program", {}, handler)
    expected = [(200, answer.body, answer.content_type) for answer in run_local(program, bodies).answers]
    faults = {
        "compute": (500, "bad luck"),
        "refused": (422, "this one is not wanted"),
        "stream": (500, "module slow scattered to stream 'nowhere', it has more, sum-b"),
        "lost": (500, "a branch was lost: module join waits for a message of stream sum-b"),
        "render": (500, "cannot be shown"),
        "header": (500, "header field 'bad' is dict"),
        "large": (500, "KEYSTAGE_RING_BYTES"),
    }

    async def work() -> None:
        env = {"KEYSTAGE_HANDLER": handler, "KEYSTAGE_RING_BYTES": str(1 << 20)}
        async with served(bundle, tmp_path / "home", env=env) as pipeline:
            bad = [json.dumps({"x": [1.0, 2.0], "rounds": 2, "fault": fault}).encode() for fault in faults]
            *good, refused = await asyncio.gather(
                asyncio.gather(*(ask(pipeline, body) for body in bad)),
                *(ask(pipeline, body) for body in bodies),
            )
            answers, good = good[0], [*good[1:], refused]
            assert good == expected
            assert expected[0][2] == "application/vnd.numbers+json"
            for (status, body, _), (fault, (code, words)) in zip(answers, faults.items(), strict=True):
                message = json.loads(body)["error"]["message"]
                assert (status, words in message) == (code, True), (fault, status, message)
            assert (await ask(pipeline, b"{}"))[0] == 400
            for stage in range(5):
                await until_held(pipeline, stage, lambda has: not any(has.values()), "nothing is left")
            assert await workers_are_empty(pipeline)

    asyncio.run(work())
