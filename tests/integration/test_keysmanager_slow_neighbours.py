"""Homes that hang, peers that are busy, sockets that are full, homes none can read: bounded, by name."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest
from support.keysmanager_bundles import (
    FilesBackend,
    answer_range,
    asked_range,
    content,
    folder_server,
    odd_server,
    parameters_of,
    peer,
    serving,
    three_chunks,
    write_stages,
)
from support.keysmanager_daemon import MB, Node, Run, name_of, node_of, running
from support.keysmanager_forks import random_bundle

from keystage.bundle.errors import BundleError
from keystage.keysmanager import app, client, daemon_names, loader_lanes, peer_transfer
from keystage.keysmanager.api import Invalidate, Ok, Parameters, StageName, Standbys
from keystage.keysmanager.channel import Channel
from keystage.keysmanager.client import KeysManagerClient, KeysManagerGone, KeysManagerRefused
from keystage.keysmanager.daemon_names import Names
from keystage.keysmanager.loader import load
from keystage.keysmanager.loader_source import LoadError
from keystage.keysmanager.source_disk import DiskSource

HUNG, FINE = "file:///hung", "file:///fine"


class Shelf:
    """Bundles by address; one of them hangs until it is let go."""

    def __init__(self, hung: str) -> None:
        self.hung = hung
        self.let_go = threading.Event()
        self.let_go.set()
        self.reads = 0

    def resolve(self, name: StageName) -> tuple[Parameters, bytes]:
        if name.bundle == self.hung:
            self.reads += 1
            assert self.let_go.wait(30)
        parameters = Parameters(
            name=name, pipeline="p", identity=f"{name.bundle}-{name.stage}", dtype="float32", file="f",
            nbytes=4, chunks=(),
        )  # fmt: skip
        return parameters, b"{}"


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf(HUNG)
    yield made
    made.let_go.set()


@pytest.mark.parametrize("hung", [HUNG, "http://hung.example/b"])
def test_a_home_that_hangs_holds_up_no_other_and_keeps_its_last_word(
    hung: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.hung = hung
    other = FINE if hung == HUNG else "http://fine.example/b"
    known, new = StageName(hung, 0), StageName(hung, 1)
    fine, fine_new = StageName(other, 0), StageName(other, 1)

    async def body() -> None:
        names = Names(shelf, lambda _: None)
        for name in (known, fine):
            assert (await names.resolve(name))[0].name == name
        shelf.let_go.clear()
        monkeypatch.setattr(daemon_names, "PATIENCE_S", 0.05)
        for _ in range(daemon_names.READS + 2):  # as often as the list is renewed while it hangs
            found = await names.resolve_known([known, new, fine])
            assert [parameters.name for parameters in found] == [known, fine]
        for name in (fine, fine_new):
            assert (await names.resolve(name))[0].name == name
        await names.recheck()
        assert shelf.reads == 2  # one thread hangs there, not more
        shelf.let_go.set()
        while len(await names.resolve_known([known, new, fine])) < 3:
            await asyncio.sleep(0.001)
        names.close()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_who_wants_a_hung_home_hears_so_within_the_bound(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_names, "RESOLVE_S", 0.05)
    shelf.let_go.clear()

    async def body() -> None:
        names = Names(shelf, lambda _: None)
        for _ in range(2):
            with pytest.raises(BundleError, match=r"not read within 0\.05 s"):
                await names.resolve(StageName(HUNG, 0))
        shelf.let_go.set()
        monkeypatch.setattr(daemon_names, "RESOLVE_S", 30.0)
        assert (await names.resolve(StageName(HUNG, 0)))[0].name.bundle == HUNG
        names.close()

    asyncio.run(body())


# ------------------------------------------------------------------ peers


def busy_first(times: int, body: bytes) -> contextlib.AbstractContextManager[str]:
    """A peer that says busy so many times, then serves; a negative number: always."""
    left = [times]
    lock = threading.Lock()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        with lock:
            is_busy = left[0] != 0
            left[0] -= left[0] > 0
        if is_busy:
            handler.send_response(503)
            handler.send_header("Retry-After", "0")
            handler.send_header("Content-Length", "4")
            handler.end_headers()
            handler.wfile.write(b"busy")
            return
        first, last = asked_range(handler)
        answer_range(handler, body[first : last + 1], len(body))

    return odd_server(answer)


def test_a_busy_peer_is_asked_again(tmp_path: Path) -> None:
    bundle = three_chunks(tmp_path)
    wanted = parameters_of(bundle)
    right = (bundle / wanted.file).read_bytes()
    with busy_first(6, right) as url:
        loaded = asyncio.run(load(wanted, [peer(url, wanted)]))
    assert content(loaded.fd, loaded.nbytes) == right
    assert (loaded.source, loaded.note) == ("peer", "")


def test_a_peer_that_stays_busy_is_given_up_for_the_next_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_lanes, "BUSY_S", 0.05)
    bundle = three_chunks(tmp_path)
    wanted = parameters_of(bundle)
    with busy_first(-1, b"") as url:
        loaded = asyncio.run(
            load(wanted, [peer(url, wanted), DiskSource(bundle / wanted.file, wanted.nbytes)])
        )
        os.close(loaded.fd)
        with pytest.raises(LoadError, match=r"busy \(503, Retry-After 0\) for 0\.05 s"):
            asyncio.run(load(wanted, [peer(url, wanted)]))
    assert loaded.source == "disk"
    assert "busy (503" in loaded.note


def test_a_server_with_all_transfers_taken_names_a_pause_and_serves_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_transfer.Transfers.__init__, "__defaults__", (1,))
    bundle = three_chunks(tmp_path)
    wanted = parameters_of(bundle)

    async def body() -> None:
        async with serving(FilesBackend({wanted.identity: bundle / wanted.file})) as url:
            # Several lanes for one place: each is told to come again, none gives the peer up.
            loaded = await load(wanted, [peer(url, wanted)])
        assert (loaded.source, loaded.note) == ("peer", "")
        assert content(loaded.fd, loaded.nbytes) == (bundle / wanted.file).read_bytes()

    asyncio.run(body())


# ------------------------------------------------------------------ the daemon's own socket


def full_listener(path: Path) -> tuple[socket.socket, list[socket.socket]]:
    """A socket that accepts nobody, and connections that fill its backlog."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(0)
    waiting = []
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except BlockingIOError:
            sock.close()
            return listener, waiting
        waiting.append(sock)


def test_a_full_backlog_is_waited_for(tmp_path: Path) -> None:
    listener, waiting = full_listener(tmp_path / "k.sock")
    asked: list[object] = []

    def accept() -> None:
        for _ in range(len(waiting) + 1):
            channel = Channel(listener.accept()[0])
            if (received := channel.receive()) is not None:
                asked.append(received[0])
                channel.send(Ok())
            channel.close()

    async def body() -> None:
        asking = asyncio.create_task(KeysManagerClient(tmp_path / "k.sock").invalidate("i"))
        await asyncio.sleep(3 * client.FULL_PAUSE_S)
        assert not asking.done()
        for sock in waiting:
            sock.close()
        await asyncio.gather(asyncio.to_thread(accept), asking)

    asyncio.run(asyncio.wait_for(body(), 60))
    listener.close()
    assert asked == [Invalidate("i")]


def test_a_daemon_that_accepts_nobody_is_gone_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SHORT_S", 0.05)
    listener, waiting = full_listener(tmp_path / "k.sock")
    with pytest.raises(KeysManagerGone, match=r"accepted no connection in 0\.05 s"):
        asyncio.run(KeysManagerClient(tmp_path / "k.sock").status())
    with pytest.raises(KeysManagerGone, match=r"accepted no connection in 0\.05 s"):
        client.get_segment(tmp_path / "k.sock", StageName("file:///b", 0))
    for sock in (listener, *waiting):
        sock.close()


# ------------------------------------------------------------------ what cannot be


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """With room for nothing."""
    with node_of(tmp_path_factory.mktemp("node"), KEYSTAGE_KEYSMANAGER_MEMORY=str(2 * MB)) as found:
        yield found


@pytest.fixture
def run(daemon: Node) -> Iterator[Run]:
    yield from running(daemon)


@pytest.mark.slow
def test_a_replica_that_could_not_read_its_bundle_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    folder = write_stages(tmp_path / "b", [3 * MB])

    async def body(node: Node, url: str) -> None:
        with pytest.raises(KeysManagerRefused, match=r"no room for .*; and a replica cannot read http") as no:
            await node.fork(None, KEYSTAGE_BUNDLE=url, KEYSTAGE_STAGES="0", KEYSTAGE_DEVICE="cuda")
        assert no.value.status == 502
        replica = await node.fork(folder)  # one whose home it can read goes there itself
        assert (replica.forked.via, "no room" in replica.forked.note) == ("fork-server", True)

    with folder_server(folder) as url:
        run(lambda node: body(node, url))


def test_a_standby_of_another_class_than_the_one_wanted_is_none(run: Run, tmp_path: Path) -> None:
    bundle = random_bundle(tmp_path / "b")
    env = {
        "KEYSTAGE_PIPELINE": "random", "KEYSTAGE_ROUTER": f"ipc://{tmp_path}/router", "KEYSTAGE_REPLICA": "s",
        "KEYSTAGE_RUN": str(tmp_path), "KEYSTAGE_DEVICE": "cpu",
    }  # fmt: skip
    owner_read, owner_write = os.pipe()

    async def states(node: Node) -> list[str]:
        return [entry.state for entry in (await node.client.status()).standbys]

    async def body(node: Node) -> None:
        server = await node.wait(node.forkserver, "the fork server is there")
        os.kill(server, signal.SIGSTOP)
        wanted = Standbys(name=name_of(bundle), env=env, count=1)
        await node.client.standbys(wanted, owner_read)
        random_bundle(bundle, hidden=96)  # after the daemon has looked at it, before the standby does
        os.kill(server, signal.SIGCONT)
        await node.wait(lambda: "its bundle has changed" in node.log.read_text(), "it is refused")
        assert "idle" not in await states(node)

    run(body)
    os.close(owner_read)
    os.close(owner_write)


def test_the_first_process_of_a_namespace_says_what_that_means(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        app._warn_first_process(2)
        assert caplog.text == ""
        app._warn_first_process(1)
    assert "process 1 of its namespace" in caplog.text


def test_the_ledger_follows_a_home_that_moved() -> None:
    from support.keysmanager_ledger import Node as Ledger
    from support.keysmanager_ledger import fork, only, parameters

    from keystage.keysmanager import events

    before = parameters(1)
    after = msgspec.structs.replace(before, name=StageName("file:///moved", before.name.stage))
    ledger = Ledger()
    ledger.tell(fork(1, before))
    ledger.fail_load(before.identity)
    ledger.now_s += 100.0
    told = ledger.tell(fork(2, after))
    load_told = only(told, events.Load)
    assert isinstance(load_told, events.Load)
    assert load_told.parameters == after
