"""WebSockets through the gateway's process to real functions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from support.local_function import authorization, function
from support.websocket_app import FLOOD
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from keystage.local.world import LocalWorld

Work = Callable[[LocalWorld, str], Awaitable[None]]
DIALLED = {"compression": None, "proxy": None, "max_size": None}


def run(tmp_path: Path, work: Work, **env: str) -> None:
    async def inside() -> None:
        async with (
            asyncio.timeout(60),
            LocalWorld(tmp_path / "state", gateway_port=0, controller=False, env=env) as world,
        ):
            await world.deploy(function())
            await world.wait_ready("echo")
            await work(world, world.gateway_url.replace("http", "ws", 1) + "/function/echo")

    asyncio.run(inside())


def dial(url: str, **options: object) -> connect:
    return connect(url, **(DIALLED | options))  # type: ignore[arg-type]


async def closed(socket: ClientConnection) -> tuple[int, str]:
    """Code and reason with which the other side ends it, whatever comes before."""
    try:
        while True:
            await socket.recv()
    except ConnectionClosed as error:
        return (error.rcvd.code, error.rcvd.reason) if error.rcvd else (1006, "")


async def events(url: str) -> list[object]:
    async with dial(url + "/ws/events") as socket:
        told: list[object] = json.loads(await socket.recv())
        return told


def test_messages_headers_and_subprotocols_cross(tmp_path: Path) -> None:
    async def work(world: LocalWorld, url: str) -> None:
        headers = [
            ("X-Thing", "ü"),
            ("X-Call-Id", "mine"),
            ("Origin", "http://example.org"),
            ("Cookie", "c=1"),
        ]
        offered = [Subprotocol("one"), Subprotocol("two")]
        target = "/ws/told?x=1&y=%20&x=2"
        async with dial(url + target, additional_headers=headers, subprotocols=offered) as socket:
            assert socket.subprotocol == "two"
            assert socket.response is not None
            got = socket.response.headers
            assert (got["x-mine"], got.get_all("set-cookie")) == ("1", ["a=1", "b=2"])
            assert (got["x-call-id"], got["x-served-by"].startswith("keystage/")) == ("mine", True)
            told = json.loads(await socket.recv())
            sent = dict(told["headers"])
            assert (told["path"], told["query"]) == ("/ws/told", "x=1&y=%20&x=2")
            assert (sent["x-thing"], sent["origin"], sent["cookie"]) == ("ü", "http://example.org", "c=1")
            assert (sent["x-call-id"], sent["x-forwarded-for"], sent["via"]) == (
                "mine",
                "127.0.0.1",
                "1.1 keystage",
            )
            for message in ("text ü", b"\x00\xff", "", b"", "x" * (1 << 20), b"y" * (1 << 20)):
                await socket.send(message)
                assert await socket.recv() == message
            await socket.send(["fr", "agmen", "ted"])
            assert await socket.recv() == "fragmented"
            await (await socket.ping())
        for number in range(3):
            async with dial(url + f"/a%20b;c={number}/%2F") as socket:
                await socket.send(str(number))
                assert await socket.recv() == str(number)

    run(tmp_path, work)


def test_closes_cross_with_their_codes_both_ways(tmp_path: Path) -> None:
    async def work(world: LocalWorld, url: str) -> None:
        async with dial(url + "/ws/close") as socket:
            await socket.send("go")
            assert await closed(socket) == (4321, "enough")
        async with dial(url + "/ws/echo") as socket:
            await socket.send("x")
            await socket.recv()
            await socket.close(4000, "bye")
        while [4000, "bye"] not in (seen := await events(url)):
            await asyncio.sleep(0.02)
        assert [4321, "enough"] not in seen
        socket = await dial(url + "/ws/echo")
        await socket.send("x")
        await socket.recv()
        socket.transport.abort()
        while [1001, ""] not in await events(url):
            await asyncio.sleep(0.02)

    run(tmp_path, work)


async def moved(url: str) -> tuple[int, str]:
    """What a handshake is answered with by who follows no redirects."""
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers=headers, allow_redirects=False) as answer,
    ):
        return answer.status, answer.headers["location"]


@pytest.mark.slow
def test_refusals_are_plain_answers(tmp_path: Path) -> None:
    async def work(world: LocalWorld, url: str) -> None:
        async def refused(target: str) -> tuple[int, bytes, list[str]]:
            with pytest.raises(InvalidStatus) as caught:
                await dial(target)
            answer = caught.value.response
            return answer.status_code, bytes(answer.body or b""), answer.headers.get_all("set-cookie")

        assert await refused(url + "/ws/refuse") == (402, b"pay first", ["a=1", "b=2"])
        assert await moved(url.replace("ws", "http", 1) + "/ws/moved") == (307, "/ws/echo")
        base = url.removesuffix("/echo")
        assert await refused(base + "/no/x") == (404, b"function no is not deployed\n", [])
        assert (await refused(base + "/echo.elsewhere"))[0] == 404
        status, text, _ = await refused(url.removesuffix("/function/echo") + "/system/info")
        assert (status, b"no WebSocket" in text) == (404, True)
        status, text, _ = await refused(url + "/ws/slow")
        assert (status, b"within 1.5 s" in text) == (504, True)
        status, text, _ = await refused(url + "/ws/dead-before")
        assert (status, b"replica echo-0" in text) == (502, True)

    run(tmp_path, work, KEYSTAGE_TIMEOUT_S="1")


@pytest.mark.slow
def test_replica_that_dies_closes_the_client_with_1011(tmp_path: Path) -> None:
    async def work(world: LocalWorld, url: str) -> None:
        async with dial(url + "/ws/echo") as idle, dial(url + "/ws/die") as socket:
            await socket.send("go")
            assert await closed(socket) == (1011, "the replica broke the connection")
            assert await closed(idle) == (1011, "the replica broke the connection")
        async with dial(url + "/ws/told") as socket:
            assert json.loads(await socket.recv())["replica"] == "echo-1"

    run(tmp_path, work)


@pytest.mark.slow
def test_function_at_zero_is_woken_and_a_message_beyond_the_bound_is_1009(tmp_path: Path) -> None:
    async def work(world: LocalWorld, url: str) -> None:
        await world.scale("echo", 0)
        while world.replicas("echo"):
            await world.supervisor.watch(world.supervisor.view().version, 5.0)
        waiting = asyncio.create_task(_connected(url))
        gone = asyncio.create_task(_connected(url))
        while not world.function("echo").wake:
            await world.supervisor.watch(world.supervisor.view().version, 5.0)
        gone.cancel()
        await world.scale("echo", 1)
        socket = await waiting
        await socket.send("x" * 100_000)
        assert len(await socket.recv()) == 100_000
        await socket.send("x" * 100_001)
        assert (await closed(socket))[0] == 1009
        while [1009] not in [seen[:1] for seen in await events(url) if isinstance(seen, list)]:
            await asyncio.sleep(0.02)

    run(tmp_path, work, KEYSTAGE_MAX_BODY_BYTES="100000")


async def _connected(url: str) -> ClientConnection:
    return await dial(url + "/ws/echo")


@pytest.mark.slow
def test_client_that_reads_nothing_stops_the_replica_and_then_gets_everything_in_order(
    tmp_path: Path,
) -> None:
    async def work(world: LocalWorld, url: str) -> None:
        async with dial(url + "/ws/flood", max_queue=1) as socket:
            before, sent = -1, 0
            while sent != before or sent == 0:
                await asyncio.sleep(0.5)
                before = sent
                (sent,) = [seen for seen in await events(url) if isinstance(seen, int)]
            assert sent < 2 * FLOOD // 3, "many of them wait at the replica, whatever sockets hold"
            messages = [message async for message in socket]  # ends with code 1000 only
            assert [m[:4] for m in messages] == [number.to_bytes(4, "big") for number in range(FLOOD)]
            assert {len(message) for message in messages} == {1 << 16}

    run(tmp_path, work)


@pytest.mark.slow
def test_websocket_counts_as_an_invocation_as_long_as_it_lasts(tmp_path: Path) -> None:
    async def work(world: LocalWorld, url: str) -> None:
        async with dial(url + "/ws/echo") as socket:
            await socket.send("x")
            await socket.recv()
            while not any(load.in_flight for load in world.supervisor.loaded("echo")[0].loads):
                await asyncio.sleep(0.02)
        headers = authorization(*world.credentials)
        async with aiohttp.ClientSession(world.gateway_url, headers=headers) as session:
            line = 'gateway_function_invocation_total{code="101",function_name="echo.openfaas-fn"} 1.0'
            while line not in await (await session.get("/metrics")).text():
                await asyncio.sleep(0.02)
        while any(load.in_flight for load in world.supervisor.loaded("echo")[0].loads):
            await asyncio.sleep(0.02)

    run(tmp_path, work)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_upgrade_on_a_request_with_a_body_is_passed_over(
    tmp_path: Path, method: str, protocol: str, is_chunked: bool
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            await asyncio.sleep(0.02)
            yield b"plain"

    async def work(world: LocalWorld, url: str) -> None:
        fields = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol, "HTTP2-Settings": "AAMAAABk"}
        async with aiohttp.ClientSession(world.gateway_url) as session:
            for _ in range(2):
                body = pieces() if is_chunked else b"plain" * 3
                async with session.request(method, "/function/echo", data=body, headers=fields) as answer:
                    assert (answer.status, (await answer.json())["body"]) == (200, "plain" * 3)

    run(tmp_path, work)
