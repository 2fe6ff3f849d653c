"""A node whose KeysManager refuses, hangs, dies or is absent: a stated fall-back, never an endless wait."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keystage.bundle.api import emulated
from keystage.keysmanager.api import (
    Fork,
    Forked,
    KeyStages,
    Memory,
    NodeStatus,
    Ok,
    Refused,
    StageName,
    StatusAsked,
)
from keystage.keysmanager.channel import Channel, Told
from keystage.local.api import KeyStageList
from keystage.local.events import Deployed, Removed
from keystage.local.home import Home
from keystage.local.ledger import Bounds
from keystage.local.logs import ReplicaLog
from keystage.local.node import Node, NotForked, Patience
from keystage.local.pipeline import deployments_for
from keystage.local.program import Program
from keystage.local.supervisor import Supervisor

STATUS = NodeStatus(
    node="here",
    protocol=1,
    started_at_s=1.0,
    holders=(),
    standbys=(),
    memory=Memory(limit_bytes=4, used_bytes=3, budget_bytes=2, segment_bytes=1, origin="configured"),
    gpus=(),
    history=(),
)
COMMAND = Program(("none",), {"A": "b"}, module="keystage.worker.app")
QUICK = Patience(present_s=0.2, answer_s=0.2, fork_s=0.5, every_s=0.02)

Answer = Callable[[Told, list[int]], Coroutine[Any, Any, Told | None]]
"""What a scripted daemon says; None: it hangs up."""


@contextlib.asynccontextmanager
async def daemon(path: Path, answer: Answer) -> AsyncIterator[list[Told]]:
    """A daemon that says what a test wants; yields what it was asked."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(16)
    listener.setblocking(False)
    asked: list[Told] = []
    talks: set[asyncio.Task[None]] = set()

    async def talk(channel: Channel) -> None:
        try:
            while (received := await channel.areceive()) is not None:
                message, fds = received
                asked.append(message)
                try:
                    said = await answer(message, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
                if said is None:
                    return
                await channel.asend(said)
        finally:
            channel.close()

    async def accept() -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            connection.setblocking(False)
            talks.add(asyncio.create_task(talk(Channel(connection))))

    accepting = asyncio.create_task(accept())
    try:
        yield asked
    finally:
        for task in (accepting, *talks):
            task.cancel()
        await asyncio.gather(accepting, *talks, return_exceptions=True)
        listener.close()
        path.unlink()


async def status_or(message: Told, otherwise: Told | None) -> Told | None:
    return STATUS if isinstance(message, StatusAsked) else otherwise


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def bounded(work: Coroutine[Any, Any, None]) -> None:
    """Runs to the end, in time, and leaves no descriptor behind."""
    gc.collect()  # what tests before this one left to it
    before = descriptors()
    asyncio.run(asyncio.wait_for(work, 60.0))
    assert descriptors() == before


async def fork(node: Node, folder: Path) -> str:
    """Tries a fork; what it is refused with."""
    log = ReplicaLog(folder / "r.log")
    with pytest.raises(NotForked) as refused:
        await node.fork("r-0", COMMAND, replica_log=log, wanted_at_s=1.0)
    log.close(0.0)
    return str(refused.value)


def test_a_refusal_is_told_with_its_reason(tmp_path: Path) -> None:
    async def refuse(message: Told, _: list[int]) -> Told | None:
        return await status_or(message, Refused("no room for 5.0 GiB: 1.0 GiB free", 507))

    async def run() -> None:
        async with daemon(tmp_path / "s", refuse) as asked:
            node = Node("here", tmp_path / "s", cores=1.0, env={"C": "d"}, patience=QUICK)
            said = await fork(node, tmp_path)
            assert said == "the KeysManager of here refused: no room for 5.0 GiB: 1.0 GiB free"
            (request,) = (m for m in asked if isinstance(m, Fork))
            assert (request.replica, request.module, request.wanted_at_s) == ("r-0", COMMAND.module, 1.0)
            assert request.env == {"A": "b", "C": "d"}

    bounded(run())


def test_an_absent_daemon_is_waited_for_within_a_bound_and_not_at_all_when_it_fails(tmp_path: Path) -> None:
    async def run() -> None:
        node = Node("here", tmp_path / "s", cores=1.0, patience=QUICK)
        assert (await fork(node, tmp_path)).startswith("no KeysManager on here: ")
        patient = Node("here", tmp_path / "s", cores=1.0, patience=Patience(present_s=1e9))
        patient.is_failing = lambda: True
        assert (await fork(patient, tmp_path)).startswith("no KeysManager on here: ")

    bounded(run())


@pytest.mark.parametrize(
    ("lives", "said"),
    [
        (False, "the KeysManager of here was silent for 0.2 s"),
        (True, "the KeysManager of here forked nothing in 0.5 s"),
    ],
)
def test_a_daemon_that_hangs_is_given_up(tmp_path: Path, lives: bool, said: str) -> None:
    async def hang(message: Told, _: list[int]) -> Told | None:
        if lives and isinstance(message, StatusAsked):
            return STATUS
        await asyncio.Event().wait()
        return None

    async def run() -> None:
        async with daemon(tmp_path / "s", hang):
            node = Node("here", tmp_path / "s", cores=1.0, patience=QUICK)
            assert await fork(node, tmp_path) == said

    bounded(run())


def test_a_daemon_that_dies_while_it_forks_is_asked_again_with_other_descriptors(tmp_path: Path) -> None:
    lifelines: list[int] = []
    pid = os.getpid()

    async def die_first(message: Told, fds: list[int]) -> Told | None:
        if isinstance(message, StatusAsked):
            return STATUS
        lifelines.append(os.dup(fds[0]))
        return None if len(lifelines) == 1 else Forked(pid=pid, via="fork-server")

    async def run() -> None:
        async with daemon(tmp_path / "s", die_first):
            node = Node("here", tmp_path / "s", cores=1.0, patience=Patience())
            log = ReplicaLog(tmp_path / "r.log")
            process, forked = await node.fork("r-0", COMMAND, replica_log=log, wanted_at_s=1.0)
            assert (process.pid, forked.via) == (pid, "fork-server")
            first, second = lifelines
            assert os.read(first, 1) == b""  # what the first try may have started ends
            os.set_blocking(second, False)
            with pytest.raises(BlockingIOError):
                os.read(second, 1)
            for fd in (first, second, process._pipe, process._lifeline):
                assert fd is not None
                os.close(fd)
            log.close(0.0)

    bounded(run())


def test_key_stages_are_told_again_to_a_daemon_that_restarted(tmp_path: Path) -> None:
    started_at_s = 1.0
    is_silent = False

    async def keep(message: Told, _: list[int]) -> Told | None:
        if is_silent:
            await asyncio.Event().wait()
        return await status_or_keep(message)

    async def status_or_keep(message: Told) -> Told:
        if isinstance(message, StatusAsked):
            return msgspec.structs.replace(STATUS, started_at_s=started_at_s)
        return Ok()

    async def run() -> None:
        nonlocal started_at_s, is_silent
        async with daemon(tmp_path / "s", keep) as asked:
            node = Node("here", tmp_path / "s", cores=2.0, http="127.0.0.1:1", patience=QUICK)
            restarted = asyncio.Event()
            node.restart = restarted.set
            watching = asyncio.create_task(node.watch())

            async def lists(count: int) -> list[tuple[StageName, ...]]:
                while len(found := [m.stages for m in asked if isinstance(m, KeyStages)]) < count:
                    await asyncio.sleep(0.005)
                return found

            stages = (StageName("file:///b", 1), StageName("file:///b", 0))
            node.keep(stages)
            assert await lists(1) == [stages]
            node.keep(stages)
            started_at_s = 2.0
            assert await lists(2) == [stages, stages]
            node.keep(())
            assert (await lists(3))[-1] == ()
            assert node.record().status is not None
            is_silent = True
            await restarted.wait()
            assert node.record().status is None
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    bounded(run())


def test_a_refused_replica_runs_as_a_plain_process_and_says_why(tmp_path: Path) -> None:
    async def refuse(message: Told, _: list[int]) -> Told | None:
        return await status_or(message, Refused("not today", 507))

    pipeline = emulated("em", 1, execution="single-pass")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "pipeline.json").write_bytes(msgspec.json.encode(pipeline))
    _, stage = deployments_for(tmp_path / "b", pipeline, device="emulated")

    async def run() -> None:
        home = Home(tmp_path / "home", Path("/tmp"))
        home.open()
        async with daemon(tmp_path / "s", refuse):
            node = Node("here", tmp_path / "s", cores=1.0)
            supervisor = Supervisor(home, Bounds(), dict(os.environ), [node])
            await supervisor.start()
            supervisor.set_key_stages(KeyStageList("em", (0,)))
            supervisor.handle(Deployed(stage))
            view = supervisor.view()
            while not view.replicas or view.replicas[0].state != "ready":
                view = await supervisor.watch(view.version, 10.0)
            (record,) = view.replicas
            assert (record.node, record.via, record.source) == ("here", "process", "")
            assert record.note == "the KeysManager of here refused: not today"
            (start,) = supervisor.starts()
            assert (start.via, start.note) == ("process", record.note)
            assert [n.node for n in supervisor.nodes()] == ["here"]
            await supervisor.stop(10.0)
        home.close()

    bounded(run())


@pytest.mark.slow
def test_a_router_waits_little_for_a_fork_server_that_has_forked_before(tmp_path: Path) -> None:
    lifelines: list[int] = []

    async def take_long(message: Told, fds: list[int]) -> Told | None:
        if isinstance(message, StatusAsked):
            return STATUS
        lifelines.append(os.dup(fds[0]))
        await asyncio.sleep(60)
        return None

    pipeline = emulated("em", 1, execution="single-pass")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "pipeline.json").write_bytes(msgspec.json.encode(pipeline))
    router, _ = deployments_for(tmp_path / "b", pipeline, device="emulated")

    async def run() -> None:
        home = Home(tmp_path / "home", Path("/tmp"))
        home.open()
        async with daemon(tmp_path / "s", take_long):
            node = Node("here", tmp_path / "s", cores=1.0)
            node.has_forked = True
            supervisor = Supervisor(home, Bounds(), dict(os.environ), [node])
            await supervisor.start()
            supervisor.handle(Deployed(router))
            view = supervisor.view()
            while not view.replicas or view.replicas[0].state != "ready":
                view = await supervisor.watch(view.version, 10.0)
            (record,) = view.replicas
            assert (record.via, record.note) == ("process", "it was not forked within 2 s")
            (lifeline,) = lifelines
            assert os.read(lifeline, 1) == b""  # what may have been forked ends
            os.close(lifeline)
            await supervisor.stop(10.0)
        home.close()

    bounded(run())


def test_a_replica_that_is_no_longer_wanted_while_it_is_forked_is_given_up(tmp_path: Path) -> None:
    lifelines: list[int] = []

    async def take_long(message: Told, fds: list[int]) -> Told | None:
        if isinstance(message, StatusAsked):
            return STATUS
        lifelines.append(os.dup(fds[0]))
        await asyncio.Event().wait()
        return None

    pipeline = emulated("em", 1, execution="single-pass")
    _, stage = deployments_for(tmp_path, pipeline, device="emulated")

    async def run() -> None:
        home = Home(tmp_path / "home", Path("/tmp"))
        home.open()
        async with daemon(tmp_path / "s", take_long):
            supervisor = Supervisor(home, Bounds(), {}, [Node("here", tmp_path / "s", cores=1.0)])
            await supervisor.start()
            supervisor.handle(Deployed(stage))
            while not lifelines:
                await asyncio.sleep(0.005)
            supervisor.handle(Removed(stage.service))
            view = supervisor.view()
            while view.replicas:
                view = await supervisor.watch(view.version, 10.0)
            assert await asyncio.to_thread(os.read, lifelines[0], 1) == b""
            # Wanted and removed in one go: it was never asked for.
            supervisor.handle(Deployed(stage))
            supervisor.handle(Removed(stage.service))
            while supervisor.view().replicas:
                await asyncio.sleep(0.005)
            await supervisor.stop(10.0)
            os.close(lifelines[0])
        home.close()

    bounded(run())


class BrokenNode(Node):
    """A node with a bug."""

    async def fork(self, *_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")


def test_a_start_that_breaks_fails_by_name_and_is_tried_again(tmp_path: Path) -> None:
    pipeline = emulated("em", 1, execution="single-pass")
    _, stage = deployments_for(tmp_path, pipeline, device="emulated")

    async def run() -> None:
        home = Home(tmp_path / "home", Path("/tmp"))
        home.open()
        for number in (0, 1):  # the first is followed by the next at once
            (home.logs / f"em-stage-0-{number}.log").mkdir()
        supervisor = Supervisor(home, Bounds(), {}, [BrokenNode("here", tmp_path / "s", cores=1.0)])
        await supervisor.start()
        supervisor.handle(Deployed(stage))
        reasons: dict[str, str] = {}
        while len(reasons) < 2:
            view = await supervisor.watch(supervisor.view().version, 10.0)
            reasons |= {r.replica: r.reason for r in view.replicas if r.state == "failed"}
        assert reasons["em-stage-0-1"].startswith("its log cannot be written: [Errno 21]")
        assert reasons["em-stage-0-2"] == "was not started: [Errno 24] Too many open files"
        await supervisor.stop(10.0)
        home.close()

    bounded(run())
