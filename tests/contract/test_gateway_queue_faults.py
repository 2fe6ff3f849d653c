"""The queue in Redis, where Redis or the code breaks a rule: what is told, and what goes on."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from redis.exceptions import NoPermissionError
from support.redis_queues import call, gateway, with_redis
from support.servers import RedisServer
from typer.testing import CliRunner

from keystage.cli.main import app
from keystage.gateway import queue_redis, queue_scripts


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


def test_that_settings_cannot_be_checked_is_told_once(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(_: Any) -> None:
        async with gateway(redis_server, "a", runs=False) as queue:

            async def forbidden() -> None:
                raise NoPermissionError("no permissions to run the 'info' command")

            queue._redis.info = forbidden
            await queue._warn()
            await queue._warn()

    with_redis(redis_server, work)
    (told,) = (text for text in caplog.messages if "settings" in text)
    assert told.endswith("could not be checked: no permissions to run the 'info' command")


def test_leases_are_renewed_and_the_bell_is_heard_after_faults_that_nobody_foresaw(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queue_redis, "RETRY_S", 0.01)

    async def work(_: Any) -> None:
        rung, renewed = asyncio.Event(), asyncio.Event()
        faults = {"warn": 1, "renew": 1}
        async with gateway(redis_server, "a", 0.06, runs=False) as queue:
            ask, warn = queue._ask, queue._warn

            async def faulty_warn() -> None:
                if faults["warn"]:
                    faults["warn"] -= 1
                    raise ValueError("unforeseen")
                await warn()
                rung.clear()

            async def faulty_ask(*command: Any) -> Any:
                if queue_scripts.RENEW.sha1 in command:
                    if faults["renew"]:
                        faults["renew"] -= 1
                        raise ValueError("unforeseen")
                    renewed.set()
                return await ask(*command)

            monkeypatch.setattr(queue, "_warn", faulty_warn)
            monkeypatch.setattr(queue, "_ask", faulty_ask)
            await queue.start(rung.set)
            await queue.put(call(1))
            assert len(await queue.take({"f": 1})) == 1
            await renewed.wait()
            while not queue._is_judged:
                await asyncio.sleep(0.01)
            await queue.put(call(2))
            await rung.wait()
        assert faults == {"warn": 0, "renew": 0}

    with_redis(redis_server, work)
    failed = {text.split(" failed")[0] for text in caplog.messages if " failed (1 in a row)" in text}
    assert failed == {"listening for asynchronous calls", "renewing leases"}


def test_the_command_says_which_redis_does_not_answer() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        url = f"redis://:s3cret@{address}/0"
        done = CliRunner().invoke(app, ["async", "dead-letters", "--redis", url])
    assert done.exit_code == 1
    assert address in done.output
    assert "cannot be asked: " in done.output
    assert "Retry-After" not in done.output
    assert "s3cret" not in done.output
