"""A request that ends the workers which run it: it is failed alone, those around it are answered.

Real routers, supervisors and workers; an emulated device aborts on a token or a byte, the module of a stream
program on a word.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_world import Served, Stream, served, until

from keystage.bundle.api import emulated
from keystage.bundle.program import bundle_program
from keystage.bundle.store import write

POISON = 200
INNOCENTS = 6
NEW_TOKENS = 30


async def lost(pipeline: Served) -> list[dict[str, Any]]:
    """Workers that the router gave up, as it logged them."""
    await until(lambda: bool(pipeline.log("lost")), "a death in the log")
    return pipeline.log("lost")


def check_end(stream: Stream) -> None:
    assert stream.error is None
    assert stream.finish_reason == "length"
    assert len(stream.tokens) == NEW_TOKENS


@pytest.mark.slow
def test_a_poisoned_generation_is_failed_alone(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    write(tmp_path / "bundle", emulated("em", 2, execution="looping"))

    async def run() -> None:
        devices = (f"emulated:beta=0.02,poison={POISON}", "emulated:beta=0.02")
        async with served(tmp_path / "bundle", tmp_path / "home", device=devices, slots=16) as pipeline:
            innocents = [Stream() for _ in range(INNOCENTS)]
            tasks = [
                asyncio.create_task(
                    pipeline.stream(stream, [1, 2, 3 + i], max_tokens=NEW_TOKENS, temperature=0)
                )
                for i, stream in enumerate(innocents)
            ]
            await until(lambda: all(len(stream.tokens) >= 3 for stream in innocents), "three tokens each")
            poisoned = Stream()
            await pipeline.stream(poisoned, [POISON, 5], max_tokens=4, temperature=0)
            assert poisoned.error is not None
            assert "2 workers ended while they ran this request, the last with nothing else" in poisoned.error
            assert poisoned.error.count("SIGABRT") == 2
            await asyncio.gather(*tasks)
            for stream in innocents:
                check_end(stream)
            stats = await pipeline.stats()
            assert stats.convicted == 1
            assert stats.set_apart >= 1 + INNOCENTS
            assert stats.refused == {"stage_failed": 1}
            gone = [entry for entry in await lost(pipeline) if entry["replica"].startswith("em-stage-0")]
            assert [entry["ending"] for entry in gone] == ["SIGABRT", "SIGABRT"]

    asyncio.run(run())


@pytest.mark.slow
def test_a_poisoned_item_is_failed_alone(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    write(tmp_path / "bundle", emulated("em", 2, execution="single-pass"))

    async def ask(pipeline: Served, body: bytes) -> tuple[int, bytes]:
        async with pipeline.session.post(f"{pipeline.router}/", data=body) as answer:
            return answer.status, await answer.read()

    async def run() -> None:
        devices = ("emulated:beta=0.02", f"emulated:beta=0.02,poison={POISON}")
        async with served(tmp_path / "bundle", tmp_path / "home", device=devices, slots=64) as pipeline:
            bodies = [bytes([i, i]) for i in range(20)]
            bodies.insert(9, bytes([POISON, 1]))
            answers = await asyncio.gather(*(ask(pipeline, body) for body in bodies))
            for i, (body, (status, answer)) in enumerate(zip(bodies, answers, strict=True)):
                if i != 9:
                    assert (status, answer) == (200, body)
            status, answer = answers[9]
            assert status == 500
            assert b"2 workers ended while they ran this request" in answer
            stats = await pipeline.stats()
            assert stats.convicted == 1
            gone = [entry["ending"] for entry in await lost(pipeline)]
            assert gone == ["SIGABRT", "SIGABRT"]

    asyncio.run(run())


KILLING = '''
import json
import os

import torch

from keystage.streams.api import Message, Program, Stream, StreamModule

IN, AGAIN, OUT = Stream("in"), Stream("again"), Stream("out")


class Count(StreamModule):
    """Goes round; a request that says so ends the process in its third round."""

    is_stateful = True

    def compute(self, messages):
        done = []
        for m in messages:
            left = m.header["rounds"] - 1
            if m.header["kills"] and m.header["all"] - left == 3:
                os._exit(7)
            total = m.data["x"] if m.data else self.state.get(m.request, "total")
            self.state.put(m.request, "total", total + 1)
            done.append(m.next({} if left else {"x": total + 1}, rounds=left))
        return done

    def scatter(self, message):
        return "again" if message.header["rounds"] else "out"


def parse(body, content_type):
    found = json.loads(body)
    header = {"rounds": found["rounds"], "all": found["rounds"], "kills": found.get("kills", False)}
    return Message(header, {"x": torch.tensor([float(found["x"])])})


def render(message):
    return json.dumps(message.data["x"].tolist()).encode(), "application/json"


def program(name="killing"):
    return Program(name, {"count": Count([IN, AGAIN], [AGAIN, OUT])}, IN, OUT, parse, render)
'''


@pytest.mark.slow
def test_a_poisoned_request_of_a_stream_program_is_failed_alone(tmp_path: Path) -> None:
    handler = tmp_path / "function"
    handler.mkdir()
    (handler / "killing_handler.py").write_text(KILLING)
    bundle = bundle_program("killing_handler:program", tmp_path / "bundle", "d", {}, str(handler))

    async def ask(pipeline: Served, body: dict[str, Any]) -> tuple[int, bytes]:
        async with pipeline.session.post(f"{pipeline.router}/", json=body) as answer:
            return answer.status, await answer.read()

    async def run() -> None:
        async with served(bundle, tmp_path / "home", env={"KEYSTAGE_HANDLER": str(handler)}) as pipeline:
            bodies: list[dict[str, Any]] = [{"x": i, "rounds": 5 + i} for i in range(8)]
            bodies.insert(3, {"x": 0, "rounds": 9, "kills": True})
            answers = await asyncio.gather(*(ask(pipeline, body) for body in bodies))
            for i, (body, (status, answer)) in enumerate(zip(bodies, answers, strict=True)):
                if i != 3:
                    assert (status, json.loads(answer)) == (200, [float(body["x"]) + body["rounds"]])
            status, answer = answers[3]
            assert status == 500
            assert b"2 workers ended while they ran this request" in answer
            assert answer.count(b"exit status 7") == 2

    asyncio.run(run())


def ready_pids(pipeline: Served) -> set[int]:
    return {r.pid for r in pipeline.world.replicas("em-stage-0") if r.state == "ready"}


@pytest.mark.slow
def test_a_worker_killed_from_outside_blames_nobody(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    write(tmp_path / "bundle", emulated("em", 1, execution="looping"))

    async def run() -> None:
        device = "emulated:beta=0.02"
        async with served(tmp_path / "bundle", tmp_path / "home", device=device, slots=16) as pipeline:
            streams = [Stream() for _ in range(INNOCENTS)]
            tasks = [
                asyncio.create_task(
                    pipeline.stream(stream, [1, 2, 3 + i], max_tokens=NEW_TOKENS, temperature=0)
                )
                for i, stream in enumerate(streams)
            ]
            killed: set[int] = set()
            for kill in range(5):
                most = 2 + 4 * kill
                await until(
                    lambda most=most: all(len(s.tokens) >= most for s in streams), f"{most} tokens each"
                )
                # The supervisor may hear of the last death, and the new one's start, a little later.
                await until(lambda: bool(ready_pids(pipeline) - killed), "a living worker")
                (victim,) = ready_pids(pipeline) - killed
                killed.add(victim)
                os.kill(victim, signal.SIGKILL)
                await until(lambda kill=kill: len(pipeline.log("lost")) > kill, "the death in the log")
            await asyncio.gather(*tasks)
            for stream in streams:
                check_end(stream)
            stats = await pipeline.stats()
            assert (stats.set_apart, stats.convicted, stats.refused) == (0, 0, {})
            assert {entry["ending"] for entry in await lost(pipeline)} == {"SIGKILL from outside"}

    asyncio.run(run())
