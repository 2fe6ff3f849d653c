"""A real daemon with its fork server and holders: what askers get, and what stays behind."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.keysmanager_daemon import (
    MB,
    WAIT_S,
    Node,
    Run,
    descriptors,
    digest,
    name_of,
    node_of,
    running,
    state_of,
    write_bundle,
)
from support.keysmanager_forks import random_bundle

from keystage.bundle.store import load
from keystage.keysmanager.api import Evict, Fork, Progress, Refused, StageName, Standbys, StatusAsked
from keystage.keysmanager.channel import Channel
from keystage.keysmanager.client import KeysManagerClient, KeysManagerGone, KeysManagerRefused, get_segment
from keystage.keysmanager.segment import check_sealed


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One daemon for all tests here; every test has bundles of its own."""
    with node_of(tmp_path_factory.mktemp("node")) as found:
        yield found


@pytest.fixture
def run(daemon: Node) -> Iterator[Run]:
    yield from running(daemon)


def loads_of(daemon: Node, pipeline: str) -> int:
    """Loads that the daemon's log tells of."""
    return sum(
        f"{pipeline} stage" in line and " GB in " in line for line in daemon.log.read_text().splitlines()
    )


def test_replicas_are_forked_from_one_holder(run: Run, tmp_path: Path) -> None:
    pipeline = write_bundle(tmp_path, "shared", [3 * MB], 1)

    async def body(daemon: Node) -> None:
        first = await daemon.fork(tmp_path)
        second = await daemon.fork(tmp_path)
        assert [first.forked.via, second.forked.via] == ["holder", "holder"]
        assert [first.forked.source, second.forked.source] == ["disk", "memory"]
        assert first.forked.load_s > 0 == second.forked.load_s
        assert [await first.line(), await second.line()] == [digest(tmp_path)] * 2
        entry = await daemon.ready(pipeline.stages[0].identity)
        assert (entry.claims, entry.uses, entry.source) == (2, 2, "disk")
        first.kill()
        await daemon.wait(lambda: has_claims(daemon, entry.identity, 1), "the dead one's claim is released")

    run(body)


async def has_claims(daemon: Node, identity: str, count: int) -> bool:
    entry = await daemon.holder(identity)
    return entry is not None and entry.claims == count


def test_a_replica_without_parameters_comes_from_the_fork_server(run: Run) -> None:
    async def body(daemon: Node) -> None:
        replica = await daemon.fork(None)
        assert (replica.forked.via, replica.forked.source, await replica.line()) == (
            "fork-server",
            "",
            "none",
        )

    run(body)


def test_requests_for_one_stage_at_once_load_it_once(run: Run, daemon: Node, tmp_path: Path) -> None:
    pipeline = write_bundle(tmp_path, "at-once", [20 * MB], 2)

    async def body(daemon: Node) -> None:
        *replicas, got = await asyncio.gather(
            *(daemon.fork(tmp_path) for _ in range(3)), daemon.client.get(name_of(tmp_path))
        )
        assert {await replica.line() for replica in replicas} == {digest(tmp_path)}
        assert os.pread(got.fd, 100, 0) == (tmp_path / pipeline.stages[0].file).read_bytes()[:100]
        got.claim.close()
        os.close(got.fd)
        assert loads_of(daemon, "at-once") == 1

    run(body)


def test_a_segment_is_given_sealed_and_claimed_by_its_connection(run: Run, tmp_path: Path) -> None:
    pipeline = write_bundle(tmp_path, "given", [2 * MB, 1 * MB], 3)
    identity = pipeline.stages[1].identity

    async def body(daemon: Node) -> None:
        got = await daemon.client.get(name_of(tmp_path, 1))
        assert got.segment.parameters.identity == identity
        assert list(got.segment.parameters.chunks) == pipeline.stages[1].chunks
        assert check_sealed(got.fd) == MB
        assert hashlib.sha256(os.pread(got.fd, MB, 0)).hexdigest() == digest(tmp_path, 1)
        again = await asyncio.to_thread(get_segment, daemon.socket, name_of(tmp_path, 1))
        assert os.fstat(again.fd).st_ino == os.fstat(got.fd).st_ino
        got.claim.report(Progress("mapped", time.monotonic()))
        assert await has_claims(daemon, identity, 2)
        for each in (got, again):
            each.claim.close()
            os.close(each.fd)
        await daemon.wait(lambda: has_claims(daemon, identity, 0), "claims are released")

    run(body)


def test_a_mapped_holder_is_not_evicted_and_leaves_nothing_once_it_is(run: Run, tmp_path: Path) -> None:
    pipeline = write_bundle(tmp_path, "evicted", [2 * MB], 4)
    identity = pipeline.stages[0].identity

    async def body(daemon: Node) -> None:
        replica = await daemon.fork(tmp_path)
        entry = await daemon.ready(identity)
        with pytest.raises(KeysManagerRefused, match="1 consumers") as refused:
            await daemon.client.evict(identity)
        assert refused.value.status == 409
        replica.end()
        await daemon.wait(lambda: has_claims(daemon, identity, 0), "the claim is released")
        await daemon.client.evict(identity)
        assert await daemon.holder(identity) is None
        assert state_of(entry.pid) in ("", "Z")
        held = [fd for pid in daemon.processes() for fd in descriptors(pid) if "evicted" in fd]
        assert held == []
        with pytest.raises(KeysManagerRefused, match="no holder") as unknown:
            await daemon.client.evict(identity)
        assert unknown.value.status == 404

    run(body)


def test_a_raw_segment_is_dropped_for_the_packed_form_and_loaded_again_when_wanted(
    run: Run, tmp_path: Path
) -> None:
    random_bundle(tmp_path, hidden=128, width=512, layers=4)
    stage = load(tmp_path).stages[0]

    async def body(daemon: Node) -> None:
        await daemon.fork(tmp_path, device="cpu")
        packed = await daemon.ready(stage.identity)
        got = await daemon.client.get(name_of(tmp_path))
        assert hashlib.sha256(os.pread(got.fd, stage.nbytes, 0)).hexdigest() == digest(tmp_path)
        both = await daemon.ready(stage.identity)
        assert both.pid == packed.pid
        assert both.nbytes >= packed.nbytes + stage.nbytes
        got.claim.close()
        os.close(got.fd)

        async def is_dropped() -> bool:
            return (await daemon.ready(stage.identity)).nbytes == packed.nbytes

        await daemon.wait(is_dropped, "the raw form is dropped again")

    run(body)


def test_what_cannot_be_understood_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    write_bundle(tmp_path, "strange", [MB], 9)

    async def refusal(ask: Coroutine[Any, Any, Any]) -> tuple[int, str]:
        with pytest.raises(KeysManagerRefused) as refused:
            await ask
        return refused.value.status, refused.value.reason

    async def body(daemon: Node) -> None:
        status, reason = await refusal(daemon.fork(tmp_path, stages="3"))
        assert status == 404
        assert "stage 3" in reason
        status, reason = await refusal(daemon.client.get(StageName("file:///nowhere", 0)))
        assert status == 404
        assert "/nowhere" in reason
        status, reason = await refusal(daemon.fork(tmp_path, KEYSTAGE_DTYPE="int3"))
        assert (status, "int3" in reason) == (400, True)
        status, reason = await refusal(daemon.fork(None, module="no.such.module"))
        assert (status, "No module named 'no'" in reason) == (502, True)
        status, reason = await refusal(daemon.fork(None, KEYSTAGE_THREADS="many"))
        assert (status, "KEYSTAGE_THREADS='many'" in reason) == (502, True)
        with pytest.raises(KeysManagerGone, match="no KeysManager at"):
            await KeysManagerClient(tmp_path / "nobody.sock").status()

    run(body)


def raw_connection(daemon: Node) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(WAIT_S)
    sock.connect(str(daemon.socket))
    return sock


@pytest.mark.parametrize(
    "address", ["file://[x/b", "file:///a%00b", "http://a..b/x", "http://é/", "ftp://x/y"]
)
def test_an_address_that_is_none_is_refused_and_ends_nobody(run: Run, address: str) -> None:
    async def body(daemon: Node) -> None:
        began_s = (await daemon.client.status()).started_at_s
        with pytest.raises(KeysManagerRefused) as refused:
            await daemon.client.get(StageName(address, 0))
        assert refused.value.status == 404
        await daemon.client.key_stages([StageName(address, 0)])
        await daemon.client.key_stages([])
        assert (await daemon.client.status()).started_at_s == began_s

    run(body)


def test_nonsense_on_a_connection_is_answered_and_answers_keep_their_order(run: Run) -> None:
    async def body(daemon: Node) -> None:
        channel = Channel(raw_connection(daemon))
        channel.sock.send(b"\x00nonsense")
        channel.send(Progress("ready", 0.0))
        channel.send(Evict("f" * 64))
        channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        channel.sock.send(b"\x00" * 200_000)
        channel.send(StatusAsked())
        channel.send(Fork(replica="r", module="m", env={}, wanted_at_s=0.0))
        answers = []
        for _ in range(5):
            received = await asyncio.to_thread(channel.receive)
            assert received is not None
            answers.append(received[0])
        reasons = [a.reason if isinstance(a, Refused) else type(a).__name__ for a in answers]
        assert ["malformed" in reasons[0], "no holder" in reasons[1], "more than" in reasons[2]] == [True] * 3
        assert reasons[3] == "NodeStatus"
        assert "3 are needed" in reasons[4]
        channel.close()

    run(body)


def test_a_replica_whose_asker_has_gone_is_ended(run: Run, tmp_path: Path) -> None:
    write_bundle(tmp_path, "gone", [10 * MB], 10)
    life_read, life_write = os.pipe()

    async def body(daemon: Node) -> None:
        channel = Channel(raw_connection(daemon))
        server = socket.create_server(("127.0.0.1", 0))
        env = {"KEYSTAGE_REPLICA": "gone", "KEYSTAGE_DEVICE": "cuda", "KEYSTAGE_STAGES": "0"}
        env["KEYSTAGE_BUNDLE"] = tmp_path.as_uri()
        fork = Fork(
            replica="gone", module="support.keysmanager_replica", env=env, wanted_at_s=time.monotonic()
        )
        for _ in range(5):
            channel.send(fork, (life_read, 2, server.fileno()))
        channel.close()
        server.close()
        os.close(life_read)
        # The lifeline stays open here: only the daemon can end what it may have started. Once nobody
        # holds the other end, there is no such replica, and none will come.
        await daemon.wait(lambda: not is_read(life_write), "nobody watches the lifeline")

    run(body)
    os.close(life_write)


def is_read(pipe: int) -> bool:
    """Whether anybody has the read end of a pipe open."""
    import select

    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def test_a_child_that_dies_at_once_is_told_and_claims_nothing(run: Run, tmp_path: Path) -> None:
    pipeline = write_bundle(tmp_path, "dies", [MB], 11)

    async def body(daemon: Node) -> None:
        replica = await daemon.fork(tmp_path, TEST_DIES="1")
        assert replica.forked.via == "holder"
        await daemon.wait(lambda: not replica.alive, "it dies")
        await daemon.wait(lambda: has_claims(daemon, pipeline.stages[0].identity, 0), "its claim is released")

    run(body)


def test_a_replica_that_releases_its_copy_claims_nothing(run: Run, tmp_path: Path) -> None:
    pipeline = write_bundle(tmp_path, "releases", [MB], 12)

    async def body(daemon: Node) -> None:
        replica = await daemon.fork(tmp_path, TEST_RELEASES="1")
        await daemon.wait(lambda: has_claims(daemon, pipeline.stages[0].identity, 0), "released")
        assert replica.alive
        await daemon.client.evict(pipeline.stages[0].identity)
        assert replica.alive

    run(body)


def test_an_idle_standby_becomes_a_worker_and_is_replaced_while_it_is_wanted(
    run: Run, tmp_path: Path
) -> None:
    bundle = random_bundle(tmp_path / "b")
    env = {
        "KEYSTAGE_PIPELINE": "random",
        "KEYSTAGE_ROUTER": f"ipc://{tmp_path}/router",
        "KEYSTAGE_RUN": str(tmp_path),
    }
    owner_read, owner_write = os.pipe()

    async def idle(daemon: Node) -> int:
        standbys = (await daemon.client.status()).standbys
        return standbys[0].pid if len(standbys) == 1 and standbys[0].state == "idle" else 0

    async def has_none(daemon: Node) -> bool:
        return not (await daemon.client.status()).standbys

    async def body(daemon: Node) -> None:
        wanted = {**env, "KEYSTAGE_DEVICE": "cpu", "KEYSTAGE_REPLICA": "standby"}
        request = Standbys(name=name_of(bundle), env=wanted, count=1)
        await daemon.client.standbys(request, owner_read)
        os.close(owner_read)
        first = await daemon.wait(lambda: idle(daemon), "a standby is idle")
        worker = await daemon.fork(bundle, device="cpu", module="keystage.worker.app", **env)
        assert (worker.forked.via, worker.forked.pid, worker.forked.source) == ("standby", first, "disk")
        second = await daemon.wait(lambda: idle(daemon), "another takes its place")
        assert second != first
        os.kill(second, signal.SIGKILL)
        assert worker.alive
        os.close(owner_write)  # whoever wanted them is gone
        await daemon.wait(lambda: has_none(daemon), "no standby is left")
        for count, device in ((65, "cpu"), (1, "emulated")):
            strange = Standbys(name=name_of(bundle), env={**env, "KEYSTAGE_DEVICE": device}, count=count)
            with pytest.raises(KeysManagerRefused, match="0 to 64 are possible"):
                await daemon.client.standbys(strange, 0)
        os.waitpid(second, 0)

    run(body)


def test_a_second_daemon_on_the_socket_is_refused_by_name(daemon: Node) -> None:
    assert daemon.process is not None
    other = Node(daemon.folder)
    code, error = other.run_to_end()
    assert code == 3
    assert f"served by another KeysManager, process {daemon.process.pid}" in error
    assert asyncio.run(daemon.client.status()).node == "node-a"
    assert daemon.socket.stat().st_mode & 0o777 == 0o600
