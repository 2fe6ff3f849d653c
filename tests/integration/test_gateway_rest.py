"""The management API beside functions' life: secrets, usage, namespaces, logs, methods, labels, metrics."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.local_function import PYTHON, SERVE, authorization, function

from keystage.gateway.auth import CHALLENGE
from keystage.local.api import Deployment
from keystage.local.world import LocalWorld

Ask = Callable[..., Awaitable[tuple[int, str, dict[str, str]]]]
Work = Callable[[LocalWorld, Ask], Awaitable[None]]
VALUE = "tell-nobody-7391"


def run(tmp_path: Path, work: Work, **env: str) -> None:
    async def inside() -> None:
        async with (
            asyncio.timeout(100),
            LocalWorld(tmp_path / "state", gateway_port=0, controller=False, env=env) as world,
            aiohttp.ClientSession(world.gateway_url, headers=authorization(*world.credentials)) as session,
        ):

            async def ask(method: str, path: str, **options: Any) -> tuple[int, str, dict[str, str]]:
                async with session.request(method, path, **options) as answer:
                    headers = {k.lower(): v for k, v in answer.headers.items()}
                    return answer.status, await answer.text(), headers

            await work(world, ask)

    asyncio.run(inside())


def test_secrets_are_created_listed_replaced_and_removed_and_never_read_back(tmp_path: Path) -> None:
    async def work(world: LocalWorld, ask: Ask) -> None:
        raw = base64.b64encode(VALUE.encode()).decode()
        said: list[str] = []

        async def secret(method: str, body: object) -> int:
            status, text, _ = await ask(method, "/system/secrets", json=body)
            said.append(text)
            assert (status >= 400) is bool(text.strip())  # every refusal says why
            return status

        assert await secret("POST", {"name": "token", "value": VALUE, "namespace": "openfaas-fn"}) == 202
        assert await secret("POST", {"name": "token", "value": VALUE}) == 409
        assert await secret("POST", {"name": "a.raw-one", "rawValue": raw, "value": ""}) == 202
        assert await secret("PUT", {"name": "token", "rawValue": raw, "value": None, "unknown": 1}) == 202
        assert await secret("PUT", {"name": "token", "value": "not this", "rawValue": raw}) == 202
        assert (world.home.secrets / "token").read_text() == VALUE
        assert await secret("PUT", {"name": "absent", "value": VALUE}) == 404
        rows = json.loads((await ask("GET", "/system/secrets?namespace=openfaas-fn"))[1])
        assert rows == [{"name": name, "namespace": "openfaas-fn"} for name in ("a.raw-one", "token")]
        bad: list[dict[str, Any]] = [
            {"name": "s"},
            {"name": "s", "value": ""},
            {"name": "s", "rawValue": VALUE + "!"},
            {"name": "s", "value": [VALUE]},
            {"value": VALUE},
            {"name": "../s", "value": VALUE},
            {"name": "S", "value": VALUE},
            {"name": "s" * 254, "value": VALUE},
            {"name": "s", "value": VALUE, "namespace": "other"},
        ]
        for body in bad:
            assert await secret("POST", body) == 400, body
        assert (await ask("POST", "/system/secrets", data=b'{"name": "' + VALUE.encode()))[0] == 400
        assert await secret("DELETE", {"name": "token"}) == 202
        assert await secret("DELETE", {"name": "token"}) == 404
        assert await secret("DELETE", {"name": "../token"}) == 400
        assert (await ask("GET", "/system/secrets?namespace=other"))[0] == 400
        logs = "".join(file.read_text() for file in world.home.logs.iterdir())
        assert VALUE not in "".join(said) + logs
        assert raw not in "".join(said) + logs

    run(tmp_path, work)


@pytest.mark.slow
def test_functions_have_secrets_usage_and_names_with_their_namespace(tmp_path: Path) -> None:
    async def work(world: LocalWorld, ask: Ask) -> None:
        body = {
            "service": "f",
            "envProcess": SERVE,
            "secrets": ["token"],
            "network": "x",
            "Extra": {"a": [1]},
        }
        status, text, _ = await ask("POST", "/system/functions", json=body)
        assert (status, "token" in text) == (400, True)
        assert (await ask("POST", "/system/secrets", json={"name": "token", "value": VALUE}))[0] == 202
        assert (await ask("POST", "/system/functions", json=body))[0] == 202
        await world.wait_ready("f")
        for name in ("f", "f.openfaas-fn"):
            status, text, _ = await ask("GET", f"/system/function/{name}?usage=1&namespace=openfaas-fn")
            row = json.loads(text)
            assert (status, row["name"], row["secrets"]) == (200, "f", ["token"])
            assert row["usage"]["totalMemoryBytes"] > 1 << 20
            assert row["usage"]["cpu"] >= 0
            assert "usage" not in json.loads((await ask("GET", f"/system/function/{name}"))[1])
            scale = {"serviceName": name, "replicas": 1.0, "namespace": "openfaas-fn"}
            assert (await ask("POST", f"/system/scale-function/{name}", json=scale))[0] == 202
            assert (await ask("GET", f"/system/logs?name={name}"))[0] == 200
            assert VALUE not in text
        for method, path, body_ in (
            ("GET", "/system/function/f.other", None),
            ("POST", "/system/scale-function/f.other", {"replicas": 1}),
            ("GET", "/system/logs?name=f.other", None),
            ("DELETE", "/system/functions", {"functionName": "f.other"}),
        ):
            status, text, _ = await ask(method, path, json=body_)
            assert (status, "the only namespace is openfaas-fn" in text) == (404, True), path
        gone = {"functionName": "f.openfaas-fn", "namespace": "openfaas-fn"}
        assert (await ask("DELETE", "/system/functions", json=gone))[0] == 202
        assert json.loads((await ask("GET", "/system/functions?namespace=openfaas-fn"))[1]) == []

    run(tmp_path, work)


def test_what_is_not_done_here_is_refused_with_its_reason(tmp_path: Path) -> None:
    async def work(_: LocalWorld, ask: Ask) -> None:
        cases = [
            ("GET", "/system/namespace/openfaas-fn", None, 200, '"name":"openfaas-fn"'),
            ("GET", "/system/namespace/other", None, 404, "'other' does not exist"),
            ("POST", "/system/namespace/", {"name": "other"}, 403, "'other' cannot be created"),
            ("POST", "/system/namespace/", {"name": "openfaas-fn"}, 409, "exists already"),
            ("POST", "/system/namespace/", {}, 400, "name"),
            ("POST", "/system/namespace/other", {}, 403, "'other' cannot be created"),
            ("PUT", "/system/namespace/openfaas-fn", {}, 403, "cannot be changed"),
            ("DELETE", "/system/namespace/openfaas-fn", {}, 403, "cannot be removed"),
            ("DELETE", "/system/namespace/other", {}, 404, "'other' does not exist"),
            ("POST", "/system/alert", {"alerts": []}, 403, "the controller alone writes replica numbers"),
            ("GET", "/system/telemetry", None, 200, '{"enabled":false}'),
            ("GET", "/ui/nothing", None, 404, "nothing"),
            ("GET", "/system/functions/", None, 404, "/system/functions/"),
        ]
        for method, path, body, status, said in cases:
            got, text, _ = await ask(method, path, json=body)
            assert (got, said in text) == (status, True), (method, path, got, text)
        labels = {
            "com.openfaas.scale.min": ("-1", "scale.min must be an integer in 0..1000, not '-1'"),
            "com.openfaas.scale.max": ("many", "scale.max"),
            "com.openfaas.scale.type": ("cpu", "scale.type"),
            "com.openfaas.scale.unheard-of": ("1", "scale.unheard-of"),
            "com.openfaas.scale.zero-duration": ("10m", "no effect without com.openfaas.scale.zero=true"),
            "com.openfaas.scale.factor": ("20", "scale.factor above 0 has no effect without"),
            "keystage.role": ("stage", "has role stage and needs KEYSTAGE_PIPELINE"),
        }
        for label, (value, said) in labels.items():
            deployment = {"service": "f", "envProcess": "sleep 1", "labels": {label: value}}
            got, text, _ = await ask("POST", "/system/functions", json=deployment)
            assert (got, said in text) == (400, True), (label, text)
        routers = {"keystage.role": "router", "com.openfaas.scale.min": "3"}
        deployment = {"service": "f", "envProcess": "sleep 1", "labels": routers}
        got, text, _ = await ask("POST", "/system/functions", json=deployment)
        assert (got, "scale.min of a router must be 1" in text) == (400, True), text
        got, text, _ = await ask("POST", "/system/functions", json={"service": "f", "envProcess": "a\0b"})
        assert (got, "NUL" in text) == (400, True)

    run(tmp_path, work)


def test_methods_of_a_path_are_told_and_head_has_no_body(tmp_path: Path) -> None:
    async def work(world: LocalWorld, ask: Ask) -> None:
        await world.deploy(function())
        allow = "GET, HEAD, POST, PUT, DELETE, OPTIONS"
        for path in ("/system/functions", "/system/secrets"):
            status, text, headers = await ask("OPTIONS", path)
            assert (status, text, headers["allow"]) == (204, "", allow)
            status, text, headers = await ask("PATCH", path)
            assert (status, headers["allow"]) == (405, allow)
            assert text == f"{path} takes {allow}, not PATCH\n"
            assert "access-control-allow-origin" not in headers
        for path in ("/healthz", "/metrics", "/openapi.json", "/system/info", "/system/function/echo"):
            whole = await ask("GET", path)
            status, text, headers = await ask("HEAD", path)
            assert (status, text) == (200, "")
            assert headers["content-type"] == whole[2]["content-type"]
        status, text, headers = await ask("HEAD", "/system/logs?name=echo&follow=true")  # ends at once
        assert (status, text, headers["content-type"]) == (200, "", "application/x-ndjson")
        status, text, headers = await ask("POST", "/system/functions", data=io.BytesIO(b" " * (2 << 20)))
        assert (status, headers["connection"]) == (413, "close")

    run(tmp_path, work)


def test_credentials_are_asked_for_by_the_standard_and_bad_headers_are_none(tmp_path: Path) -> None:
    async def work(world: LocalWorld, _: Ask) -> None:
        user, password = world.credentials
        good = authorization(user, password)["Authorization"]
        bad = [
            good + "=",
            good.replace("Basic ", "Basic"),
            good[:-4],
            "Basic",
            "Basic ä",
            "Basic " + "A" * 9000,
        ]
        async with aiohttp.ClientSession(world.gateway_url) as stranger:
            for header in bad:
                for path in ("/system/info", "/nowhere", "/system/functions"):
                    async with stranger.get(path, headers={"Authorization": header}) as answer:
                        assert (answer.status, answer.headers["www-authenticate"]) == (401, CHALLENGE), header
            async with stranger.get("/system/info", headers={"Authorization": "bAsIc" + good[5:]}) as answer:
                assert answer.status == 200
            for path in ("/healthz", "/metrics", "/openapi.json"):
                async with stranger.get(path) as answer:
                    assert answer.status == 200
        assert 'charset="UTF-8"' in CHALLENGE

    run(tmp_path, work)


def test_logs_are_chosen_by_tail_since_and_instance(tmp_path: Path) -> None:
    talk = (
        PYTHON
        + " -u -c \"import time\nfor i in range(6): print('line', i); time.sleep(0.05)\ntime.sleep(99)\""
    )

    async def work(world: LocalWorld, ask: Ask) -> None:
        await world.deploy(Deployment(service="f", envProcess=talk))

        async def lines(query: str) -> list[dict[str, str]]:
            status, text, _ = await ask("GET", f"/system/logs?name=f{query}")
            assert status == 200, text
            return [json.loads(line) for line in text.splitlines()]

        while len(every := await lines("")) < 6:
            await asyncio.sleep(0.05)
        texts = [row["text"] for row in every]
        assert texts == [f"line {i}" for i in range(6)]
        for query, wanted in [
            ("&tail=2&follow=false", texts[-2:]),
            ("&tail=0", texts),
            ("&tail=-1", texts),
            ("&tail=99", texts),
            ("&instance=f-0&tail=1", texts[-1:]),
            ("&instance=f-1", []),
            (f"&since={every[3]['timestamp']}", texts[4:]),
            ("&since=2199-01-01T00:00:00Z", []),
            ("&since=1960-01-01t00:00:00.123456789-11:30", texts),
        ]:
            assert [row["text"] for row in await lines(query)] == wanted, query
        for query in (
            "&since=2026-01-01",
            "&since=2026-01-01T00:00:00",
            "&since=2026-13-01T00:00:00Z",
            "&since=1h",
            "&tail=1.5",
            "&follow=perhaps",
            "&namespace=other",
        ):
            status, text, _ = await ask("GET", f"/system/logs?name=f{query}")
            assert (status, query[1:].split("=")[0] in text) == (400, True), query

    run(tmp_path, work)


@pytest.mark.slow
def test_client_that_goes_away_ends_a_follow_also_when_nothing_is_printed(tmp_path: Path) -> None:
    async def work(world: LocalWorld, ask: Ask) -> None:
        await world.deploy(Deployment(service="f", envProcess="sleep 600"))
        reads = 0
        log = world.supervisor.log

        def counted(*args: Any, **options: Any) -> Any:
            nonlocal reads
            reads += 1
            return log(*args, **options)

        world.supervisor.log = counted  # type: ignore[method-assign]
        async with aiohttp.ClientSession(world.gateway_url) as reader:
            headers = authorization(*world.credentials)
            path = "/system/logs?name=f&follow=true&since=2199-01-01T00:00:00Z"
            async with reader.get(path, headers=headers) as answer:
                assert answer.status == 200
                while reads < 3:
                    await asyncio.sleep(0.01)
                answer.close()
        await ask("GET", "/healthz")  # the gateway has seen the end of that connection by now or soon
        seen = -1
        while seen != reads:
            seen = reads
            await asyncio.sleep(0.6)  # more than two of its looks
        async with aiohttp.ClientSession(world.gateway_url) as reader:
            path = "/system/logs?name=f&follow=true"
            async with reader.get(path, headers=authorization(*world.credentials)) as answer:
                assert (await ask("DELETE", "/system/functions", json={"functionName": "f"}))[0] == 202
                await answer.read()  # ends when the function is removed

    run(tmp_path, work)


def test_metrics_have_openfaas_names(tmp_path: Path) -> None:
    async def work(world: LocalWorld, ask: Ask) -> None:
        await world.deploy(function())
        await world.wait_ready("echo")
        assert (await ask("POST", "/function/echo", data=b"x"))[0] == 200
        assert (await ask("GET", "/function/stranger"))[0] == 404
        _, text, headers = await ask("GET", "/metrics")
        assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = text.splitlines()
        for line in (
            "# TYPE gateway_function_invocation_total counter",
            'gateway_function_invocation_total{code="200",function_name="echo.openfaas-fn"} 1.0',
            "# TYPE gateway_function_invocation_started counter",
            'gateway_function_invocation_started{function_name="echo.openfaas-fn"} 1.0',
            "# TYPE gateway_functions_seconds histogram",
            'gateway_functions_seconds_count{code="200",function_name="echo.openfaas-fn"} 1.0',
            "# TYPE gateway_service_count gauge",
            'gateway_service_count{function_name="echo.openfaas-fn"} 1.0',
        ):
            assert line in lines, line
        assert "stranger" not in text
        names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
        assert len(names) == len(set(names))
        assert "_created" not in text

    run(tmp_path, work)
