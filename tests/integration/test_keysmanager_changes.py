"""Bundles that are replaced, damaged or revoked under a running daemon: who gets what, who runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.keysmanager_daemon import (
    MB,
    Node,
    Run,
    digest,
    name_of,
    node_of,
    running,
    state_of,
    write_bundle,
)
from support.keysmanager_forks import random_bundle

from keystage.bundle.store import load
from keystage.keysmanager.client import KeysManagerRefused


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One daemon for all tests here; every test has bundles of its own."""
    with node_of(tmp_path_factory.mktemp("node")) as found:
        yield found


@pytest.fixture
def run(daemon: Node) -> Iterator[Run]:
    yield from running(daemon)


@pytest.mark.slow
def test_invalid_parameters_are_given_to_nobody_and_taken_from_nobody(run: Run, tmp_path: Path) -> None:
    pipeline = write_bundle(tmp_path, "revoked", [2 * MB], 5)
    identity = pipeline.stages[0].identity

    async def body(daemon: Node) -> None:
        replica = await daemon.fork(tmp_path)
        assert await replica.line() == digest(tmp_path)
        pid = (await daemon.ready(identity)).pid
        await daemon.client.invalidate(identity)
        await daemon.wait(lambda: state_of(pid) in ("", "Z"), "the holder ends")
        assert replica.alive
        for ask in (daemon.fork(tmp_path), daemon.client.get(name_of(tmp_path))):
            with pytest.raises(KeysManagerRefused, match="invalidated") as refused:
                await ask
            assert refused.value.status == 409
        status = await daemon.client.status()
        assert [e.is_valid for e in status.history if e.identity == identity] == [False]

    run(body)


@pytest.mark.slow
def test_a_bundle_replaced_on_disk_replaces_its_holder(run: Run, tmp_path: Path) -> None:
    random_bundle(tmp_path, hidden=64)
    old = load(tmp_path).stages[0].identity

    async def body(daemon: Node) -> None:
        first = await daemon.fork(tmp_path, device="cpu")
        assert await first.line() == old
        pid = (await daemon.ready(old)).pid
        await daemon.client.key_stages([name_of(tmp_path)])
        random_bundle(tmp_path, hidden=96)
        new = load(tmp_path).stages[0].identity
        await daemon.wait(lambda: state_of(pid) in ("", "Z"), "the old holder ends unasked")
        assert first.alive
        # The key-stage list is followed to the new parameters without being told again.
        assert (await daemon.ready(new)).rank == 0
        second = await daemon.fork(tmp_path, device="cpu")
        assert (second.forked.via, second.forked.source, await second.line()) == ("holder", "memory", new)
        await daemon.client.key_stages([])

    run(body)


@pytest.mark.slow
def test_a_bundle_replaced_under_a_load_refuses_nobody(run: Run, tmp_path: Path) -> None:
    write_bundle(tmp_path, "overtaken", [200 * MB], 13)
    before = digest(tmp_path)

    async def body(daemon: Node) -> None:
        first = asyncio.create_task(daemon.fork(tmp_path))
        await daemon.wait(lambda: is_loading(daemon, "overtaken"), "the load is under way")
        write_bundle(tmp_path, "overtaken", [MB], 14)
        second = await daemon.fork(tmp_path)  # makes the daemon see that the bundle is another
        assert await second.line() == digest(tmp_path)
        # The load may just have been done; else the one who waited for it gets the new parameters.
        assert await (await first).line() in (before, digest(tmp_path))

    async def is_loading(daemon: Node, pipeline: str) -> bool:
        holders = (await daemon.client.status()).holders
        return any(h.pipeline == pipeline and h.state == "loading" for h in holders)

    run(body)


def test_a_damaged_file_is_refused_and_never_served(run: Run, tmp_path: Path) -> None:
    pipeline = write_bundle(tmp_path, "damaged", [2 * MB], 8)
    path = tmp_path / pipeline.stages[0].file
    body_bytes = bytearray(path.read_bytes())
    body_bytes[MB] ^= 1
    path.write_bytes(body_bytes)

    async def body(daemon: Node) -> None:
        with pytest.raises(KeysManagerRefused, match="damaged stage 0") as refused:
            await daemon.client.get(name_of(tmp_path))
        assert refused.value.status == 502
        replica = await daemon.fork(tmp_path)
        assert (replica.forked.via, await replica.line()) == ("fork-server", "none")
        assert "load failed" in replica.forked.note

    run(body)
