"""Ten thousand functions with random names come and go: what each part exposes stays bounded."""

from __future__ import annotations

import random
import string
from typing import Any
from urllib.parse import quote

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families
from support.scripted_upstream import open_call, proxy_to, run

from keystage.controller.decisions import Record
from keystage.controller.domain.decision import Decision, SetReplicas, StageReport
from keystage.controller.domain.snapshot import FunctionView, PipelineView, Slo, Snapshot, StageView
from keystage.controller.domain.state import PolicyState
from keystage.controller.metrics import REASONS, Counts
from keystage.gateway.backend import FunctionState
from keystage.gateway.metrics import MOST_GONE, Metrics
from keystage.keysmanager.metrics import Counts as DaemonCounts
from keystage.keysmanager.pod_api import Activated, Activation
from keystage.kubernetes.pod_starts import MOST_NODES, UNSEEN_S, PodStarts
from keystage.local.api import Deployment
from keystage.wire.metric_spec import ANSWER_BOUNDS_S, START_BOUNDS_S
from keystage.wire.metrics import Sample, Samples, expose
from keystage.wire.start_counts import MOST_SERIES

FUNCTIONS = 10_000
LETTERS = string.ascii_lowercase + string.digits


def names(seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["f" + "".join(rng.choices(LETTERS, k=rng.randrange(4, 40))) for _ in range(FUNCTIONS)]


def hostile_names() -> list[str]:
    """What a stranger may write into a path: quotes, line ends, braces, other alphabets, and far too much."""
    rng = random.Random(9)
    pieces = ['"', "\\", "\n", "{", "}", "#", "=", "..", "%00", "é", "名", " ", "a" * 300, 'x"} 1\n# EOF']
    return ["".join(rng.choices(pieces, k=rng.randrange(1, 9))) for _ in range(FUNCTIONS)]


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
            for name in hostile_names():
                call = open_call()
                await call.run(proxy, b"/function/" + quote(name).encode() + b"/x")
                assert call.status in (400, 404)
            assert series(proxy._metrics.render([])[0]) == before

    run(work())


@pytest.mark.slow
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


@pytest.mark.slow
def test_of_functions_that_were_all_deleted_the_newest_few_are_kept() -> None:
    """None is left, so nobody would ever come to displace them."""
    metrics = Metrics()
    every = names(5)
    text, _ = metrics.render([deployed(name) for name in every])
    assert series(text) == 2 * FUNCTIONS  # wanted replicas, and a count of those that wait in vain
    for name in every:
        metrics.begin(name)
        metrics.end(name, 200, 0.1)
    text, _ = metrics.render([])
    assert series(text) <= MOST_GONE * (len(ANSWER_BOUNDS_S) + 6)
    assert every[-1].encode() in text
    assert every[0].encode() not in text


def test_a_deployed_function_s_calls_that_wait_in_vain_are_counted_from_zero() -> None:
    metrics = Metrics()
    line = b'gateway_function_invocation_total{code="503",function_name="f.openfaas-fn"} '
    assert line + b"0.0" in metrics.render([deployed("f")])[0]
    metrics.begin("f")
    metrics.end("f", 503, 30.0)
    assert line + b"1.0" in metrics.render([deployed("f")])[0]
    assert line not in Metrics().render([])[0]


def test_what_is_called_by_any_name_is_shown_in_both_formats() -> None:
    """Names with quotes and line ends are refused at every door; a label would stand them nevertheless."""
    hostile = 'x"} 1\n# EOF\\'
    labels = {"pipeline": hostile, "replica": hostile}
    samples = [Sample("keystage_worker_sessions", labels, 1.0)]
    (family,) = text_string_to_metric_families(expose(samples).decode())
    assert [dict(sample.labels) for sample in family.samples] == [labels]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Samples(lambda: samples))
    (family,) = open_families(generate_open(registry).decode())
    assert [dict(sample.labels) for sample in family.samples] == [labels]


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


@pytest.mark.slow
def test_a_controller_keeps_so_many_nodes_and_histograms_of_pods() -> None:
    starts = PodStarts(lambda: 10.5)
    answer = Activated(via="standby", source="memory", phases={"mapped": 10.1, "begun": 9.0})
    for number, name in enumerate(names(6)):
        node = "n" if number % 2 else name
        wanted = Activation(function=name, env={"KEYSTAGE_PIPELINE": name}, decided_at_s=10.0)
        starts.served({"spec": {"nodeName": node}}, wanted, answer)
    text = expose(starts.samples())
    each = len(START_BOUNDS_S) + 3
    assert series(text) <= MOST_SERIES * each + MOST_NODES * (2 * each + 1)
    ready = f'node="n",phase="ready",pipeline="{names(6)[-1]}",via="standby"'.encode()
    assert b"keystage_start_seconds_sum{" + ready + b"} 0.5" in text
    assert b'keystage_starts_total{node="n",via="standby"} ' + f"{FUNCTIONS / 2}".encode() in text
    assert names(6)[0].encode() not in text


def pod(phase: str, *, is_ready: bool = False, **metadata: object) -> dict[str, Any]:
    conditions = [
        {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    ] * is_ready
    return {
        "metadata": {"name": "p", **metadata},
        "spec": {"nodeName": "n"},
        "status": {"phase": phase, "conditions": conditions},
    }


def test_a_fresh_pod_counts_once_when_it_is_ready_and_never_if_it_will_not_be() -> None:
    now = [10.0]
    starts = PodStarts(lambda: now[0])
    for name in ("one", "ends", "leaves", "refused"):
        starts.begun(name, "llm", 10.0)
    starts.look({name: pod("Pending") for name in ("one", "ends", "leaves")})
    now[0] = 13.0
    leaving = pod("Running", is_ready=True, deletionTimestamp="2026-01-01T00:00:00Z")
    shown = {"one": pod("Running", is_ready=True), "ends": pod("Failed"), "leaves": leaving}
    starts.look(shown)
    starts.look(shown | {"foreign": pod("Running", is_ready=True)})
    now[0] = 10.0 + UNSEEN_S + 1
    starts.look({})
    starts.look({"refused": pod("Running", is_ready=True)})
    found = {(s.name, s.labels["via"]): s.value for s in starts.samples()}
    assert found == {("keystage_starts", "process"): 1, ("keystage_start_seconds", "process"): 3.0}
