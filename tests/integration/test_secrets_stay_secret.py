"""A local world whose every secret is recognisable: none is in what it writes, shows or is called.

Requests succeed and fail over every part that holds one; then all logs, reports, decisions, metrics, answers,
command lines of processes and the output of commands are searched, in the forms in which each secret is used.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec
import psutil
import pytest
from support.local_function import authorization, function
from support.servers import RedisServer

from keystage.bundle.api import emulated
from keystage.local.api import Deployment
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld
from keystage.wire.bearer import INTERNAL
from keystage.wire.link import Keys
from keystage.wire.secret import Secret

PASSWORD = "basic-auth-PW-5f0c31aa"
REDIS_PASSWORD = "redis-PW-91be77d0"
INTERNAL_TOKEN = "keysmanager-TOKEN-2c9e0f4471"
WIRE_KEY = "wire-KEY-" + "7d3a" * 8
WIRE_NEW = "wire-NEW-" + "e81b" * 8
API_KEY = "api-KEY-b4492fd1c0"
WRONG_KEY = "api-KEY-wrong-77ab21"
FUNCTION_SECRET = "function-SECRET-c7d1590e"
CALLBACK_PASSWORD = "callback-PW-0b6a3e95"
COLLECTOR_KEY = "collector-KEY-18fe6b2d"


def forms() -> dict[str, str]:
    """Every text that must not be found, by what it is."""
    found = {
        "the password": PASSWORD,
        "the password's base64": base64.b64encode(f"admin:{PASSWORD}".encode()).decode(),
        "a wrong password": PASSWORD[::-1],
        "a wrong password's base64": base64.b64encode(f"admin:{PASSWORD[::-1]}".encode()).decode(),
        "Redis' password": REDIS_PASSWORD,
        "the internal token": INTERNAL_TOKEN,
        "an API key": API_KEY,
        "a wrong API key": WRONG_KEY,
        "a function's secret": FUNCTION_SECRET,
        "a function's secret in base64": base64.b64encode(FUNCTION_SECRET.encode()).decode(),
        "a callback's password": CALLBACK_PASSWORD,
        "the collector's key": COLLECTOR_KEY,
    }
    for name, value in (("the wire key", WIRE_KEY), ("the new wire key", WIRE_NEW)):
        secret = Secret(value.encode())
        keys = Keys(secret)
        found |= {
            name: value,
            f"{name}: internal token": secret.derive(INTERNAL).hex(),
            f"{name}: CURVE inbox": keys.inbox_keys[1].decode(),
            f"{name}: CURVE inbox, public": keys.inbox_keys[0].decode(),
            f"{name}: CURVE sender": keys.sender_keys[1].decode(),
            f"{name}: handshake": keys.handshake_key.hex(),
        }
    return found | {f"{name}, quoted": quote(text) for name, text in found.items() if quote(text) != text}


def search(where: str, text: bytes) -> list[str]:
    return [f"{where}: {name}" for name, secret in forms().items() if secret.encode() in text]


def prepare(home: Path) -> None:
    """Credentials that are there already are kept by `up`."""
    folder = home / "credentials"
    folder.mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    for name, value in (
        ("basic-auth-password", PASSWORD),
        ("keysmanager-token", INTERNAL_TOKEN),
        ("wire-key", WIRE_KEY),
    ):
        (folder / name).write_text(value)
        (folder / name).chmod(0o600)


def processes() -> Iterator[tuple[str, bytes]]:
    """Command lines of all that the world started, as everybody on the machine may read them."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            yield f"process {child.pid}", Path(f"/proc/{child.pid}/cmdline").read_bytes()


def files(home: Path) -> Iterator[tuple[str, bytes]]:
    """All that was written, but for where secrets are kept."""
    for folder in (home,):
        for file in folder.rglob("*"):
            if file.is_file() and not {"credentials", "secrets"} & {*file.relative_to(folder).parts}:
                yield str(file.relative_to(folder)), file.read_bytes()


async def say(session: aiohttp.ClientSession, method: str, path: str, **options: object) -> tuple[int, bytes]:
    async with session.request(method, path, **options) as answer:  # type: ignore[arg-type]
        told = "\n".join(f"{name}: {value}" for name, value in answer.headers.items())
        return answer.status, told.encode() + b"\n" + await answer.read()


async def exercise(world: LocalWorld, session: aiohttp.ClientSession, said: dict[str, bytes]) -> None:
    """Successes and failures of everything that has a secret; keeps what was answered."""
    good = authorization("admin", PASSWORD)
    bad = authorization("admin", PASSWORD[::-1])

    async def ask(name: str, method: str, path: str, status: int, **options: object) -> None:
        got, said[name] = await say(session, method, path, **options)
        assert got == status, (name, got, said[name])

    put = {"name": "s", "value": FUNCTION_SECRET}
    await ask("a secret", "POST", "/system/secrets", 202, json=put, headers=good)
    await ask("it again", "POST", "/system/secrets", 409, json=put, headers=good)
    await ask("a secret with a wrong password", "POST", "/system/secrets", 401, json=put, headers=bad)
    for name, body in (("a", {**put, "name": "../x"}), ("b", {"name": 1, "value": FUNCTION_SECRET})):
        await ask(f"no secret {name}", "POST", "/system/secrets", 400, json=body, headers=good)
    await ask("broken JSON", "POST", "/system/secrets", 400, data=json.dumps(put)[:-1], headers=good)
    await ask("secrets", "GET", "/system/secrets", 200, headers=good)
    await ask("functions", "GET", "/system/functions", 200, headers=good)
    await ask("functions with a wrong password", "GET", "/system/functions", 401, headers=bad)
    await ask("output", "GET", "/system/logs?name=echo", 200, headers=good)
    await ask("the report", "GET", "/system/keystage/report", 200, headers=good)
    path = "/function/tiny/v1/completions"
    call = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
    key = {"Authorization": f"Bearer {API_KEY}"}
    await ask("a completion", "POST", path, 200, json=call, headers=key)
    await ask("no completion", "POST", path, 400, json={**call, "max_tokens": -1}, headers=key)
    wrong = {"Authorization": f"Bearer {WRONG_KEY}"}
    await ask("a completion with a wrong key", "POST", path, 401, json=call, headers=wrong)
    callback = {"X-Callback-Url": f"http://user:{CALLBACK_PASSWORD}@127.0.0.1:1/x"}
    status, said["a callback that cannot be"] = await say(
        session, "POST", "/async-function/echo", data=b"x", headers=callback
    )
    assert status in (202, 400)
    await ask("an asynchronous call", "POST", "/async-function/echo", 202, data=b"x")
    await ask("no function", "POST", "/async-function/none", 404, data=b"x")
    await ask("metrics", "GET", "/metrics", 200)
    await ask("the router's metrics", "GET", "/function/tiny/metrics", 200)
    await ask("the router's counters", "GET", "/function/tiny/_/stats", 200)
    for record in world.replicas("tiny-stage-0"):
        said["a worker's metrics"] = (await say(session, "GET", f"http://{record.address}/metrics"))[1]


def command(home: Path, *words: str) -> bytes:
    """What a command prints, whatever its end."""
    env = {**os.environ, "KEYSTAGE_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "keystage.cli.main", *words],
        capture_output=True,
        env=env,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_no_secret_is_in_anything_that_is_written_shown_or_listed() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kss-", dir="/tmp") as name,
        RedisServer(Path(name) / "r", "--requirepass", REDIS_PASSWORD, tcp=True) as redis,
    ):
        folder = Path(name)
        home = folder / "state"
        prepare(home)
        keys = folder / "api-keys"
        keys.write_text(f"someone {hashlib.sha256(API_KEY.encode()).hexdigest()}\n")
        keys.chmod(0o600)
        (folder / "b").mkdir()
        pipeline = emulated("tiny", 2, execution="looping")
        (folder / "b" / "pipeline.json").write_bytes(msgspec.json.encode(pipeline))
        address = f"127.0.0.1:{redis.place}/0"
        env = {
            "KEYSTAGE_REDIS": f"redis://:{REDIS_PASSWORD}@{address}",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {COLLECTOR_KEY}",
        }
        said: dict[str, bytes] = {}

        async def inside() -> None:
            async with asyncio.timeout(150), LocalWorld(home, env=env, nodes=2, keysmanager=True) as world:
                keyed = {"KEYSTAGE_API_KEYS": str(keys)}
                made = deployments_for(folder / "b", pipeline, device="emulated", env=keyed)
                echo = function()
                await world.deploy(*made, echo)
                async with aiohttp.ClientSession(world.gateway_url) as session:
                    await world.wait_ready("tiny", 1, 120)
                    for stage in range(2):
                        await world.wait_ready(f"tiny-stage-{stage}", 1, 120)
                    await world.wait_ready("echo", 1, 60)
                    await until_it_answers(session)
                    await exercise(world, session, said)
                    # The secret is replaced, by a file that is none first.
                    world.home.wire_key.write_text(f"{WIRE_NEW}\n{WIRE_KEY[:20]}")
                    await until_logged(home, "the secrets read before stay")
                    world.home.wire_key.write_text(f"{WIRE_KEY}\n{WIRE_NEW}")
                    await until_logged(home, "uses the secret")
                    await asyncio.to_thread(redis.kill)
                    status, said["a call without Redis"] = await say(
                        session, "POST", "/async-function/echo", data=b"x"
                    )
                    assert status in (202, 503)
                    for words in (("status", "--json"), ("doctor", "--json"), ("top", "--json", "--once")):
                        said[" ".join(words)] = await asyncio.to_thread(command, home, *words)
                    with_secret = Deployment(
                        service="late", envProcess=echo.envProcess, secrets=["s"], image="none"
                    )
                    await world.deploy(with_secret)
                    await world.wait_ready("late", 1, 60)
                    said.update(processes())
                    assert sum(name.startswith("process ") for name in said) > 6

        asyncio.run(inside())
        assert b"keystage" in said["metrics"]
        said |= dict(files(home))
        assert {"logs/_gateway.log", "decisions.jsonl", "functions.json"} <= said.keys()
        found = [what for name, text in said.items() for what in search(name, text)]
        assert found == []


async def until_logged(home: Path, words: str) -> None:
    """Some process of the pipeline has said so."""
    text = ""
    for _ in range(400):
        text = "".join(file.read_text(errors="replace") for file in (home / "logs").glob("tiny*.log"))
        if words in text:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{words!r} is not in {text[-2000:]}")


async def until_it_answers(session: aiohttp.ClientSession) -> None:
    """The router knows its workers, and the gateway the router."""
    call = {"model": "tiny", "prompt": [1], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    path = "/function/tiny/v1/completions"
    got = (0, b"")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(40):
            while (got := await say(session, "POST", path, json=call, headers=headers))[0] != 200:
                await asyncio.sleep(0.1)
    assert got[0] == 200, got
    while (await say(session, "GET", "/system/keystage/report", headers=authorization("admin", PASSWORD)))[
        0
    ] != 200:
        await asyncio.sleep(0.1)
