"""Ten thousand functions with random names come and go: what each part exposes stays bounded."""

from __future__ import annotations

import random
import string

from prometheus_client.parser import text_string_to_metric_families
from support.scripted_upstream import open_call, proxy_to, run

from keystage.controller.decisions import Record
from keystage.controller.domain.decision import Decision, SetReplicas, StageReport
from keystage.controller.domain.snapshot import FunctionView, PipelineView, Slo, Snapshot, StageView
from keystage.controller.domain.state import PolicyState
from keystage.controller.metrics import REASONS, Counts
from keystage.gateway.backend import FunctionState
from keystage.gateway.metrics import MOST_GONE, Metrics
from keystage.keysmanager.metrics import MOST_SERIES
from keystage.keysmanager.metrics import Counts as DaemonCounts
from keystage.local.api import Deployment
from keystage.wire.metrics import START_BOUNDS_S, expose

FUNCTIONS = 10_000
LETTERS = string.ascii_lowercase + string.digits


def names(seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["f" + "".join(rng.choices(LETTERS, k=rng.randrange(4, 40))) for _ in range(FUNCTIONS)]


def series(text: bytes) -> int:
    return sum(len(family.samples) for family in text_string_to_metric_families(text.decode()))


def deployed(name: str) -> FunctionState:
    deployment = Deployment(service=name, image="none")
    return FunctionState(
        deployment=deployment, created_at_s=0.0, replicas=1, ready=(), waking=False, trouble=()
    )


def test_requests_for_functions_that_there_are_none_of_make_no_series() -> None:
    async def work() -> None:
        async with proxy_to() as proxy:
            before = series(proxy._metrics.render([])[0])
            for name in names(1):
                call = open_call()
                await call.run(proxy, f"/function/{name}/x".encode())
                assert call.status == 404
            assert series(proxy._metrics.render([])[0]) == before

    run(work())


def test_the_gateway_forgets_functions_that_are_gone_and_keeps_those_that_are_not() -> None:
    metrics = Metrics()
    metrics.begin("stays")
    metrics.end("stays", 200, 0.1)
    metrics.begin("runs")
    most = 0
    for count, name in enumerate(names(2)):
        metrics.begin(name)
        metrics.end(name, (200, 404, 500, 503)[count % 4], 0.1)
        if count % 500 == 499:
            most = max(most, series(metrics.render([deployed("stays"), deployed(name)])[0]))
    text, _ = metrics.render([deployed("stays")])
    assert most <= (MOST_GONE + 600) * 25
    assert series(text) <= (MOST_GONE + 3) * 25
    assert b'gateway_function_invocation_total{code="200",function_name="stays.openfaas-fn"} 1.0' in text
    assert metrics.in_flight("runs") == metrics.invocations("runs") == 1


def test_the_controller_shows_what_there_is_and_counts_by_kinds_alone() -> None:
    counts = Counts()
    for name in names(3):
        stages = tuple(
            StageView(stage=k, scale=FunctionView(function=f"{name}-stage-{k}", desired=1)) for k in range(3)
        )
        view = PipelineView(pipeline=name, execution="looping", slo=Slo(), stages=stages)
        reports = tuple(
            StageReport(
                function=s.scale.function, replicas=2, wanted=2, reason=f"{name} {s.stage}", arrival_rps=1.0
            )
            for s in stages
        )
        actions = (SetReplicas(stages[0].scale.function, 2),)
        decision = Decision(actions=actions, state=PolicyState(), reports=reports)
        counts.hear(Record(snapshot=Snapshot(at_s=0.0, pipelines=(view,)), decision=decision), "")
    shown = list(counts.samples())
    assert len(shown) <= 2 + len(REASONS) + 1 + 3 * 6
    assert {sample.labels["pipeline"] for sample in shown if "pipeline" in sample.labels} == {names(3)[-1]}
    (ups,) = [s.value for s in shown if s.name == "keystage_decisions" and s.labels["reason"] == "scale-up"]
    assert ups == FUNCTIONS


def test_a_keysmanager_keeps_so_many_histograms_of_starts() -> None:
    counts = DaemonCounts()
    for name in names(4):
        for phase in ("forked", "ready"):
            counts.reached(name, "holder", phase, 0.2)
    text = expose(counts.samples("n"))
    assert series(text) <= MOST_SERIES * (len(START_BOUNDS_S) + 3) + 10
    assert names(4)[-1].encode() in text
    assert names(4)[0].encode() not in text
