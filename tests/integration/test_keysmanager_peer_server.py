"""The node's TCP face: token, ranges, refusals, transfers that outlive what they read. Real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
import uvloop
from support.keysmanager_bundles import TOKEN, FilesBackend, holdings, serving, settles_at, until

from keystage.keysmanager import peer_transfer, segment
from keystage.keysmanager.api import NodeStatus, StageName
from keystage.keysmanager.peer_server import make_app

IDENTITY = "ab" * 32
BODY = random.Random(4).randbytes(3_000_001)

_Use = Callable[[aiohttp.ClientSession, FilesBackend], Awaitable[None]]


def sealed(body: bytes) -> int:
    draft = segment.create(len(body), "test", huge=False)
    os.pwrite(draft.fileno(), body, 0)
    return draft.seal()


def talk(use: _Use, token: str = TOKEN, backend: FilesBackend | None = None) -> FilesBackend:
    """Runs `use` against a server of a backend that holds BODY as a segment."""

    async def run() -> FilesBackend:
        fd = sealed(BODY)
        served = backend or FilesBackend({IDENTITY: fd})
        try:
            async with serving(served) as url:
                headers = {"Authorization": f"Bearer {token}"}
                async with aiohttp.ClientSession(url, headers=headers) as session:
                    await use(session, served)
        finally:
            os.close(fd)
        return served

    before = holdings()
    result = asyncio.run(run())
    assert settles_at(before)
    return result


@pytest.mark.parametrize(
    ("asked", "status", "first", "end"),
    [
        (None, 200, 0, len(BODY)),
        ("bytes=0-0", 206, 0, 1),
        ("bytes=5-1000004", 206, 5, 1_000_005),
        ("bytes=3000000-", 206, 3_000_000, len(BODY)),
        ("bytes=2999999-9999999", 206, 2_999_999, len(BODY)),
        ("bytes=-7", 206, len(BODY) - 7, len(BODY)),
        ("bytes=-9999999", 206, 0, len(BODY)),
    ],
)
def test_ranges(asked: str | None, status: int, first: int, end: int) -> None:
    async def use(session: aiohttp.ClientSession, _: FilesBackend) -> None:
        headers = {} if asked is None else {"Range": asked}
        for _ in range(2):  # the second over the same connection
            async with session.get(f"/v1/parameters/{IDENTITY}", headers=headers) as answer:
                assert answer.status == status
                assert await answer.read() == BODY[first:end]
                assert answer.headers["Content-Length"] == str(end - first)
                if asked is not None:
                    assert answer.headers["Content-Range"] == f"bytes {first}-{end - 1}/{len(BODY)}"

    talk(use)


@pytest.mark.parametrize(
    "asked", ["bytes=3000001-", "bytes=9-3", "bytes=0-1,5-6", "bytes=x-y", "lines=0-1", "bytes=-0", "bytes=-"]
)
def test_ranges_that_cannot_be_served(asked: str) -> None:
    async def use(session: aiohttp.ClientSession, _: FilesBackend) -> None:
        async with session.get(f"/v1/parameters/{IDENTITY}", headers={"Range": asked}) as answer:
            assert answer.status == 416
            assert answer.headers["Content-Range"] == f"bytes */{len(BODY)}"
            assert f"{len(BODY)} bytes" in (await answer.json())["reason"]

    talk(use)


def test_the_daemons_event_loop_may_be_uvloop() -> None:
    async def run() -> bytes:
        fd = sealed(BODY)
        async with serving(FilesBackend({IDENTITY: fd})) as url:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with (
                aiohttp.ClientSession(url, headers=headers) as session,
                session.get(f"/v1/parameters/{IDENTITY}") as answer,
            ):
                body = await answer.read()
        os.close(fd)
        return body

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run()) == BODY


def test_a_file_on_disk_is_served_alike(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(BODY)

    async def use(session: aiohttp.ClientSession, _: FilesBackend) -> None:
        async with session.get(f"/v1/parameters/{IDENTITY}", headers={"Range": "bytes=9-99999"}) as answer:
            assert await answer.read() == BODY[9:100_000]

    talk(use, backend=FilesBackend({IDENTITY: file}))


def test_pages_that_cannot_be_spliced_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hugetlb pages answer `sendfile` on kernels without splice for them."""

    def refused(out: int, source: int, offset: int, length: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(peer_transfer, "_sendfile", refused)

    async def use(session: aiohttp.ClientSession, _: FilesBackend) -> None:
        async with session.get(f"/v1/parameters/{IDENTITY}") as answer:
            assert await answer.read() == BODY

    talk(use)


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", TOKEN[:-1], "ä"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/status"),
        ("GET", f"/v1/parameters/{IDENTITY}"),
        ("PUT", "/v1/key-stages"),
        ("POST", "/v1/invalidate"),
        ("GET", "/metrics"),
        ("GET", "/nothing"),
    ],
)
def test_without_the_token_nothing(method: str, path: str, token: str) -> None:
    async def use(session: aiohttp.ClientSession, backend: FilesBackend) -> None:
        async with session.request(method, path, data=b"[]") as answer:
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert (backend.offered, backend.invalid) == (0, [])

    talk(use, token)


def test_a_server_without_token_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a token"):
        make_app(FilesBackend({}), "")


def test_status_metrics_and_what_the_controller_says() -> None:
    stages = (StageName("file:///b", 2), StageName("http://h/b", 0))

    async def use(session: aiohttp.ClientSession, _: FilesBackend) -> None:
        async with session.get("/v1/status") as answer:
            assert msgspec.json.decode(await answer.read(), type=NodeStatus).node == "n"
        async with session.get("/metrics") as answer:
            assert answer.content_type == "text/plain"
            assert await answer.text() == "keystage_up 1\n"
        async with session.put("/v1/key-stages", data=msgspec.json.encode(stages)) as answer:
            assert answer.status == 204
        async with session.post("/v1/invalidate", json={"type": "Invalidate", "identity": "cd"}) as answer:
            assert answer.status == 204, await answer.text()

    backend = talk(use)
    assert backend.stages == stages
    assert backend.invalid == ["cd"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("PUT", "/v1/key-stages", b"[{]", 400, "JSON is malformed"),
        ("PUT", "/v1/key-stages", b'{"bundle":"b","stage":1}', 400, "Expected `array`"),
        ("PUT", "/v1/key-stages", b'[{"bundle":"b","stage":"x"}]', 400, "Expected `int`"),
        ("PUT", "/v1/key-stages", b'[{"bundle":"\xff","stage":1}]', 400, "key-stages"),
        ("PUT", "/v1/key-stages", b'[{"bundle":"b","stage":9}]', 404, "stage 9 of a bundle with 8"),
        ("PUT", "/v1/key-stages", b" " * (1 << 20) + b" ", 413, "exceeds 1048576 bytes"),
        ("POST", "/v1/invalidate", b"{}", 400, "identity"),
        ("DELETE", "/v1/status", b"", 405, "DELETE /v1/status"),
        ("GET", "/v2/status", b"", 404, "GET /v2/status"),
        ("GET", "/v1/parameters/unknown", b"", 404, "parameters unknown: not on this node"),
    ],
)
def test_refusals_name_what_is_wrong(method: str, path: str, body: bytes, status: int, reason: str) -> None:
    async def use(session: aiohttp.ClientSession, _: FilesBackend) -> None:
        async with session.request(method, path, data=io.BytesIO(body)) as answer:
            assert answer.status == status
            assert reason in (await answer.json())["reason"]

    talk(use)


def test_a_segment_dropped_meanwhile_is_still_served_whole() -> None:
    body = BODY * 10  # more than socket buffers hold
    fd = sealed(body)
    backend = FilesBackend({IDENTITY: fd})

    async def use(session: aiohttp.ClientSession, _: FilesBackend) -> None:
        async with session.get(f"/v1/parameters/{IDENTITY}") as answer:
            got = await answer.content.readexactly(1000)
            os.close(fd)
            del backend.files[IDENTITY]
            assert got + await answer.read() == body

    talk(use, backend=backend)


def test_a_file_cut_meanwhile_breaks_the_answer_off(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(BODY * 10)

    async def use(session: aiohttp.ClientSession, _: FilesBackend) -> None:
        async with session.get(f"/v1/parameters/{IDENTITY}") as answer:
            await answer.content.readexactly(1000)
            os.truncate(file, 5000)
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()

    talk(use, backend=FilesBackend({IDENTITY: file}))


async def is_served_again(session: aiohttp.ClientSession) -> None:
    """Waits until a place among the transfers is free."""
    async with asyncio.timeout(20):
        status = 0
        while status != 206:
            url = f"/v1/parameters/{IDENTITY}"
            async with session.get(url, headers={"Range": "bytes=0-9"}) as answer:
                status = answer.status
            await asyncio.sleep(0.01)


def test_transfers_are_bounded_and_a_receiver_that_hangs_up_frees_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_transfer.Transfers.__init__, "__defaults__", (2,))
    fd = sealed(BODY * 10)

    async def use(session: aiohttp.ClientSession, backend: FilesBackend) -> None:
        url = f"/v1/parameters/{IDENTITY}"
        held = [await session.get(url) for _ in range(2)]  # their bodies stay unread
        async with session.get(url) as third:
            assert third.status == 503
            assert "2 transfers run already" in (await third.json())["reason"]
        for answer in held:
            answer.close()

        await is_served_again(session)

    try:
        talk(use, backend=FilesBackend({IDENTITY: fd}))
    finally:
        os.close(fd)


def test_a_receiver_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transfer.Transfers.__init__, "__defaults__", (1,))
    monkeypatch.setattr(peer_transfer, "IDLE_S", 0.05)
    monkeypatch.setattr(peer_transfer, "_POLL_S", 0.02)
    fd = sealed(BODY * 20)

    async def use(session: aiohttp.ClientSession, _: FilesBackend) -> None:
        async with session.get(f"/v1/parameters/{IDENTITY}") as answer:
            await is_served_again(session)
            with pytest.raises(aiohttp.ClientError):
                await answer.read()

    try:
        talk(use, backend=FilesBackend({IDENTITY: fd}))
    finally:
        os.close(fd)


def test_the_server_closes_while_a_receiver_stalls() -> None:
    """The stalled transfer ends with the server, within its bound."""
    fd = sealed(BODY * 10)

    async def run() -> None:
        backend = FilesBackend({IDENTITY: fd})
        server = contextlib.AsyncExitStack()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        # The session outlives the server: its answer is never read.
        async with asyncio.timeout(20), contextlib.AsyncExitStack() as stack:
            url = await server.enter_async_context(serving(backend))
            session = await stack.enter_async_context(aiohttp.ClientSession(url, headers=headers))
            await stack.enter_async_context(session.get(f"/v1/parameters/{IDENTITY}"))
            await until(lambda: backend.offered == 1)
            await server.aclose()

    before = holdings()
    asyncio.run(run())
    assert settles_at(before)
    os.close(fd)


def test_a_body_that_was_packed_is_not_unpacked() -> None:
    """A thousand times as much would come out of it."""
    packed = gzip.compress(b"[" + b" " * (1 << 26) + b"]", 9)
    assert len(packed) < 1 << 20

    async def use(session: aiohttp.ClientSession, backend: FilesBackend) -> None:
        headers = {"Content-Encoding": "gzip"}
        async with session.put("/v1/key-stages", data=packed, headers=headers) as answer:
            assert answer.status == 400
        assert not backend.stages

    talk(use)
