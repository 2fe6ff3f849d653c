"""A request that is none leaves one line in the log of an aiohttp server, without what it said."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest
from aiohttp import web

from keystage.wire.bad_requests import tell_in_one_line


async def asked(request: bytes) -> bytes:
    runner = web.AppRunner(web.Application(), access_log=None)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listening).start()
    try:
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(request)
        async with asyncio.timeout(30):
            answer = await reader.read()
        writer.close()
        return answer
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (b"GET / HTTP/1.1\r\nAuthorization: secret\x00\r\n\r\n", "BadHttpMessage: Invalid header value char"),
        (b"GET / HTTP/1.1\r\nsecret\r\n\r\n", "BadHttpMessage: Invalid header token"),
        (b"GET / HTTP/1.1\r\nAuthorization: " + b"secret" * 5000 + b"\r\n\r\n", "LineTooLong: Got more than"),
        (b"GET /?key=secret HTTQ/1.1\r\n\r\n", "BadStatusLine: "),
    ],
)
def test_one_line_and_nothing_of_the_request(
    request_: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    tell_in_one_line()
    tell_in_one_line()
    with caplog.at_level(logging.DEBUG):
        assert asyncio.run(asked(request_)).startswith(b"HTTP/1.0 400 ")
    (record,) = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert record.levelno == logging.WARNING
    assert record.exc_info is None
    assert record.getMessage().startswith(f"a request that cannot be read: {said}")
    assert "secret" not in caplog.text
    assert "Traceback" not in caplog.text
