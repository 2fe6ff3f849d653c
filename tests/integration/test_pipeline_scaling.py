"""Scaling one stage 1 -> 3 -> 1 under load, as a person does it: POST /system/scale-function.

The gateway writes the intent, the controller acts on it, the router gives a new replica what waits
(single-pass) or a share of what runs (looping). Devices are emulated (they sleep for their service
time); processes, sockets and shared memory are real. No request may fail.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import msgspec
import pytest
from support.pipeline_world import Served, Stream, served, until

from keystage.bundle.api import Execution, emulated
from keystage.bundle.store import write

TOKENS = 450
"""Of a session: 14 s of emulated work, much longer than a slow machine takes to start two workers."""


def _bundle(folder: Path, execution: Execution) -> Path:
    bundle = folder / "bundle"
    bundle.mkdir()
    write(bundle, emulated("em", 3, execution=execution, activation_bytes=512))
    return bundle


async def _scale(pipeline: Served, function: str, replicas: int) -> None:
    credentials = ":".join(pipeline.world.credentials).encode()
    headers = {"Authorization": f"Basic {base64.b64encode(credentials).decode()}"}
    url = f"{pipeline.world.gateway_url}/system/scale-function/{function}"
    body = {"serviceName": function, "replicas": replicas}
    async with pipeline.session.post(url, json=body, headers=headers) as answer:
        assert answer.status == 202, await answer.text()
    await until(
        lambda: [r.state for r in pipeline.world.replicas(function)] == ["ready"] * replicas,
        f"{function} has {replicas} replicas",
    )


def test_waiting_items_run_on_a_new_replica(tmp_path: Path) -> None:
    async def run() -> None:
        # Stage 1 serves 12.5 items a second, 60 come at once and 20 a second after them.
        devices = ["emulated", "emulated:beta=0.08", "emulated"]
        env = {"KEYSTAGE_MAX_BATCH": "1"}
        bundle = _bundle(tmp_path, "single-pass")
        async with served(bundle, tmp_path, controller=True, device=devices, env=env) as pipeline:
            url = f"{pipeline.world.gateway_url}/function/em"
            statuses: list[int] = []
            stop = asyncio.Event()

            async def call(body: bytes) -> None:
                async with pipeline.session.post(url, data=body) as answer:
                    assert await answer.read() == body
                    statuses.append(answer.status)

            async def load() -> None:
                # Five seconds of work at once: more waits than a slow machine takes to start replicas.
                calls = [asyncio.create_task(call(b"%d" % i * 100)) for i in range(60)]
                while not stop.is_set():
                    calls.append(asyncio.create_task(call(b"%d" % len(calls) * 100)))
                    await asyncio.sleep(0.05)
                await asyncio.gather(*calls)

            loading = asyncio.create_task(load())
            await asyncio.sleep(1.0)
            await _scale(pipeline, "em-stage-1", 3)
            await asyncio.sleep(1.0)
            await _scale(pipeline, "em-stage-1", 1)
            stop.set()
            await loading
            assert set(statuses) == {200}
            assert len(statuses) > 40
            await until(lambda: _has_bound_late(pipeline), "items that waited for a replica ran on it")

    asyncio.run(run())


def _has_bound_late(pipeline: Served) -> bool:
    """Whether some item was queued before a replica was ready, and ran on it."""
    queued = {event["session"]: event["t"] for event in pipeline.log("queued", "em-0")}
    ready = {event["replica"]: event["t"] for event in pipeline.log("ready", "em-0")}
    first = min((r for r in ready if r.startswith("em-stage-1-")), default="")
    return any(
        queued[session] < ready[event["replica"]]
        for event in pipeline.log("dispatch", "em-0")
        if event["stage"] == 1 and event["replica"] != first
        for session in event["sessions"]
    )


@pytest.mark.slow
def test_running_sessions_move_to_a_new_replica(tmp_path: Path) -> None:
    async def run() -> None:
        bundle = _bundle(tmp_path, "looping")
        devices = ["emulated:beta=0.002", "emulated:alpha=0.002,beta=0.004", "emulated:beta=0.002"]
        async with served(bundle, tmp_path, controller=True, device=devices, slots=64) as pipeline:
            streams = [Stream() for _ in range(12)]
            running = asyncio.gather(
                *(
                    pipeline.stream(s, [65 + i], max_tokens=TOKENS, temperature=0)
                    for i, s in enumerate(streams)
                )
            )
            await until(lambda: all(len(s.tokens) >= 5 for s in streams), "five tokens each")
            await _scale(pipeline, "em-stage-1", 3)
            await until(lambda: len(pipeline.log("move", "em-0")) >= 2, "sessions moved")
            await _scale(pipeline, "em-stage-1", 1)
            await running
            assert [s.error for s in streams] == [None] * 12
            assert [len(s.tokens) for s in streams] == [TOKENS] * 12

            def moved() -> int:
                return sum(len(move["sessions"]) for move in pipeline.log("move", "em-0"))

            await until(lambda: moved() >= 8, "eight sessions moved")
            # The new replicas really stepped: they logged waves of their own.
            await until(lambda: min(_shares(pipeline).values()) > 0, "waves of every replica")
            assert len(_shares(pipeline)) == 3

    asyncio.run(run())


def _shares(pipeline: Served) -> dict[str, int]:
    """Waves per replica that stage 1 ever had."""
    shares: dict[str, int] = {}
    for file in pipeline.events.glob("em-stage-1-*.jsonl"):
        lines = [msgspec.json.decode(line) for line in file.read_bytes().split(b"\n")[:-1]]
        shares[file.stem] = sum(line["event"] == "wave" and line["rows"] > 0 for line in lines)
    return shares
