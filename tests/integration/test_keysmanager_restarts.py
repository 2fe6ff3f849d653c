"""What dies, and what does not: holders, fork server and daemon killed under running replicas."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.keysmanager_daemon import WAIT_S, Node, name_of, node_of, state_of
from support.keysmanager_forks import random_bundle

from keystage.bundle.store import load
from keystage.keysmanager.client import KeysManagerRefused
from keystage.wire.endpoints import listen


def is_gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


@pytest.mark.slow
def test_deaths_cost_time_and_no_replica(tmp_path: Path) -> None:
    """A holder, the fork server, then the daemon itself are killed; every replica goes on."""
    bundle = random_bundle(tmp_path / "b", stages=2)
    identity, revoked = (stage.identity for stage in load(bundle).stages)

    async def before(node: Node) -> None:
        first = await node.fork(bundle, device="cpu")
        assert await first.line() == identity
        holder = (await node.ready(identity)).pid
        os.kill(holder, signal.SIGKILL)
        second = await node.fork(bundle, device="cpu")
        assert (second.forked.via, await second.line()) == ("holder", identity)
        assert (await node.ready(identity)).pid != holder

        server = node.forkserver()
        os.kill(server, signal.SIGKILL)
        # Holders have sockets of their own: they fork on while there is no fork server.
        third = await node.fork(bundle, device="cpu")
        assert third.forked.via == "holder"
        fourth = await node.fork(None)
        assert (fourth.forked.via, await fourth.line()) == ("fork-server", "none")
        assert node.forkserver() not in (0, server)
        got = await node.client.get(name_of(bundle, 1))
        got.claim.close()
        os.close(got.fd)
        await node.client.invalidate(revoked)
        assert all(replica.alive for replica in node.replicas)

    async def after(node: Node, left: set[int]) -> None:
        # Nobody asks for a stage: what was used before is loaded because of the history.
        assert (await node.ready(identity)).rank == 0
        assert (await node.client.status()).holders[0].uses == 0
        await node.wait(lambda: all(is_gone(pid) for pid in left), "what the dead daemon left has ended")
        assert all(replica.alive for replica in node.replicas)
        with pytest.raises(KeysManagerRefused, match="invalidated"):
            await node.client.get(name_of(bundle, 1))
        again = await node.fork(bundle, device="cpu")
        assert (again.forked.via, again.forked.source, await again.line()) == ("holder", "memory", identity)

    with node_of(tmp_path) as node:
        asyncio.run(asyncio.wait_for(before(node), 2 * WAIT_S))
        # The history is written once a second.
        written = node.folder / "state" / "history.json"
        asyncio.run(node.wait(lambda: written.exists() and identity in written.read_text(), "the history"))
        assert node.process is not None
        left = node.processes() - {node.process.pid}
        node.kill()
        assert node.socket.exists()  # of the dead daemon: replaced by the next one
        asyncio.run(node.start())
        asyncio.run(asyncio.wait_for(after(node, left), 2 * WAIT_S))
        own = node.processes()
        assert node.stop() == 0
        assert all(is_gone(pid) for pid in own)
        assert not node.socket.exists()
        assert all(replica.alive for replica in node.replicas)


@pytest.mark.slow
def test_the_owners_end_ends_the_daemon_and_idle_holders(tmp_path: Path) -> None:
    bundle = random_bundle(tmp_path / "b")
    read_end, write_end = os.pipe()
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    listening = listen("127.0.0.1:0")
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def get(path: str, bearer: str) -> tuple[int, bytes]:
        request = urllib.request.Request(address + path, headers={"Authorization": f"Bearer {bearer}"})
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    async def body(node: Node) -> None:
        await node.client.key_stages([name_of(bundle)])
        identity = load(bundle).stages[0].identity
        await node.ready(identity)
        assert (await asyncio.to_thread(get, "/v1/status", "wrong"))[0] == 401
        status, text = await asyncio.to_thread(get, "/metrics", "secret")
        assert status == 200
        assert b'keystage_loads_total{node="node-a",source="disk"} 1.0' in text
        assert b'keystage_holders{node="node-a"} 1.0' in text
        # Served from the file: the raw segment was dropped for the packed form.
        status, served = await asyncio.to_thread(get, f"/v1/parameters/{identity}", "secret")
        assert (status, served) == (200, (bundle / "stage-00.safetensors").read_bytes())
        assert (await asyncio.to_thread(get, f"/v1/parameters/{'0' * 64}", "secret"))[0] == 404
        # A pod on a cluster asks by `Get`: what it is given counts like a fork's. The first needs the raw
        # segment again, the second is a hit.
        assert b"keystage_parameter_gives_total{" not in text
        for got in [await node.client.get(name_of(bundle)) for _ in range(2)]:
            got.claim.close()
            os.close(got.fd)
        _, text = await asyncio.to_thread(get, "/metrics", "secret")
        for source in (b"disk", b"memory"):
            assert b'keystage_parameter_gives_total{node="node-a",source="%s"} 1.0' % source in text

    with node_of(
        tmp_path,
        lambda node: setattr(node, "pass_fds", (read_end, listening.fileno())),
        KEYSTAGE_LIFELINE_FD=str(read_end),
        KEYSTAGE_KEYSMANAGER_LISTEN=f"fd://{listening.fileno()}",
        KEYSTAGE_KEYSMANAGER_TOKEN_FILE=str(token),
    ) as node:
        os.close(read_end)
        listening.close()
        asyncio.run(asyncio.wait_for(body(node), WAIT_S))
        own = node.processes()
        os.close(write_end)
        assert node.process is not None
        assert node.process.wait(WAIT_S) == 0
        assert all(is_gone(pid) for pid in own)


@pytest.mark.slow
def test_settings_that_cannot_work_are_named(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    open_token = Node(tmp_path, KEYSTAGE_KEYSMANAGER_TOKEN_FILE=str(token)).run_to_end()
    assert open_token[0] == 2
    assert "mode 0644, 0600 is needed" in open_token[1]
    long_path = Node(tmp_path, KEYSTAGE_KEYSMANAGER=str(tmp_path / ("x" * 120))).run_to_end()
    assert long_path[0] == 3
    assert "a socket's path 107" in long_path[1]
