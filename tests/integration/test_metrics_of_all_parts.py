"""Every part of a local world is scraped as Prometheus does it, and the counts are those of what was sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import jsonschema_rs
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families
from support.keysmanager_forks import random_bundle
from support.local_function import authorization
from support.servers import free_port

from keystage.bundle.api import emulated
from keystage.bundle.store import load, write
from keystage.local.api import ReplicaRecord
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld
from keystage.observability.api import EVENTS_PATH, REPORT_PATH
from keystage.wire.metrics import METRICS

WAIT_S = 60.0
SENT = 12
OPEN = "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;version=0.0.4;q=0.5"
"""As Prometheus asks."""
Labels = tuple[tuple[str, str], ...]
Series = dict[tuple[str, Labels], float]


async def scrape(address: str, *, token: str = "", accept: str = "") -> Series:
    """All series of one part; it answers as Prometheus wants it to."""
    headers = {"Accept": accept} if accept else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session,
        session.get(f"http://{address}/metrics", headers=headers) as answer,
    ):
        text, kind = await answer.text(), answer.headers.get("Content-Type", "")
        assert answer.status == 200, text
    is_open = kind.startswith("application/openmetrics-text")
    assert is_open or kind.startswith("text/plain; version="), (
        kind or "no content type: Prometheus takes none"
    )
    found: Series = {}
    for family in (open_families if is_open else families)(text):
        assert family.documentation or family.type == "unknown", family.name
        for sample in family.samples:
            place = (sample.name, tuple(sorted(sample.labels.items())))
            assert place not in found, f"{place} comes twice"
            found[place] = sample.value
            spec = METRICS.get(re.sub(r"_(total|bucket|sum|count)$", "", sample.name)) or METRICS.get(
                sample.name
            )
            if sample.name.startswith("keystage_"):
                assert spec is not None, sample.name
                assert set(sample.labels) - {"le"} == set(spec.labels), sample
    return found


def value(series: Series, name: str, **labels: str) -> float:
    """Sum over the series of a name that have these labels; there is one at least."""
    found = [v for (n, have), v in series.items() if n == name and labels.items() <= dict(have).items()]
    assert found, (name, labels)
    return sum(found)


async def until(address: str, holds: Callable[[Series], bool], what: str) -> Series:
    """The first series that hold; a part may not listen yet."""
    end_s = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(aiohttp.ClientConnectorError):
            if holds(series := await scrape(address)):
                return series
        assert time.monotonic() < end_s, f"not within {WAIT_S:g} s: {what}"
        await asyncio.sleep(0.1)


def all_counted(of_router: Series) -> bool:
    """Whether what was sent has been counted to its end, which may be after the client has its answer."""
    return value(of_router, "keystage_requests_in_time_total") == SENT


def same_sums(series: Series, name: str, count: float, **labels: str) -> float:
    """A histogram whose last bucket and count are `count`; its sum."""
    assert value(series, f"{name}_bucket", le="+Inf", **labels) == count
    assert value(series, f"{name}_count", **labels) == count
    return value(series, f"{name}_sum", **labels)


async def report_is_as_documented(world: LocalWorld) -> None:
    """The report of a controller that works, whole and as an event, fits the gateway's OpenAPI document."""
    url, timeout = world.gateway_url, aiohttp.ClientTimeout(total=WAIT_S)
    async with aiohttp.ClientSession(headers=authorization(*world.credentials), timeout=timeout) as session:
        async with session.get(f"{url}/openapi.json") as answer:
            document = await answer.json()
        schema = document["paths"][REPORT_PATH]["get"]["responses"]["200"]["content"]["application/json"]
        validator = jsonschema_rs.Draft202012Validator(
            {**schema["schema"], "components": document["components"]}
        )
        async with session.get(url + REPORT_PATH) as answer:
            assert answer.status == 200
            validator.validate(told := await answer.json())
            assert {one["pipeline"] for one in told["pipelines"]} >= {"single"}
        async with session.get(url + EVENTS_PATH) as answer:
            (kind,) = document["paths"][EVENTS_PATH]["get"]["responses"]["200"]["content"]
            assert answer.headers["Content-Type"].partition(";")[0] == kind
            event = ""
            async for raw in answer.content:
                name, _, value = raw.decode().rstrip("\n").partition(": ")
                if name == "event":
                    event = value
                elif name == "data" and event == "report":
                    validator.validate(json.loads(value))
                    break


def test_counts_of_every_part_are_those_of_what_was_sent(tmp_path: Path) -> None:
    tiny = random_bundle(tmp_path / "tiny", stages=2)
    looping = load(tiny).name
    single = emulated("single", 2, execution="single-pass", activation_bytes=64, context_length=0)
    (tmp_path / "single").mkdir()
    write(tmp_path / "single", single)
    port = free_port()

    async def answered(address: str, path: str, body: bytes) -> float:
        begun_s = time.monotonic()
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session,
            session.post(f"http://{address}{path}", data=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
            await answer.read()
        return time.monotonic() - begun_s

    async def work() -> None:
        env = {"KEYSTAGE_HEALTH_PORT": str(port)}
        async with LocalWorld(tmp_path / "home", gateway_port=0, env=env, keysmanager=True) as world:
            records: dict[str, ReplicaRecord] = {}
            functions = [
                *deployments_for(tiny, load(tiny), env={"KEYSTAGE_SLO": '{"ttft_s": 60, "tpot_s": 60}'}),
                *deployments_for(
                    tmp_path / "single",
                    single,
                    device="emulated:alpha=0.001,beta=0.002",
                    env={"KEYSTAGE_SLO": '{"deadline_s": 60}'},
                ),
            ]
            await world.deploy(*functions)
            for function in functions:
                (records[function.service],) = await world.wait_ready(function.service, 1, WAIT_S)
            gateway = world.gateway_url.removeprefix("http://")
            body = {"model": looping, "prompt": [3, 4, 5], "max_tokens": 4, "ignore_eos": True}
            completion, path = json.dumps(body).encode(), f"/function/{looping}/v1/completions"
            took_s = [await answered(gateway, path, completion) for _ in range(SENT)]
            await asyncio.gather(*(answered(gateway, "/function/single/", b"x" * 64) for _ in range(SENT)))

            of_looping = await until(records[looping].address, all_counted, "the last answer is counted")
            assert value(of_looping, "keystage_requests_total") == SENT
            assert value(of_looping, "keystage_requests_completed_total") == SENT
            assert value(of_looping, "keystage_requests_due_total") == SENT
            assert value(of_looping, "keystage_requests_in_time_total") == SENT
            assert value(of_looping, "keystage_requests_refused_total", reason="queue_full") == 0
            assert value(of_looping, "keystage_stage_arrivals_total", stage="0") == SENT
            total_s = same_sums(of_looping, "keystage_request_seconds", SENT)
            assert 0 < same_sums(of_looping, "keystage_first_token_seconds", SENT) < total_s <= sum(took_s)
            names = {name for name, _ in of_looping}
            assert not names & {"keystage_stage_batch_items_sum", "keystage_replica_idle_seconds_total"}

            of_single = await until(records["single"].address, all_counted, "the last answer is counted")
            for stage in ("0", "1"):
                for counted in ("arrivals", "waits", "services"):
                    assert value(of_single, f"keystage_stage_{counted}_total", stage=stage) == SENT
                batches = value(of_single, "keystage_stage_batch_items_count", stage=stage)
                assert same_sums(of_single, "keystage_stage_batch_items", batches, stage=stage) == SENT
                parts_s = [
                    value(of_single, f"keystage_stage_{part}_seconds_total", stage=stage)
                    for part in ("wait", "service", "handoff")
                ]
                sojourn_s = value(of_single, "keystage_stage_sojourn_seconds_total", stage=stage)
                assert max(parts_s) <= sojourn_s <= value(of_single, "keystage_request_seconds_sum")
            assert value(of_single, "keystage_requests_in_time_total") == SENT

            for service, rows in ((f"{looping}-stage-1", 4 * SENT), ("single-stage-1", SENT)):
                of_worker = await until(
                    records[service].address,
                    lambda s, rows=rows: value(s, "keystage_stage_rows_total", stage="1") >= rows,
                    "the last row is counted",
                )
                assert value(of_worker, "keystage_stage_busy_seconds_total", stage="1") > 0
                await until(
                    records[service].address,
                    lambda s: value(s, "keystage_worker_sessions") == 0,
                    "the last session is released",
                )

            for accept in ("", OPEN):
                of_gateway = await scrape(gateway, accept=accept)
                labels = {"function_name": f"{looping}.openfaas-fn", "code": "200"}
                assert value(of_gateway, "gateway_function_invocation_total", **labels) == SENT
                assert same_sums(of_gateway, "gateway_functions_seconds", SENT, **labels) <= sum(took_s)
                labels["code"] = "503"
                assert value(of_gateway, "gateway_function_invocation_total", **labels) == 0

            controller = f"127.0.0.1:{port}"
            of_controller = await until(
                controller,
                lambda s: any(n == "keystage_stage_utilisation_ratio" for n, _ in s),
                "the controller has estimated",
            )
            assert value(of_controller, "keystage_leader") == 1
            for pipeline in (looping, "single"):
                assert value(of_controller, "keystage_pipeline_held", pipeline=pipeline) == 0
                assert value(of_controller, "keystage_stage_is_key", pipeline=pipeline) == 1
            assert value(of_controller, "keystage_decisions_total", reason="scale-down") == 0

            await report_is_as_documented(world)
            (daemon,) = world.keysmanagers.values()
            token = world.home.keysmanager_token.read_text().strip()
            assert daemon.process is not None
            of_node = await scrape(daemon.process.address, token=token)
            assert value(of_node, "keystage_starts_total") == len(functions)
            assert value(of_node, "keystage_starts_total", via="holder") == 2
            assert value(of_node, "keystage_parameter_gives_total") == 2
            assert value(of_node, "keystage_loads_total") == 2
            assert value(of_node, "keystage_holder_bytes", pipeline=looping) > 0
            assert same_sums(of_node, "keystage_start_seconds", 2, pipeline=looping, phase="ready") > 0

    asyncio.run(asyncio.wait_for(work(), 4 * WAIT_S))
