"""Workers that come and go leave nothing behind in a router: no connection, no descriptor, no name."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from keystage.bundle.api import emulated
from keystage.router import turned_away
from keystage.router.admission import AdmissionBounds
from keystage.router.node import RouterNode
from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.wire.mailbox import Mailbox
from keystage.wire.opening import node_identity, open_router

STAGES = 2
ROUNDS = 6
AT_ONCE = 4
WAIT_S = 30.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that lives as long as the test: what the workers say they are."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {WAIT_S:g} s: {what}"
        await asyncio.sleep(0.005)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def known(mailbox: Mailbox) -> int:
    """Peers with an outbox or a name that is kept."""
    return len(mailbox._outboxes.keys() | set(mailbox._senders.values()))


class Coming:
    """A worker's mailbox that says what a worker says."""

    def __init__(self, folder: Path, context: zmq.Context[zmq.Socket[bytes]], name: str, stage: int) -> None:
        self.replica = name
        self.stage = stage
        self.mailbox = Mailbox(f"ipc://{folder}/{name}.w", context)

    def come(self, router: str, pid: int) -> None:
        hello = api.Hello(
            api.WIRE_VERSION, "em", (self.stage,), self.replica, f"emulated-em-{self.stage}", "cpu",
            4, 1000, 1, self.mailbox.address, pid, node_identity(), True,
        )  # fmt: skip
        self.mailbox.send(router, hello)
        self.mailbox.send(router, api.Ready(self.replica))

    def go(self, router: str) -> None:
        self.mailbox.send(router, api.Bye(self.replica))


def test_workers_that_leave_together_leave_nothing_open(folder: Path, pid: int) -> None:
    """Those that remain are told who left: they may be about to leave themselves."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    async def run() -> None:
        router = f"ipc://{folder}/em.router"
        mailbox = open_router(router)
        node = RouterNode(
            emulated("em", STAGES, execution="looping"),
            mailbox,
            AdmissionBounds(),
            EventLog(None, "em"),
            1 << 20,
        )
        node.start()
        Coming(folder, context, "first", 0).mailbox.close()  # from now on ZeroMQ's own threads are there
        at_first = descriptors()
        try:
            for round_ in range(ROUNDS):
                workers = [
                    Coming(folder, context, f"w{round_}-{k}", k % STAGES) for k in range(STAGES * AT_ONCE)
                ]
                for worker in workers:
                    worker.come(router, pid)
                await until(lambda: len(node.fleet.workers) == STAGES * AT_ONCE, "all workers are known")
                for worker in workers:
                    worker.go(router)
                await until(lambda: not node.fleet.workers, "all workers are gone")
                await asyncio.sleep(0)
                for worker in workers:
                    worker.mailbox.close(1.0)
                assert known(mailbox) == 0
                # ZeroMQ's own thread closes sockets a moment later than we.
                await until(lambda: descriptors() <= at_first, "every descriptor is closed again")
        finally:
            await node.stop()

    try:
        asyncio.run(run())
    finally:
        context.destroy(linger=0)


def test_a_stranger_that_never_answers_is_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat that is read after its worker's end: the router asks who it is, and nobody answers."""
    monkeypatch.setattr(turned_away, "PAUSE_S", 0.2)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    async def run() -> None:
        router = f"ipc://{folder}/em.router"
        mailbox = open_router(router)
        node = RouterNode(
            emulated("em", 1, execution="looping"), mailbox, AdmissionBounds(), EventLog(None, "em"), 1 << 20
        )
        node.start()
        try:
            late = Coming(folder, context, "late", 0)
            late.mailbox.send(router, api.Heartbeat("late", "ready", 0, 0, [0.0], [0], [0], 1, 1, 0))
            await until(lambda: known(mailbox) == 1, "the stranger is asked who it is")
            late.mailbox.close(1.0)
            await until(lambda: known(mailbox) == 0, "the stranger is forgotten")
        finally:
            await node.stop()

    try:
        asyncio.run(run())
    finally:
        context.destroy(linger=0)
    assert not os.path.exists(folder / "late.w")  # noqa: PTH110
