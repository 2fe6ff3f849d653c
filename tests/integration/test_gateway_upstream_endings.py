"""Clients that leave, uploads beyond the bound, unused connections: what becomes of the replica's side."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from support.scripted_upstream import Upstream, head, open_call, proxy_to, run

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


def test_a_client_that_leaves_ends_the_connection_to_the_replica() -> None:
    async def work() -> None:
        ended = asyncio.Event()
        begun = asyncio.Event()

        async def script(reader: Reader, writer: Writer) -> None:
            await head(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
            begun.set()
            with contextlib.suppress(ConnectionError):
                assert await reader.read(1) == b""
            ended.set()

        async with Upstream(script).run() as address, proxy_to(address) as proxy:
            call = open_call()
            going = asyncio.create_task(call.run(proxy))
            await begun.wait()
            call.left.set()
            await going
            await ended.wait()
            assert not call.is_whole

    run(work())


def test_an_upload_beyond_its_bound_is_refused_and_cut_off() -> None:
    async def work() -> None:
        ended = asyncio.Event()

        async def script(reader: Reader, _: Writer) -> None:
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(1 << 16):
                    assert not piece.endswith(b"0\r\n\r\n")
            ended.set()

        async with Upstream(script).run() as address, proxy_to(address, max_body_bytes=250) as proxy:
            call = await open_call("POST", [b"x" * 100] * 3).run(proxy)
            assert (call.status, call.is_whole) == (413, True)
            await ended.wait()

    run(work())


@pytest.mark.slow
def test_idle_connections_are_closed_before_replicas_would() -> None:
    async def work() -> None:
        ended = asyncio.Event()

        async def script(reader: Reader, writer: Writer) -> None:
            await head(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
            with contextlib.suppress(ConnectionError):
                assert await reader.read(1) == b""
            ended.set()

        async with Upstream(script).run() as address, proxy_to(address) as proxy:
            assert (await open_call().run(proxy)).body == b"hello"
            async with asyncio.timeout(4.9):
                await ended.wait()

    run(work())
