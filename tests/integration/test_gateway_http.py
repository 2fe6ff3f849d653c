"""The whole gateway, as a process, in front of real functions."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yarl
from support.local_function import PYTHON, SERVE, authorization, function

from keystage.gateway.auth import CHALLENGE
from keystage.local.api import Deployment
from keystage.local.world import LocalWorld

Work = Callable[[LocalWorld, aiohttp.ClientSession], Awaitable[None]]


def run(tmp_path: Path, work: Work, **env: str) -> None:
    async def inside() -> None:
        async with (
            asyncio.timeout(100),
            LocalWorld(tmp_path / "state", gateway_port=0, controller=False, env=env) as world,
            aiohttp.ClientSession(world.gateway_url, headers=authorization(*world.credentials)) as session,
        ):
            await work(world, session)

    asyncio.run(inside())


async def ask(
    session: aiohttp.ClientSession, method: str, path: str, **options: Any
) -> tuple[int, str, dict[str, str]]:
    async with session.request(method, path, **options) as answer:
        return answer.status, await answer.text(), {k.lower(): v for k, v in answer.headers.items()}


def test_a_function_s_life_as_faas_cli_drives_it(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        body = {"service": "echo", "image": "x", "envProcess": SERVE, "labels": None, "constraints": None}
        assert (await ask(session, "PUT", "/system/functions", json=body))[0] == 404
        assert (await ask(session, "POST", "/system/functions", json=body))[0] == 202
        status, text, _ = await ask(session, "POST", "/system/functions", json=body)
        assert (status, "deployed already" in text) == (409, True)
        status, text, _ = await ask(session, "POST", "/function/echo", data=b"hi")
        assert (status, json.loads(text)["body"]) == (200, "hi")
        (listed,) = json.loads((await ask(session, "GET", "/system/functions"))[1])
        described = json.loads((await ask(session, "GET", "/system/function/echo.openfaas-fn"))[1])
        assert listed == described
        assert {k: listed[k] for k in ("name", "image", "namespace", "replicas", "availableReplicas")} == {
            "name": "echo",
            "image": "x",
            "namespace": "openfaas-fn",
            "replicas": 1,
            "availableReplicas": 1,
        }
        assert listed["invocationCount"] == 1
        body["envVars"] = {"A": "1"}
        assert (await ask(session, "PUT", "/system/functions", json=body))[0] == 202
        assert world.function("echo").generation == 2
        scale = {"serviceName": "echo", "replicas": 2}
        assert (await ask(session, "POST", "/system/scale-function/echo", json=scale))[0] == 202
        override = world.function("echo").override
        assert override is not None
        assert (override.replicas, 590 < override.expires_at_s - world.supervisor.now() <= 600) == (2, True)
        assert json.loads((await ask(session, "GET", "/system/function/echo"))[1])["replicas"] == 2
        assert json.loads((await ask(session, "GET", "/system/namespaces"))[1]) == ["openfaas-fn"]
        info = json.loads((await ask(session, "GET", "/system/info"))[1])
        assert info["provider"]["orchestration"] == "keystage"
        metrics = (await ask(session, "GET", "/metrics"))[1]
        assert 'gateway_function_invocation_total{code="200",function_name="echo.openfaas-fn"} 1.0' in metrics
        assert (await ask(session, "DELETE", "/system/functions", json={"functionName": "echo"}))[0] == 202
        status, text, _ = await ask(session, "GET", "/function/echo")
        assert (status, text) == (404, "function echo is not deployed\n")
        assert (await ask(session, "DELETE", "/system/functions", json={"functionName": "echo"}))[0] == 404

    run(tmp_path, work)


def test_logs_are_lines_of_json_and_can_be_followed(tmp_path: Path) -> None:
    talk = PYTHON + " -u -c \"import time\nfor i in range(1000): print('line', i); time.sleep(0.1)\""

    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(Deployment(service="f", envProcess=talk))
        async with session.get("/system/logs?name=f&follow=true&tail=-1") as answer:
            assert answer.headers["content-type"] == "application/x-ndjson"
            lines = [json.loads(await answer.content.readline()) for _ in range(8)]
        assert [line["text"] for line in lines] == [f"line {i}" for i in range(8)]
        assert {(line["name"], line["namespace"], line["instance"]) for line in lines} == {
            ("f", "openfaas-fn", "f-0")
        }
        text = (await ask(session, "GET", f"/system/logs?name=f&since={lines[5]['timestamp']}"))[1]
        assert [json.loads(line)["text"] for line in text.splitlines()][:2] == ["line 6", "line 7"]

    run(tmp_path, work)


def test_bad_input_has_its_status_and_names_what_is_wrong(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        deep = b"[" * 100_000
        cases: list[tuple[str, str, bytes, int, str]] = [
            ("POST", "/system/functions", b"{", 400, "body is no FunctionDeployment"),
            ("POST", "/system/functions", deep, 400, "body is no FunctionDeployment"),
            ("POST", "/system/functions", b"[]", 400, "body is no FunctionDeployment"),
            ("POST", "/system/functions", b"\xff", 400, "body is no FunctionDeployment"),
            ("POST", "/system/functions", b'{"service": 5}', 400, "$.service"),
            ("POST", "/system/functions", b'{"service": "a", "envVars": {"A": 1}}', 400, "$.envVars"),
            ("POST", "/system/functions", b'{"service": "../a", "envProcess": "x"}', 400, "'../a'"),
            ("POST", "/system/functions", b'{"service": "..", "envProcess": "x"}', 400, "'..'"),
            (
                "PUT",
                "/system/functions",
                b'{"service": "../replicas", "envProcess": "x"}',
                400,
                "'../replicas'",
            ),
            (
                "DELETE",
                "/system/functions",
                b'{"functionName": "../functions/echo"}',
                404,
                "../functions/echo",
            ),
            ("POST", "/system/functions", b'{"service": "a"}', 400, "envProcess"),
            ("POST", "/system/functions", b'{"service": "a", "namespace": "b"}', 400, "'b'"),
            ("POST", "/system/functions", b" " * (2 << 20), 413, "at most 1048576"),
            ("DELETE", "/system/functions", b"{}", 400, "functionName"),
            ("POST", "/system/scale-function/echo", b'{"replicas": -1}', 400, "not -1"),
            ("POST", "/system/scale-function/echo", b'{"replicas": 1e99}', 400, "$.replicas"),
            ("POST", "/system/scale-function/echo", b'{"replicas": 1000000}', 400, "not 1000000"),
            ("POST", "/system/scale-function/echo", b'{"replicas": "2"}', 400, "$.replicas"),
            ("POST", "/system/scale-function/echo", b'{"serviceName": "b", "replicas": 2}', 400, "'b'"),
            ("POST", "/system/scale-function/no", b'{"replicas": 2}', 404, "function no "),
            ("GET", "/system/function/no", b"", 404, "function no "),
            ("GET", "/system/logs?name=no", b"", 404, "function no "),
            ("GET", "/system/logs", b"", 400, "name is missing"),
            ("GET", "/system/logs?name=echo&tail=x", b"", 400, "tail"),
            ("GET", "/system/functions?namespace=x", b"", 400, "'x'"),
            ("GET", "/nowhere", b"", 404, "/nowhere"),
            ("PATCH", "/system/functions", b"", 405, "PATCH"),
            ("GET", "/function/no/sub", b"", 404, "function no "),
            ("GET", "/function/", b"", 404, "function  "),
            ("GET", "/function/echo.elsewhere", b"", 404, "echo.elsewhere"),
        ]
        for method, path, body, status, said in cases:
            got, text, _ = await ask(session, method, path, data=io.BytesIO(body))
            assert (got, said in text) == (status, True), (method, path, body[:60], got, text)
        assert [f.deployment for f in world.supervisor.view().functions] == [function()]

    run(tmp_path, work)


def test_management_needs_credentials_and_invocation_does_not(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        user, password = world.credentials
        async with aiohttp.ClientSession(world.gateway_url) as stranger:
            for headers in ({}, authorization(user, password + "x"), {"Authorization": "Bearer x"}):
                for method, path in [
                    ("GET", "/system/functions"),
                    ("POST", "/system/functions"),
                    ("DELETE", "/system/functions"),
                    ("POST", "/system/scale-function/echo"),
                    ("GET", "/system/logs?name=echo"),
                    ("GET", "/system/info"),
                ]:
                    status, _, got = await ask(stranger, method, path, headers=headers, json={})
                    assert (status, got["www-authenticate"]) == (401, CHALLENGE)
            assert (await ask(stranger, "GET", "/healthz"))[:2] == (200, "ok\n")
            assert (await ask(stranger, "GET", "/function/echo"))[0] == 200
        assert (await ask(session, "GET", "/system/functions"))[0] == 200
        log = (world.home.logs / "_gateway.log").read_text()
        assert password not in log

    run(tmp_path, work)


def test_requests_pass_unchanged_but_for_hop_by_hop_headers(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        path = "/function/echo/a%20b/%2F/c?x=1&y=%20&x=2"
        headers = {"X-Call-Id": "mine", "X-Thing": "ü", "Connection": "keep-alive, X-Drop", "X-Drop": "1"}
        url = yarl.URL(world.gateway_url + path, encoded=True)
        async with session.request("PURGE", url, data=b"\x00\xff", headers=headers) as answer:
            told = await answer.json()
            assert answer.headers["x-call-id"] == "mine"
            assert answer.headers["x-start-time"].isdigit()
            assert answer.headers.getall("set-cookie") == ["a=1", "b=2"]
            assert "x-secret-hop" not in answer.headers
        sent = dict(told["headers"])
        assert (told["method"], told["path"], told["query"]) == ("PURGE", "/a%20b/%2F/c", "x=1&y=%20&x=2")
        assert told["body"] == "\x00\xff"
        assert sent["x-call-id"] == "mine"
        assert sent["x-forwarded-for"] == "127.0.0.1"
        assert "x-drop" not in sent
        status, text, got = await ask(session, "GET", "/function/echo/status/418")
        assert (status, text) == (418, "short and stout")
        assert len(got["x-call-id"]) == 32
        status, text, _ = await ask(session, "HEAD", "/function/echo")
        assert (status, text) == (200, "")

    run(tmp_path, work)


def test_bodies_stream_both_ways_piece_by_piece(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        await world.wait_ready("echo")
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def body() -> AsyncIterator[bytes]:
            while (piece := await pieces.get()) is not None:
                yield piece

        await pieces.put(b"first")
        async with session.post("/function/echo/stream", data=body()) as answer:
            # Each line is here before the next piece is sent.
            assert await answer.content.readline() == b"data: begin\n"
            assert await answer.content.readline() == b"\n"
            for number, piece in enumerate((b"first", b"second", b"third")):
                if number:
                    await pieces.put(piece)
                assert await answer.content.readline() == b"data: " + piece + b"\n"
                assert await answer.content.readline() == b"\n"
            await pieces.put(None)
            assert await answer.content.read() == b"data: end\n\n"

    run(tmp_path, work)


def test_body_beyond_its_bound_is_refused_declared_or_not(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        await world.wait_ready("echo")
        status, text, _ = await ask(session, "POST", "/function/echo", data=io.BytesIO(b"x" * 100_000))
        assert (status, json.loads(text)["size"]) == (200, 100_000)
        status, text, _ = await ask(session, "POST", "/function/echo", data=io.BytesIO(b"x" * 100_001))
        assert (status, "at most 100000" in text) == (413, True)

        async def body() -> AsyncIterator[bytes]:
            for _ in range(11):
                yield b"x" * 10_000
                await asyncio.sleep(0.01)

        status, text, _ = await ask(session, "POST", "/function/echo", data=body())
        assert (status, "at most 100000" in text) == (413, True)
        assert (await ask(session, "GET", "/function/echo"))[0] == 200

    run(tmp_path, work, KEYSTAGE_MAX_BODY_BYTES="100000")


def test_client_that_goes_away_ends_the_work_upstream(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        await world.wait_ready("echo")
        going = asyncio.create_task(ask(session, "GET", "/function/echo/forever"))
        events: list[str] = []
        while events != ["begun"]:
            events = json.loads((await ask(session, "GET", "/function/echo/events"))[1])
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        while events != ["begun", "disconnected"]:
            events = json.loads((await ask(session, "GET", "/function/echo/events"))[1])
        metrics = (await ask(session, "GET", "/metrics"))[1]
        assert 'gateway_function_invocation_total{code="499",function_name="echo.openfaas-fn"} 1.0' in metrics

    run(tmp_path, work)


def test_replica_that_dies_is_a_named_failure_and_is_not_asked_twice(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        assert (await ask(session, "GET", "/function/echo"))[0] == 200
        status, text, _ = await ask(session, "GET", "/function/echo/die")
        assert (status, "replica echo-0 broke the connection" in text) == (502, True)
        assert (await ask(session, "GET", "/function/echo"))[0] == 200
        (record,) = world.replicas("echo")
        assert record.replica == "echo-1"
        with pytest.raises(aiohttp.ClientPayloadError):
            await ask(session, "GET", "/function/echo/half")

    run(tmp_path, work)


@pytest.mark.slow
def test_silent_replica_is_given_up(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        status, text, _ = await ask(session, "GET", "/function/echo/slow?s=2")
        assert (status, "sent nothing for 1 s" in text) == (504, True)

    run(tmp_path, work, KEYSTAGE_TIMEOUT_S="0.5")


async def obey_wakes(world: LocalWorld, function_: str) -> None:
    """Does what the controller does with a wake intent."""
    while not world.function(function_).wake:
        await world.supervisor.watch(world.supervisor.view().version, 5.0)
    await world.scale(function_, 1)


def test_requests_wake_a_function_at_zero_and_wait_for_it(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        await world.wait_ready("echo")
        await world.scale("echo", 0)
        while world.replicas("echo"):
            await world.supervisor.watch(world.supervisor.view().version, 5.0)
        waking = asyncio.create_task(obey_wakes(world, "echo"))
        answers = await asyncio.gather(*[ask(session, "GET", "/function/echo") for _ in range(20)])
        assert [status for status, _, _ in answers] == [200] * 20
        await waking
        assert not world.function("echo").wake

    run(tmp_path, work)


def test_wait_for_a_first_replica_is_bounded_and_says_why(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        await world.scale("echo", 0)
        while world.replicas("echo"):
            await world.supervisor.watch(world.supervisor.view().version, 5.0)
        status, text, headers = await ask(session, "GET", "/function/echo")
        assert (status, headers["retry-after"]) == (503, "5")
        assert text == "function echo has no ready replica after 0.3 s, 0 wanted\n"
        assert world.function("echo").wake

    run(tmp_path, work, KEYSTAGE_WAKE_S="0.3")


@pytest.mark.slow
def test_no_request_fails_while_a_function_scales_and_is_replaced(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        await world.wait_ready("echo")
        answers: list[tuple[int, str, dict[str, str]]] = []
        stop = asyncio.Event()

        async def call() -> None:
            while not stop.is_set():
                answers.append(await ask(session, "POST", "/function/echo/slow?s=0.05", data=b"x"))

        callers = [asyncio.create_task(call()) for _ in range(8)]
        await world.scale("echo", 3)
        await world.wait_ready("echo", 3)
        seen = {text for _, text, _ in answers}
        while len({text for _, text, _ in answers}) < 3:
            await asyncio.sleep(0.01)
        await world.scale("echo", 1)
        while len(world.replicas("echo")) > 1:
            await world.supervisor.watch(world.supervisor.view().version, 5.0)
        await world.deploy(function("echo", NEW="1"))
        (new,) = await world.wait_ready("echo")
        while world.replicas("echo") != [new]:
            await world.supervisor.watch(world.supervisor.view().version, 5.0)
        stop.set()
        await asyncio.gather(*callers)
        assert {status for status, _, _ in answers} == {200}
        assert seen <= {text for _, text, _ in answers} == {f"echo-{n}" for n in range(4)}

    run(tmp_path, work)


def test_gateway_can_be_killed_without_touching_functions(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        (before,) = await world.wait_ready("echo")
        assert world.gateway is not None
        process = world.gateway.process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        while world.gateway.process is process or world.gateway.process is None:
            await asyncio.sleep(0.01)
        status, text, _ = await ask(session, "GET", "/function/echo")
        assert (status, json.loads(text)["replica"]) == (200, "echo-0")
        assert world.replicas("echo") == [before]
        assert world.gateway.restarts == 1

    run(tmp_path, work)
