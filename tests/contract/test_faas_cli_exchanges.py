"""What `faas-cli` says over HTTP and what it needs to hear, replayed against a real gateway process.

The exchanges below were recorded from faas-cli of July 2026 (commit c8191b7): each line of `LIFE` is one
request as it sends it, under the command that a user types, with the status and body that make the
command succeed or say what is wrong. Functions are programs run per request (`forking_program`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yarl
from support.local_function import PYTHON, authorization

from keystage.local.world import LocalWorld

PROGRAM = f"{PYTHON} {Path(__file__).parents[1] / 'support' / 'forking_program.py'}"
CAT = f"{PROGRAM} cat"
VAULT = f"{PROGRAM} cat /var/openfaas/secrets/api-key"
ENV = f"{PROGRAM} env"

MANAGEMENT = {"User-Agent": "faas-cli/dev", "Accept-Encoding": "gzip"}
SDK = {"User-Agent": "openfaas-go-sdk", "Accept-Encoding": "gzip"}
LOGIN = {"User-Agent": "Go-http-client/1.1", "Accept-Encoding": "gzip"}
INVOKE = {
    "User-Agent": "faas-cli/dev (openfaas; linux; amd64)",
    "Content-Type": "text/plain",
    "Accept-Encoding": "gzip",
}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")

Check = str | dict[str, Any] | list[Any] | re.Pattern[str] | Callable[[Any], bool] | None
"""A body: its text, a part of its JSON object, its whole JSON list, a pattern, or a condition on JSON."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One request of a command and its answer.

    Attributes:
        command: what the user types.
        request: method and path with query.
        status: what must come.
        answer: what its body must be; None: it is empty.
        body: JSON of a management request, text of an invocation.
        headers: what faas-cli sends beside host, length and credentials.
        repeated: it is sent again, as `ready` does, until the answer fits.
        named: headers of the answer that must be there.
    """

    command: str
    request: str
    status: int
    answer: Check = None
    body: dict[str, Any] | str | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=lambda: MANAGEMENT)
    repeated: bool = False
    named: tuple[str, ...] = ()


def deployment(service: str, process: str, **more: Any) -> dict[str, Any]:
    """Body of PUT and POST /system/functions: empty members are left out, but for the two maps."""
    given = {"service": service, "image": f"example/{service}:latest", "envProcess": process, **more}
    return {**given, "labels": more.get("labels", {}), "annotations": more.get("annotations", {})}


ECHO = deployment("echo", CAT)
MORE = deployment(
    "echo",
    CAT,
    envVars={"COLOUR": "blue"},
    constraints=["node=a"],
    secrets=["api-key"],
    labels={"com.openfaas.scale.min": "2"},
    annotations={"topic": "hello"},
    limits={"memory": "128Mi"},
    requests={"cpu": "100m"},
    readOnlyRootFilesystem=True,
)
DESCRIBED = {
    "name": "echo",
    "image": "example/echo:latest",
    "namespace": "openfaas-fn",
    "envProcess": CAT,
    "envVars": {"COLOUR": "blue"},
    "constraints": ["node=a"],
    "secrets": ["api-key"],
    "labels": {"faas_function": "echo", "com.openfaas.scale.min": "2"},
    "annotations": {"topic": "hello"},
    "limits": {"memory": "128Mi"},
    "requests": {"cpu": "100m"},
    "readOnlyRootFilesystem": True,
    "replicas": 2,
}
ABSENT = "function echo is not deployed\n"
FUNCTIONS = "/system/functions"
REPEATS_S = 30.0
LINE = {"name": "echo", "namespace": "openfaas-fn"}


def lines_end_with(*texts: str) -> Callable[[Any], bool]:
    """The last log lines hold these texts; every line has the members that faas-cli prints."""

    def check(lines: Any) -> bool:
        last = lines[-len(texts) :]
        return (
            len(last) == len(texts)
            and all(text in line["text"] for text, line in zip(texts, last, strict=True))
            and all(LINE.items() <= line.items() and TIME.fullmatch(line["timestamp"]) for line in lines)
            and all(line["instance"].startswith("echo-") for line in lines)
        )

    return check


LIFE = (
    Exchange("login --password-stdin", f"GET {FUNCTIONS}", 200, [], headers=LOGIN),
    Exchange("ready", "GET /healthz", 200, "ok\n", headers=LOGIN),
    Exchange(
        "version",
        "GET /system/info",
        200,
        lambda info: (
            info["provider"].keys() >= {"provider", "orchestration", "version"}
            and all(info[part]["release"] and info[part]["sha"] for part in ("version",))
            and all(info["provider"]["version"][name] for name in ("release", "sha"))
        ),
    ),
    Exchange("deploy -f stack.yml", f"PUT {FUNCTIONS}", 404, ABSENT, ECHO),
    Exchange("deploy -f stack.yml", f"POST {FUNCTIONS}", 202, None, ECHO),
    Exchange(
        "deploy -f stack.yml --secret api-key",
        f"PUT {FUNCTIONS}",
        400,
        re.compile("secret api-key"),
        MORE,
    ),
    Exchange("secret list", "GET /system/secrets", 200, []),
    Exchange(
        "secret create api-key --from-file key",
        "POST /system/secrets",
        202,
        None,
        {"name": "api-key", "value": "tops3cret", "rawValue": "dG9wczNjcmV0"},
    ),
    Exchange("secret list", "GET /system/secrets", 200, [{"name": "api-key", "namespace": "openfaas-fn"}]),
    Exchange("deploy -f stack.yml --label com.openfaas.scale.min=2 ..", f"PUT {FUNCTIONS}", 202, None, MORE),
    Exchange(
        "ready echo",
        "GET /system/function/echo?usage=1",
        200,
        {"availableReplicas": 2},
        repeated=True,
    ),
    Exchange(
        "list",
        f"GET {FUNCTIONS}",
        200,
        lambda functions: (
            [DESCRIBED.items() <= f.items() for f in functions] == [True]
            and functions[0]["invocationCount"] == 0
            and TIME.fullmatch(functions[0]["createdAt"])
        ),
    ),
    Exchange(
        "describe echo",
        "GET /system/function/echo?usage=1",
        200,
        lambda f: (
            (DESCRIBED | {"availableReplicas": 2, "invocationCount": 0}).items() <= f.items()
            and f["usage"]["totalMemoryBytes"] > 0 <= f["usage"]["cpu"]
        ),
    ),
    Exchange(
        "invoke echo < file",
        "POST /function/echo.openfaas-fn",
        200,
        "Keystage",
        "Keystage",
        INVOKE,
        named=("x-call-id", "x-start-time"),
    ),
    Exchange(
        "invoke echo --async < file",
        "POST /async-function/echo.openfaas-fn",
        202,
        None,
        "later",
        INVOKE,
        named=("x-call-id",),
    ),
    Exchange(
        "describe echo",
        "GET /system/function/echo?usage=1",
        200,
        {"invocationCount": 2},
        repeated=True,
    ),
    Exchange(
        "logs echo --lines 2 --tail=false",
        "GET /system/logs?follow=false&name=echo&tail=2",
        200,
        lines_end_with("Forking fprocess.", "Wrote 5 Bytes"),
        repeated=True,
    ),
    Exchange(
        "logs echo --since-time 2026-01-01T00:00:00Z --tail=false",
        "GET /system/logs?follow=false&name=echo&since=2026-01-01T00%3A00%3A00Z&tail=-1",
        200,
        lines_end_with("Forking fprocess.", "Wrote 8 Bytes", "Forking fprocess.", "Wrote 5 Bytes"),
    ),
    # A function that reads its secret, before and after the secret changes and it is deployed again.
    Exchange(
        "deploy --name vault",
        f"PUT {FUNCTIONS}",
        404,
        "function vault is not deployed\n",
        deployment("vault", VAULT, secrets=["api-key"]),
    ),
    Exchange(
        "deploy --name vault", f"POST {FUNCTIONS}", 202, None, deployment("vault", VAULT, secrets=["api-key"])
    ),
    Exchange("invoke vault", "POST /function/vault.openfaas-fn", 200, "tops3cret", "", INVOKE),
    Exchange(
        "secret update api-key", "PUT /system/secrets", 202, None, {"name": "api-key", "value": "other"}
    ),
    Exchange(
        "deploy --name vault --annotation again=1",
        f"PUT {FUNCTIONS}",
        202,
        None,
        deployment("vault", VAULT, secrets=["api-key"], annotations={"again": "1"}),
    ),
    Exchange("invoke vault", "POST /function/vault.openfaas-fn", 200, "other", "", INVOKE, repeated=True),
    Exchange("remove vault", f"DELETE {FUNCTIONS}", 202, None, {"functionName": "vault"}),
    Exchange("secret remove api-key", "DELETE /system/secrets", 202, None, {"name": "api-key"}),
    Exchange(
        "secret remove api-key",
        "DELETE /system/secrets",
        404,
        "secret api-key does not exist\n",
        {"name": "api-key"},
    ),
    # --replace removes a function before it deploys it.
    Exchange("deploy --replace --update=false", f"DELETE {FUNCTIONS}", 202, None, {"functionName": "echo"}),
    Exchange(
        "deploy --replace --update=false",
        f"POST {FUNCTIONS}",
        202,
        None,
        deployment("echo", ENV, envVars={"COLOUR": "red"}),
    ),
    Exchange(
        "invoke echo --method PUT --query a=b --header 'X-Thing: 1'",
        "PUT /function/echo.openfaas-fn?a=b",
        200,
        re.compile(r"(?s)(?=.*COLOUR=red)(?=.*Http_Method=PUT)(?=.*Http_Query=a=b\n)(?=.*Http_X_Thing=1\n)"),
        "x",
        {**INVOKE, "X-Thing": "1"},
        repeated=True,
    ),
    Exchange("namespace list", "GET /system/namespaces", 200, ["openfaas-fn"], headers=SDK),
    Exchange(
        "namespace create other",
        "POST /system/namespace/",
        403,
        re.compile("'other'.*openfaas-fn"),
        {"name": "other", "annotations": {"openfaas": "1"}, "labels": {"openfaas": "1"}},
        SDK,
    ),
    Exchange("list -n other", f"GET {FUNCTIONS}?namespace=other", 400, re.compile("'other'")),
    Exchange(
        "list -n openfaas-fn", f"GET {FUNCTIONS}?namespace=openfaas-fn", 200, lambda found: len(found) == 1
    ),
    Exchange("remove echo", f"DELETE {FUNCTIONS}", 202, None, {"functionName": "echo"}),
    Exchange("remove echo", f"DELETE {FUNCTIONS}", 404, ABSENT, {"functionName": "echo"}),
    Exchange("describe echo", "GET /system/function/echo?usage=1", 404, ABSENT),
    Exchange("invoke echo", "POST /function/echo.openfaas-fn", 404, re.compile("echo"), "x", INVOKE),
    Exchange("list", f"GET {FUNCTIONS}", 200, []),
)


class Replay:
    """Sends exchanges as faas-cli would."""

    def __init__(self, session: aiohttp.ClientSession, world: LocalWorld) -> None:
        self._session = session
        self._url = world.gateway_url
        self._credentials = authorization(*world.credentials)

    async def send(self, exchange: Exchange) -> None:
        """Sends it and checks what comes back."""
        until_s = time.monotonic() + REPEATS_S
        while (told := await self._ask(exchange)) is not None:
            assert exchange.repeated, told
            assert time.monotonic() < until_s, f"for {REPEATS_S} s: {told}"
            await asyncio.sleep(0.05)

    async def _ask(self, exchange: Exchange) -> str | None:
        method, path = exchange.request.split(" ")
        headers = dict(exchange.headers)
        body: bytes | None = None
        if exchange.headers is not INVOKE and not path.startswith(("/function/", "/healthz")):
            headers |= self._credentials
        if isinstance(exchange.body, dict):
            headers["Content-Type"] = "application/json"
            body = json.dumps(exchange.body, separators=(",", ":")).encode()
        elif exchange.body is not None:
            body = exchange.body.encode()
        url = yarl.URL(self._url + path, encoded=True)
        async with self._session.request(method, url, data=body, headers=headers) as answer:
            text = await answer.text()
            fits = (
                answer.status == exchange.status
                and matches(text, exchange.answer)
                and all(answer.headers.get(name) for name in exchange.named)
            )
            return None if fits else f"{exchange.command}: {exchange.request}: {answer.status} {text[:2000]}"


def matches(text: str, wanted: Check) -> bool:
    """Whether a body is what is wanted of it."""
    if wanted is None or isinstance(wanted, str):
        return text == (wanted or "")
    if isinstance(wanted, re.Pattern):
        return bool(wanted.search(text))
    try:
        lines = [json.loads(line) for line in text.splitlines()]
    except json.JSONDecodeError:
        return False
    value = lines[0] if len(lines) == 1 else lines
    if isinstance(wanted, dict):
        return bool(wanted.items() <= value.items())
    return value == wanted if isinstance(wanted, list) else bool(wanted(value))


def run(tmp_path: Path, work: Callable[[LocalWorld, aiohttp.ClientSession], Any]) -> None:
    async def inside() -> None:
        async with (
            asyncio.timeout(100),
            LocalWorld(tmp_path / "state", gateway_port=0, controller=False) as world,
            aiohttp.ClientSession(
                auto_decompress=False, skip_auto_headers=("Accept", "Content-Type")
            ) as session,
        ):
            await work(world, session)

    asyncio.run(inside())


def test_every_exchange_of_a_function_s_life(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        replay = Replay(session, world)
        for exchange in LIFE:
            await replay.send(exchange)

    run(tmp_path, work)


@pytest.mark.slow
def test_followed_logs_come_as_they_are_written_and_end_with_the_function(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        replay = Replay(session, world)
        await replay.send(Exchange("deploy", f"POST {FUNCTIONS}", 202, None, ECHO))
        headers = MANAGEMENT | authorization(*world.credentials)
        url = f"{world.gateway_url}/system/logs?follow=true&name=echo&tail=-1"
        async with session.get(url, headers=headers) as answer:
            assert (answer.status, answer.content_type) == (200, "application/x-ndjson")
            for said in ("one", "three"):
                invoke = Exchange("invoke", "POST /function/echo.openfaas-fn", 200, said, said, INVOKE)
                await replay.send(invoke)
                texts = [json.loads(await answer.content.readline())["text"] for _ in range(2)]
                assert "Forking fprocess." in texts[0]
                assert f"Wrote {len(said)} Bytes" in texts[1]
            await replay.send(Exchange("remove", f"DELETE {FUNCTIONS}", 202, None, {"functionName": "echo"}))
            assert await answer.content.read() == b""

    run(tmp_path, work)


@pytest.mark.parametrize("password", ["wrong", ""])
def test_login_with_a_wrong_password_is_told_apart(tmp_path: Path, password: str) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        headers = LOGIN | authorization("admin", password)
        async with session.get(world.gateway_url + FUNCTIONS, headers=headers) as answer:
            assert answer.status == 401

    run(tmp_path, work)
