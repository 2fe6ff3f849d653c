"""What the platform over a stock gateway does beyond the contract of every platform."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.openfaas_standin import Imagined
from support.openfaas_world import OpenFaasWorld, OwnGateway

from keystage.controller.domain.decision import (
    ClearWake,
    KeyStage,
    LiftOverride,
    PublishKeyStages,
    SetCpu,
    SetReplicas,
)
from keystage.controller.domain.platform import PlatformError
from keystage.controller.platforms import openfaas_memory
from keystage.controller.platforms.openfaas import NotForThisGateway, OpenFaasPlatform
from keystage.local.api import Deployment
from keystage.openfaas.errors import Unreachable
from keystage.router.api import RouterStats, StageCounters

LABELS = {"keystage.pipeline": "p", "keystage.role": "router"}
STAGE = {"keystage.pipeline": "p", "keystage.role": "stage", "keystage.stage": "0"}


@pytest.fixture
def world() -> Iterator[OpenFaasWorld]:
    made = OpenFaasWorld("openfaas-ce", Imagined(lag_s=0.0))
    yield made
    made.end()
    made.platform.close()


@contextmanager
def router(incarnation: str) -> Iterator[str]:
    """A router that only tells statistics; yields its address."""
    counters = StageCounters(0, 1, 0.0, 0.0, 3, 0, 1, 0.0, 1, 0.1, 0.01, 0.1)
    told = RouterStats("p", incarnation, 5.0, 5.0, "single-pass", 1, 1, {}, 0, 0, [counters], [])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = msgspec.json.encode(told)
            self.send_response(200 if self.path == "/_/stats" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def pipeline(world: OpenFaasWorld, routers: int, *addresses: str) -> None:
    labels = {**LABELS, "com.openfaas.scale.min": str(routers)}
    world.deploy(Deployment(service="p", labels=labels))
    world.deploy(Deployment(service="p-stage-0", labels=STAGE))
    assert isinstance(world.runner, Imagined)
    world.runner.answering["p"] = list(addresses)


def test_every_router_replica_is_read_though_the_gateway_chooses(world: OpenFaasWorld) -> None:
    with router("a") as one, router("b") as two, router("c") as three:
        pipeline(world, 3, one, two, three)
        (view,) = world.platform.observe().pipelines
        assert view.missing == ""
        assert {r.incarnation for r in view.stages[0].routers} == {"a", "b", "c"}
        assert [r.counters.queue for r in view.stages[0].routers] == [3, 3, 3]


def test_a_router_replica_that_never_answers_holds_the_pipeline(world: OpenFaasWorld) -> None:
    with router("a") as one:
        pipeline(world, 2, one)
        (view,) = world.platform.observe().pipelines
        assert view.missing.startswith("router p: 1 of 2 replicas answered")
        assert view.stages[0].routers == ()


def test_routers_that_do_not_answer_say_what_the_gateway_said(world: OpenFaasWorld) -> None:
    pipeline(world, 1)
    (view,) = world.platform.observe().pipelines
    assert view.missing == "router p answered 503 to /_/stats"
    assert world.gateway.asked.count("GET /function/p/_/stats") == 1


def test_numbers_the_gateway_does_not_take_are_bounded_and_said_once(
    world: OpenFaasWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.deploy(Deployment(service="f"))
    for _ in range(2):
        for asked, stated in ((0, 1), (9, 5)):
            world.platform.apply([SetReplicas("f", asked)])
            assert world.gateway.replicas["f"] == stated
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == [
        "function f: 1 replicas stated for 0: OpenFaaS Community Edition's bound",
        "function f: 5 replicas stated for 9: OpenFaaS Community Edition's bound",
    ]


def test_what_has_no_place_there_is_said_once(world: OpenFaasWorld, caplog: pytest.LogCaptureFixture) -> None:
    actions = [
        SetCpu("f", 2.0),
        LiftOverride("f"),
        ClearWake("f"),
        PublishKeyStages("p", (KeyStage(0, 1.0),)),
    ]
    for _ in range(3):
        world.platform.apply(actions)
    assert len(caplog.records) == 3
    assert world.gateway.asked == []


def test_a_redeploy_that_set_the_number_back_is_noticed(
    world: OpenFaasWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(openfaas_memory, "SETTLE_S", 0.0)
    least = Deployment(service="f", image="i", labels={"com.openfaas.scale.min": "1"})
    world.deploy(least)
    world.platform.apply([SetReplicas("f", 4)])
    assert world.platform.observe().functions[0].desired == 4
    assert world.gateway.update(least)[0] == 202  # by somebody else
    assert world.platform.observe().functions[0].desired == 1
    assert "function f: 4 replicas were stated, the gateway has 1" in caplog.text


def test_a_gateway_that_failed_may_be_another_one_afterwards(
    world: OpenFaasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.deploy(Deployment(service="f"))
    assert world.platform.observe().functions[0].cap == 5
    world.gateway.kind = "openfaas-pro"
    assert world.platform.observe().functions[0].cap == 5
    with monkeypatch.context() as patch:
        patch.setattr(world.client, "functions", lambda: (_ for _ in ()).throw(Unreachable("away")))
        with pytest.raises(PlatformError, match="away"):
            world.platform.observe()
    assert world.platform.observe().functions[0].cap is None


def test_wrong_credentials_are_a_platform_error(world: OpenFaasWorld) -> None:
    from keystage.openfaas.client import Client
    from keystage.openfaas.exchange import Wire

    platform = OpenFaasPlatform(Client(Wire(world.gateway.url)))
    with pytest.raises(PlatformError, match="answered 401"):
        platform.observe()
    platform.close()


def test_our_own_gateway_is_refused(tmp_path: Path) -> None:
    own = OwnGateway(tmp_path)
    platform = OpenFaasPlatform(own.client)
    try:
        own.client.deploy(Deployment(service="f", envProcess="sleep 60"))
        with pytest.raises(NotForThisGateway, match="whose own controller"):
            platform.observe()
        with pytest.raises(NotForThisGateway):
            platform.apply([SetReplicas("f", 3)])
        assert own.local.function("f").override is None
    finally:
        platform.close()
        own.end()
