"""The daemon's side of registering ahead, against a standby that answers from a thread."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from keystage.bench.load_bundles import STAGE, write_bundle
from keystage.keysmanager import daemon_ahead, daemon_needs
from keystage.keysmanager.api import Ok, Parameters, Refused, Register, Registered, StageName, Unregister
from keystage.keysmanager.channel import Channel, Told, pair
from keystage.keysmanager.daemon_ahead import Ahead, release
from keystage.keysmanager.daemon_forker import Forker, Life
from keystage.keysmanager.daemon_loads import Raw
from keystage.keysmanager.daemon_standbys import Standby, Standbys, Wish
from keystage.keysmanager.ledger import Ledger, LedgerSettings
from keystage.keysmanager.ledger_state import Entry, Held

WAIT_S = 10.0
Answer = Callable[[Told], Told | None]


class Scene:
    """One idle standby (a process that does nothing), one segment in memory, and their daemon's parts."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], answer: Answer) -> None:
        pipeline = write_bundle(folder / "b", "b", 0.01, "float32", 1)
        spec = pipeline.stages[STAGE]
        self.identity = spec.identity
        env = {
            "KEYSTAGE_STAGES": str(STAGE),
            "KEYSTAGE_BUNDLE": str(folder / "b"),
            "KEYSTAGE_DEVICE": "cpu",
        }
        parameters = Parameters(
            name=StageName((folder / "b").as_uri(), STAGE), pipeline="b", identity=spec.identity,
            dtype="float32", file=spec.file, nbytes=spec.nbytes, chunks=tuple(spec.chunks),
        )  # fmt: skip
        content = (folder / "b" / "pipeline.json").read_bytes()
        shape = daemon_needs.of(env).shape(parameters, content)
        self.nbytes = spec.nbytes
        self.heard: list[Told] = []
        ours, theirs = pair()
        threading.Thread(target=self._answer, args=(Channel(theirs), answer), daemon=True).start()
        self.standby = Standby(shape, Forker(ours, "standby 0"), Life(process.pid))
        self.standby.is_ready = True
        ledger = Ledger(LedgerSettings())
        held = Held(spec.identity, spec.nbytes)
        now_s = time.monotonic()
        ledger.state.entries[spec.identity] = Entry(parameters, raw=held, uses=1, used_at_s=now_s)
        wish = Wish(env, -1)
        raw = Raw(0, 0, parameters, "")  # any descriptor: this standby does not look at it
        self.standbys = cast(
            "Standbys", SimpleNamespace(all=lambda: [self.standby], wish=lambda name: wish if name else None)
        )
        names: Any = SimpleNamespace(pipeline=lambda _: content)
        loads: Any = SimpleNamespace(raw=lambda identity: raw if identity == spec.identity else None)
        self.ahead = Ahead(ledger, names, loads, self.standbys, 1 << 30)

    def _answer(self, channel: Channel, answer: Answer) -> None:
        while (received := channel.receive()) is not None:
            message, fds = received
            for fd in fds:
                os.close(fd)
            self.heard.append(message)
            if (said := answer(message)) is not None:
                channel.send(said)
        channel.close()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Lets the daemon look until something is so, and twice more."""
        task = asyncio.create_task(self.ahead.run())
        try:
            async with asyncio.timeout(WAIT_S):
                while not is_so():
                    await asyncio.sleep(0.01)
                await asyncio.sleep(2.5 * daemon_ahead.LOOK_S)
        finally:
            task.cancel()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as started:
        yield started
        started.kill()


def test_a_segment_is_registered_step_by_step_and_let_go_of_on_request(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    async def body() -> None:
        done = iter((0.25, 0.5, 1.0))

        def answer(message: Told) -> Told:
            if isinstance(message, Register):
                return Registered(message.parameters.identity, int(next(done) * scene.nbytes))
            return Ok()

        scene = Scene(tmp_path, process, answer)
        await scene.until(lambda: scene.ahead.registered(process.pid)[0] == (scene.identity,))
        assert [type(m) for m in scene.heard] == [Register] * 3
        assert all(isinstance(m, Register) and m.parameters.chunks == () for m in scene.heard)
        await release(scene.standbys, scene.identity)
        assert scene.heard[3:] == [Unregister(scene.identity)]
        assert (scene.standby.ahead, scene.standby.is_ending) == ({}, False)

    asyncio.run(body())


def test_a_refusal_is_told_once_and_nothing_is_asked_again(
    tmp_path: Path, process: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        scene = Scene(tmp_path, process, lambda _: Refused("5 bytes could not be pinned"))
        await scene.until(lambda: bool(scene.standby.refused))
        assert len(scene.heard) == 1
        registered, note = scene.ahead.registered(process.pid)
        assert (registered, "5 bytes could not be pinned" in note) == ((), True)
        assert caplog.text.count("could not be pinned") == 1
        assert scene.standby.is_idle

    asyncio.run(body())


@pytest.mark.parametrize("kind", [Register, Unregister])
def test_one_that_does_not_answer_is_ended(
    tmp_path: Path, process: subprocess.Popen[bytes], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_ahead, "STEP_S", 0.2)
    monkeypatch.setattr(daemon_ahead, "RELEASE_S", 0.2)

    async def body() -> None:
        def answer(message: Told) -> Told | None:
            is_answered = isinstance(message, Register) and kind is Unregister
            return Registered(scene.identity, scene.nbytes) if is_answered else None

        scene = Scene(tmp_path, process, answer)
        if kind is Unregister:
            await scene.until(lambda: bool(scene.ahead.registered(process.pid)[0]))
            await release(scene.standbys, scene.identity)
        else:
            await scene.until(scene.standby.life.ended.is_set)
        assert scene.standby.life.ended.is_set()
        assert (scene.standby.is_idle, scene.standby.ahead) == (False, {})
        assert process.wait(WAIT_S) != 0

    asyncio.run(body())


def test_a_replica_that_holds_on_is_left_alone(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_ahead, "RELEASE_S", 0.1)

    async def body() -> None:
        scene = Scene(tmp_path, process, lambda _: None)
        scene.standby.ahead[scene.identity] = scene.nbytes
        scene.standby.is_filled = True
        await release(scene.standbys, scene.identity)
        assert process.poll() is None
        scene.standby.cleared.set()
        await asyncio.wait_for(release(scene.standbys, scene.identity), WAIT_S)
        assert scene.heard == []

    asyncio.run(body())
