"""One trace a request, through the real gateway, router and workers, read by a collector of this test."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.collector import Collector, Seen, collector

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.local.api import Deployment
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

STAGES = 3
TRACE, CALLER = "ab" * 16, "cd" * 8
PARENT = f"00-{TRACE}-{CALLER}-01"


@contextlib.asynccontextmanager
async def pipeline(
    tmp_path: Path, execution: Any, env: dict[str, str], last: list[Deployment] | None = None
) -> AsyncIterator[LocalWorld]:
    """A pipeline of emulated stages behind a gateway; its last stage goes into `last`, where given."""
    made = emulated("p", STAGES, execution=execution, activation_bytes=64, context_length=512)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    write(bundle, made)
    async with LocalWorld(tmp_path / "home", gateway_port=0, controller=False, env=env) as world:
        deployments = deployments_for(bundle, made, device="emulated:alpha=0.002,beta=0.001", env=env)
        if last is not None:
            last.append(deployments.pop())
        await world.deploy(*deployments)
        for deployment in deployments:
            await world.wait_ready(deployment.service, 1)
        yield world


async def post(address: str, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, str], bytes]:
    def send() -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(address, timeout=60)
        try:
            connection.request("POST", path, body, {k.replace("_", "-"): v for k, v in headers.items()})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    return await asyncio.to_thread(send)


def env_of(place: Collector) -> dict[str, str]:
    return {"KEYSTAGE_TRACES": "on", "OTEL_EXPORTER_OTLP_ENDPOINT": place.url}


def by_name(spans: Sequence[Seen], service: str) -> dict[str, Seen]:
    return {span.name: span for span in spans if span.service == service}


def gateway_of(world: LocalWorld) -> str:
    return urlsplit(world.gateway_url).netloc


def test_a_stream_of_tokens_is_one_trace_from_caller_to_stages(tmp_path: Path) -> None:
    async def work(place: Collector) -> None:
        async with pipeline(tmp_path, "looping", env_of(place)) as world:
            body = json.dumps({"prompt": list(range(40)), "max_tokens": 12, "ignore_eos": True}).encode()
            path = "/function/p/v1/completions"
            status, headers, _ = await post(gateway_of(world), path, body, traceparent=PARENT)
            assert status == 200
            assert headers["traceresponse"].split("-")[1] == TRACE
            spans = await asyncio.to_thread(
                place.wait,
                lambda seen: {"POST /function/{name}", "stage 2"} <= {s.name for s in seen},
                "all spans",
            )
        assert {span.trace_id for span in spans} == {TRACE}
        front = by_name(spans, "keystage-gateway")["POST /function/{name}"]
        router = by_name(spans, "p")
        request = router["POST /v1/completions"]
        assert (front.parent_id, request.parent_id) == (CALLER, front.span_id)
        assert front.attributes["faas.invoked_name"] == "p"
        assert front.attributes["http.response.status_code"] == 200
        names = {"queue", "prefill", "decode", *(f"stage {k}" for k in range(STAGES))}
        # The first request may come before the router has heard that the last replica is ready.
        assert set(router) - {"cold start"} == names | {"POST /v1/completions"}
        for name in names:
            assert router[name].parent_id == request.span_id
            assert request.start_s <= router[name].start_s <= router[name].end_s <= request.end_s + 1e-3
        assert router["decode"].attributes["keystage.steps"] == 11
        for k in range(STAGES):
            told = router[f"stage {k}"].attributes
            assert told["keystage.steps"] == 12
            assert told["keystage.compute.p50_s"] >= 0.001  # the emulated device's own time
            assert (
                told["keystage.compute.total_s"] + told["keystage.handoff.total_s"]
                <= router[f"stage {k}"].seconds
            )
            assert told["keystage.replica"].startswith(f"p-stage-{k}")

    with collector() as place:
        asyncio.run(asyncio.wait_for(work(place), 150))


@pytest.mark.slow
def test_an_item_s_time_is_told_by_stage_and_a_slow_answer_leads_to_its_trace(tmp_path: Path) -> None:
    async def work(place: Collector) -> None:
        async with pipeline(tmp_path, "single-pass", env_of(place)) as world:
            status, _, _ = await post(gateway_of(world), "/function/p", b"x" * 64)
            assert status == 200
            spans = await asyncio.to_thread(
                place.wait, lambda seen: {"POST /", "stage 2 compute"} <= {s.name for s in seen}, "all spans"
            )
            router = by_name(spans, "p")
            parts = [
                router[f"stage {k} {part}"]
                for k in range(STAGES)
                for part in ("queue", "hand-off", "compute")
            ]
            for before, after in pairwise(parts):
                assert after.start_s == pytest.approx(before.end_s, abs=1e-6)
            assert all(router[f"stage {k} compute"].seconds >= 0.001 for k in range(STAGES))
            (trace_id,) = {span.trace_id for span in spans}
            address = (await world.wait_ready("p", 1))[0].address
            shown = await asyncio.to_thread(_metrics, address)
            found = re.search(r'keystage_request_seconds_bucket\{.*\} 1\.0 # \{trace_id="(\w+)"\}', shown)
            assert found is not None
            assert found[1] == trace_id
            gateway = await asyncio.to_thread(_metrics, gateway_of(world))
            assert f'trace_id="{trace_id}"' in gateway
            assert gateway.endswith("# EOF\n")

    with collector() as place:
        asyncio.run(asyncio.wait_for(work(place), 150))


@pytest.mark.slow
def test_a_slow_request_is_traced_to_the_cold_start_of_stage_2(tmp_path: Path) -> None:
    async def work(place: Collector) -> None:
        last: list[Deployment] = []
        async with pipeline(tmp_path, "single-pass", env_of(place), last) as world:
            asked = asyncio.ensure_future(post(gateway_of(world), "/function/p", b"x" * 64))
            await asyncio.sleep(1.0)  # the request waits for a stage that is not there
            assert not asked.done()
            await world.deploy(*last)
            status, _, _ = await asked
            assert status == 200
            spans = await asyncio.to_thread(
                place.wait, lambda seen: any(s.name == "stage 2 compute" for s in seen), "all spans"
            )
        router = by_name(spans, "p")
        slowest = max((s for s in router.values() if s.name != "POST /"), key=lambda s: s.seconds)
        assert slowest.name in ("stage 2 queue", "cold start")
        assert router["stage 2 queue"].attributes["keystage.cold_start"] is True
        assert router["cold start"].attributes["keystage.stage"] == 2
        assert router["cold start"].seconds > 0.5 * router["POST /"].seconds

    with collector() as place:
        asyncio.run(asyncio.wait_for(work(place), 150))


@pytest.mark.slow
def test_nothing_is_sent_while_traces_are_off_and_the_caller_s_context_passes(tmp_path: Path) -> None:
    async def work(place: Collector) -> None:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": place.url, "KEYSTAGE_TRACES": "off"}
        async with pipeline(tmp_path, "single-pass", env) as world:
            status, headers, _ = await post(gateway_of(world), "/function/p", b"x" * 64, traceparent=PARENT)
            assert status == 200
            assert "traceresponse" not in headers
        assert place.bodies == 0

    with collector() as place:
        asyncio.run(asyncio.wait_for(work(place), 150))


@pytest.mark.slow
def test_a_caller_that_is_not_sampled_is_not_traced(tmp_path: Path) -> None:
    async def work(place: Collector) -> None:
        async with pipeline(tmp_path, "single-pass", env_of(place)) as world:
            silent = PARENT[:-2] + "00"
            assert (await post(gateway_of(world), "/function/p", b"x" * 64, traceparent=silent))[0] == 200
            assert (await post(gateway_of(world), "/function/p", b"x" * 64))[0] == 200
            spans: list[Any] = await asyncio.to_thread(
                place.wait, lambda seen: any(s.name == "stage 2 compute" for s in seen), "the other one"
            )
        assert TRACE not in {span.trace_id for span in spans}

    with collector() as place:
        asyncio.run(asyncio.wait_for(work(place), 150))


def _metrics(address: str) -> str:
    where = urlsplit(f"http://{address}")
    connection = http.client.HTTPConnection(where.netloc, timeout=20)
    try:
        connection.request(
            "GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
        return connection.getresponse().read().decode()
    finally:
        connection.close()
