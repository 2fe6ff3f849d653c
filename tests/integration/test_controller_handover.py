"""Controllers that are killed, stopped, or one too many: replica numbers go on as if there were one.

Real processes: `keystage up` with its own controller, a second one on the same control socket, a pipeline of
emulated devices under load. What is watched is every number the supervisor was told, not a sample of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from support.local_function import authorization
from support.pipeline_world import Served, served, until

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.controller.decisions import replay
from keystage.controller.seat import Seat
from keystage.local.api import Deployment, Intent, Override
from keystage.local.events import Intended
from keystage.local.world import LocalWorld

FUNCTION = Deployment(
    service="files",
    envProcess=f"{sys.executable} -m http.server --bind 127.0.0.1 --directory /dev/null $PORT",
)


class Numbers:
    """Every replica number a world's supervisor was told, by function."""

    def __init__(self, world: LocalWorld) -> None:
        self.seen: dict[str, list[int]] = {}
        self._world = world
        handle = world.supervisor.handle

        def watched(event: object) -> None:
            handle(event)  # type: ignore[arg-type]
            self.note()

        world.supervisor.handle = watched  # type: ignore[method-assign,assignment]
        self.note()

    def note(self) -> None:
        for record in self._world.supervisor.view().functions:
            if record.desired is not None:
                seen = self.seen.setdefault(record.deployment.service, [])
                if not seen or seen[-1] != record.desired:
                    seen.append(record.desired)


async def _kill(world: LocalWorld) -> None:
    """Ends the world's controller with SIGKILL, and waits for the next one."""
    assert world.controller is not None
    assert world.controller.process is not None
    restarts = world.controller.restarts
    os.kill(world.controller.process.pid, signal.SIGKILL)
    controller = world.controller
    await until(
        lambda: controller.restarts > restarts and controller.process is not None, "it is started anew"
    )


def _decisions(home: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (home / "decisions.jsonl").read_bytes().count(b"\n")
    return 0


@contextlib.contextmanager
def _second(world: LocalWorld, home: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[str]]]:
    """Another controller on the same control socket, with a state folder of its own, and what it says."""
    env = {**os.environ, "KEYSTAGE_CONTROL": str(world.home.control), "KEYSTAGE_HOME": str(home)}
    process = subprocess.Popen(
        [sys.executable, "-m", "keystage.controller.app"], env=env, stderr=subprocess.PIPE
    )
    lines: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        lines.extend(line.decode() for line in process.stderr)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process, lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def test_a_second_controller_stands_by_and_takes_over_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        home, other = tmp_path / "home", tmp_path / "other"
        async with LocalWorld(home, gateway_port=None, controller=True) as world:
            await world.deploy(FUNCTION)
            await world.wait_ready("files", 1, 60)
            numbers = Numbers(world)
            await until(lambda: _decisions(home) > 0, "the first one decides")
            with _second(world, other) as (process, lines):
                await until(lambda: any("this one stands by" in line for line in lines), "it says so", 60)
                assert world.controller is not None
                assert world.controller.process is not None
                first = world.controller.process.pid
                assert f"(process {first})" in "".join(lines)
                override = Override(2, time.time() + 600)
                world.supervisor.handle(Intended("files", Intent(override=override)))
                await until(lambda: world.function("files").desired == 2, "the first one acts")
                assert _decisions(other) == 0
                os.kill(first, signal.SIGKILL)
                await until(lambda: _decisions(other) > 0, "the second one decides", 60)
                override = Override(3, time.time() + 600)
                world.supervisor.handle(Intended("files", Intent(override=override)))
                await until(lambda: world.function("files").desired == 3, "the second one acts")
                seat = world.home.control.with_name(f"{world.home.control.name}.controller")
                assert int(seat.resolve().read_text()) == process.pid
                assert world.controller.process is None or world.controller.process.pid != process.pid
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, 60) == 0
            before = _decisions(home)
            await until(lambda: _decisions(home) > before, "the world's own one decides again", 60)
            assert numbers.seen["files"] in ([1, 2, 3], [2, 3])

    asyncio.run(scenario())


def test_a_seat_is_had_by_one_and_free_when_its_holder_is_gone(tmp_path: Path) -> None:
    file, stop = tmp_path / "seat", threading.Event()
    first, second = Seat(file), Seat(file)
    assert first.wait(stop)
    waiting = threading.Thread(target=second.wait, args=(stop,))
    waiting.start()
    waiting.join(1.0)
    assert (first.is_taken, second.is_taken, waiting.is_alive()) == (True, False, True)
    first.leave()
    waiting.join(60)
    assert (first.is_taken, second.is_taken) == (False, True)
    file.unlink()  # whoever removes the file does not make two
    third = Seat(file)
    assert third.wait(stop)
    second.leave()
    third.leave()
    stop.set()
    assert not Seat(tmp_path / "nowhere" / "seat").wait(stop)


@contextlib.asynccontextmanager
async def _pipeline(folder: Path) -> AsyncIterator[Served]:
    """The second stage takes 0.1 s an item, and 20 come a second: it needs more than one replica."""
    bundle = folder / "bundle"
    bundle.mkdir()
    write(bundle, emulated("em", 3, execution="single-pass", activation_bytes=512))
    devices = ["emulated", "emulated:beta=0.1", "emulated"]
    env = {"KEYSTAGE_MAX_BATCH": "1"}
    async with served(bundle, folder, controller=True, device=devices, env=env) as pipeline:
        yield pipeline


class Load:
    """Open-loop calls at a rate; every one must be answered with what it sent."""

    def __init__(self, pipeline: Served) -> None:
        self.rate_rps = 20.0
        self.answered = 0
        self._pipeline = pipeline
        self._url = f"{pipeline.world.gateway_url}/function/em"
        self._calls: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._send())

    def burst(self, calls: int) -> None:
        self._calls += [asyncio.create_task(self._call(b"%d" % i * 100)) for i in range(calls)]

    async def end(self) -> None:
        self._stop.set()
        await self._task
        await asyncio.gather(*self._calls)
        assert self.answered == len(self._calls)

    async def _send(self) -> None:
        while not self._stop.is_set():
            self.burst(1)
            await asyncio.sleep(1 / self.rate_rps)

    async def _call(self, body: bytes) -> None:
        async with self._pipeline.session.post(self._url, data=body) as answer:
            assert await answer.read() == body
            assert answer.status == 200
        self.answered += 1


def _falls(numbers: list[int]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in itertools.pairwise(numbers) if b < a]


@pytest.mark.slow
def test_a_killed_controller_takes_no_replica_from_steady_load(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _pipeline(tmp_path) as pipeline:
            load = Load(pipeline)
            home = pipeline.world.home.path
            await until(lambda: load.answered > 100, "some load")
            await until(lambda: (pipeline.world.function("em-stage-1").desired or 0) >= 2, "what it needs")
            held = {f"em-stage-{k}": pipeline.world.function(f"em-stage-{k}").desired or 0 for k in range(3)}
            numbers = Numbers(pipeline.world)
            for _ in range(4):
                await _kill(pipeline.world)
                before, answered = _decisions(home), load.answered
                await until(lambda: _decisions(home) > before + 8, "it decides again")  # noqa: B023
                await until(lambda: load.answered > answered + 60, "three seconds of load")  # noqa: B023
            await load.end()
            assert numbers.seen["em-stage-1"][0] == held["em-stage-1"]
            for function, least in held.items():
                # At most what damping gives back, one at a time: a hand-over by itself takes none.
                assert all(a - b == 1 for a, b in _falls(numbers.seen[function])), numbers.seen
                assert min(numbers.seen[function]) >= min(least, 2 if function == "em-stage-1" else 1)
            _, differences = replay(home / "decisions.jsonl")
            # A line that was being written when its controller was killed is garbled, nothing else.
            assert all("not a decision" in difference.text for difference in differences), differences
            assert len(differences) <= 4

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_killed_controller_takes_no_replica_from_a_burst(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _pipeline(tmp_path) as pipeline:
            load = Load(pipeline)
            await until(lambda: load.answered > 60, "some load")
            numbers = Numbers(pipeline.world)
            load.burst(60)  # six seconds of work for one replica
            await until(lambda: (pipeline.world.function("em-stage-1").desired or 0) >= 4, "it is answered")
            home = pipeline.world.home.path
            most = pipeline.world.function("em-stage-1").desired or 0
            await _kill(pipeline.world)
            before = _decisions(home)
            await until(lambda: _decisions(home) > before + 8, "the next one decides")
            after = numbers.seen["em-stage-1"][numbers.seen["em-stage-1"].index(most) :]
            assert _falls(after) == [], numbers.seen
            await load.end()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_wish_is_kept_and_ends_although_controllers_die(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with LocalWorld(tmp_path / "home", gateway_port=0, controller=True) as world:
            await world.deploy(FUNCTION)
            await world.wait_ready("files", 1, 60)
            numbers = Numbers(world)
            override = Override(3, time.time() + 8)
            world.supervisor.handle(Intended("files", Intent(override=override)))
            await until(lambda: world.function("files").desired == 3, "the wish is acted on")
            await _kill(world)
            before = _decisions(world.home.path)
            await until(lambda: _decisions(world.home.path) > before, "the next one decides")
            assert world.function("files").desired == 3
            await until(lambda: world.function("files").override is None, "the wish ends")
            assert time.time() >= override.expires_at_s
            assert numbers.seen["files"] in ([1, 3], [3])

    asyncio.run(scenario())


SET_CLOCK = """
import os, time
read = time.time
def told():
    with open(os.environ["CLOCK_IS_AHEAD_S"]) as file:
        return read() + float(file.read())
time.time = told
"""


@pytest.mark.slow
@pytest.mark.parametrize("ahead_s", [-3 * 3600, 3 * 3600])
def test_the_clock_of_gateway_and_controller_may_be_set_by_hours(tmp_path: Path, ahead_s: int) -> None:
    """Wishes by the gateway, one from before the clock is set and one from after, hold their ten seconds."""

    async def scenario() -> None:
        (tmp_path / "sitecustomize.py").write_text(SET_CLOCK)
        clock, following = tmp_path / "ahead", tmp_path / "following"
        clock.write_text("0")
        env = {"PYTHONPATH": str(tmp_path), "CLOCK_IS_AHEAD_S": str(clock), "KEYSTAGE_OVERRIDE_S": "10"}
        async with (
            LocalWorld(tmp_path / "home", gateway_port=0, controller=True, env=env) as world,
            aiohttp.ClientSession(headers=authorization(*world.credentials)) as session,
        ):

            async def ask(replicas: int) -> float:
                asked_s, url = time.monotonic(), f"{world.gateway_url}/system/scale-function/files"
                async with session.post(url, json={"serviceName": "files", "replicas": replicas}) as answer:
                    assert answer.status == 202
                await until(lambda: world.function("files").desired == replicas, "the wish is acted on")
                return asked_s

            async def ends(asked_s: float) -> None:
                await until(lambda: world.function("files").override is None, "it ends")
                assert 9 < time.monotonic() - asked_s < 60

            await world.deploy(FUNCTION)
            await world.wait_ready("files", 1, 60)
            asked_s = await ask(2)
            following.write_text(str(ahead_s))
            following.replace(clock)
            await ends(asked_s)
            await ends(await ask(3))
            assert world.function("files").desired == 3

    asyncio.run(scenario())
