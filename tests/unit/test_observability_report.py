"""Reports made of records: numbers, states, key stages, nodes, attainment; whatever a record holds."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from support.controller_records import changed, decided, ticks
from support.controller_world import FluidStage, FluidWorld

from keystage.cli import judging
from keystage.controller.decisions import Record
from keystage.controller.domain.decision import StageReport as Told
from keystage.controller.domain.snapshot import (
    Answered,
    Counters,
    FunctionView,
    GpuView,
    NodeView,
    PipelineView,
    Placed,
    RouterSample,
    Slo,
    Snapshot,
    StageView,
    Starting,
    WorkerSample,
)
from keystage.controller.policy.settings import PolicySettings
from keystage.observability.api import NodeReport, Report
from keystage.observability.attainment import WINDOW_S, Attainment, token_objective_s
from keystage.observability.busy import Busy
from keystage.observability.reporting import MOST_NAMED, Reporter, is_resting, latency_s, named_replicas


def report_of(reporter: Reporter, record: Record | None, trouble: str = "") -> Report:
    """A report as readers have it: through JSON."""
    if record is not None:
        reporter.note(record)
    at_s = record.snapshot.at_s if record is not None else 1.0
    body = msgspec.json.encode(reporter.report(record, trouble, at_s))
    return msgspec.json.decode(body, type=Report)


def test_a_pipeline_under_load() -> None:
    world, reporter = FluidWorld([FluidStage(0.002), FluidStage(0.02), FluidStage(0.004)]), Reporter("c", "1")
    for record in ticks(world, [60.0] * 200):
        reporter.note(record)
    report = report_of(reporter, record)
    assert (report.controller, report.number, report.version, report.trouble) == ("c", 1, "1", "")
    (pipeline,) = report.pipelines
    assert (pipeline.pipeline, pipeline.execution, pipeline.deadline_s) == ("p", "single-pass", 0.25)
    assert pipeline.arrival_rps == pytest.approx(60, rel=0.1)
    slow = pipeline.stages[1]
    assert [stage.is_key for stage in pipeline.stages] == [False, True, False]
    assert sorted(stage.rank for stage in pipeline.stages if stage.rank is not None) == [0, 1, 2]
    assert slow.rank == 0
    assert slow.ready == world.stages[1].ready
    assert slow.desired == world.stages[1].desired
    assert slow.service_s == pytest.approx(0.02, rel=0.05)
    assert slow.utilisation_ratio == pytest.approx(60 * 0.02 / slow.ready, rel=0.15)
    assert slow.arrival_cv == pytest.approx(1.0, rel=0.1)
    assert slow.share_s is not None
    assert slow.reason
    assert pipeline.latency_s is not None
    assert pipeline.latency_s >= 0.026 * 0.95
    assert report.decisions
    assert report.decisions[-1].number == len(report.decisions)


def test_the_same_records_give_the_same_reports() -> None:
    def bodies() -> list[bytes]:
        world, reporter = FluidWorld([FluidStage(0.01), FluidStage(0.02)]), Reporter("c")
        found = []
        for record in ticks(world, [0.0] * 4 + [90.0] * 40 + [2.0] * 40):
            reporter.note(record)
            found.append(msgspec.json.encode(reporter.report(record, "", record.snapshot.at_s)))
        return found

    assert bodies() == bodies()


def test_a_quiet_pipeline_keeps_the_numbers_of_the_last_look_and_shows_queues_of_now() -> None:
    world, reporter = FluidWorld([FluidStage(0.01)]), Reporter("c")
    for record in ticks(world, [30.0] * 100):
        reporter.note(record)
    before = reporter.report(record, "", record.snapshot.at_s).pipelines[0].stages[0]
    (told,) = record.decision.reports
    resting = Told(
        function=told.function, replicas=told.replicas, wanted=told.wanted, reason="nothing changed"
    )
    assert is_resting(resting)
    assert not is_resting(told)
    view = record.snapshot.pipelines[0]
    router = view.stages[0].routers[0]
    busier = msgspec.structs.replace(
        view.stages[0],
        routers=(
            msgspec.structs.replace(router, counters=msgspec.structs.replace(router.counters, queue=7.0)),
        ),
    )
    quiet = msgspec.structs.replace(
        changed(record, pipelines=(msgspec.structs.replace(view, stages=(busier,)),)),
        decision=msgspec.structs.replace(record.decision, actions=(), reports=(resting,)),
    )
    after = report_of(reporter, quiet).pipelines[0].stages[0]
    assert after.queue == 7.0
    assert (after.arrival_rps, after.reason) == (before.arrival_rps, before.reason)


def test_without_traffic_no_stage_is_the_key_stage() -> None:
    world, reporter = FluidWorld([FluidStage(0.01), FluidStage(0.02)]), Reporter("c")
    for record in ticks(world, [0.0] * 10):
        reporter.note(record)
    assert not any(s.is_key for s in report_of(reporter, record).pipelines[0].stages)


def stage_with(**scale: Any) -> StageView:
    workers = tuple(WorkerSample(replica=f"w{k}") for k in range(2))
    return StageView(stage=0, scale=FunctionView(function="p-stage-0", **scale), workers=workers)


def seen(stage: StageView, at_s: float, **fields: Any) -> Snapshot:
    view = PipelineView(pipeline="p", execution="single-pass", slo=Slo(), stages=(stage,), missing="m")
    return Snapshot(at_s=at_s, pipelines=(view,), **fields)


def test_replicas_are_named_with_state_place_and_time_in_it() -> None:
    reporter = Reporter("c")
    first = stage_with(
        desired=3,
        ready=2,
        starting=(Starting("s1", 200.0),),
        placed=(Placed("w0", "n1", (0, 1)), Placed("s1", "n2", (2,), is_ready=False)),
    )
    report = report_of(reporter, decided(seen(first, 100.0)))
    replicas = {replica.replica: replica for replica in report.pipelines[0].stages[0].replicas}
    assert [(r.state, r.node, r.gpus, r.since_s) for r in replicas.values()] == [
        ("ready", "n1", (0, 1), None),
        ("ready", "", (), None),
        ("starting", "n2", (2,), None),
    ]
    second = stage_with(desired=3, ready=2, starting=(Starting("s2", 200.0),), draining=("w1",))
    report_of(reporter, decided(seen(second, 104.0)))
    stage = report_of(reporter, decided(seen(second, 107.5))).pipelines[0].stages[0]
    assert [(r.replica, r.state, r.since_s) for r in stage.replicas] == [
        ("w0", "ready", None),
        ("s2", "starting", 3.5),
        ("w1", "draining", 3.5),
    ]
    assert (stage.ready, stage.starting, stage.draining) == (2, 1, 1)


def test_named_replicas_are_bounded_and_counts_are_not() -> None:
    names = tuple(Starting(f"s{k}", 1.0) for k in range(200))
    stage = stage_with(desired=200, starting=names)
    assert len(named_replicas(stage)) == MOST_NAMED
    report = report_of(Reporter("c"), decided(seen(stage, 1.0))).pipelines[0].stages[0]
    assert (len(report.replicas), report.starting) == (MOST_NAMED, 200)


def test_functions_and_nodes_are_sorted_and_whole() -> None:
    nodes = (
        NodeView(
            node="b", cores_free=1.5, memory_free_bytes=7, in_memory=frozenset("ba"), on_disk=frozenset("c")
        ),
        NodeView(node="a", gpus=(GpuView(80, 20, 3),)),
    )
    functions = (FunctionView(function="z", ready=1), FunctionView(function="y", desired=2, ready=1))
    report = report_of(Reporter("c"), decided(Snapshot(at_s=1.0, functions=functions, nodes=nodes)))
    assert [(f.function, f.desired, f.ready) for f in report.functions] == [("y", 2, 1), ("z", 1, 1)]
    assert [node.node for node in report.nodes] == ["a", "b"]
    assert [(g.total_bytes, g.free_bytes, g.replicas) for g in report.nodes[0].gpus] == [(80, 20, 3)]
    assert report.nodes[1] == NodeReport(
        node="b", cores_free=1.5, memory_free_bytes=7, in_memory=("a", "b"), on_disk=("c",)
    )


def test_trouble_and_no_look_at_all() -> None:
    reporter = Reporter("c")
    empty = report_of(reporter, None, "cannot observe: no answer")
    assert (empty.number, empty.trouble, empty.pipelines) == (1, "cannot observe: no answer", ())
    report = report_of(reporter, decided(seen(stage_with(ready=1), 5.0)), "cannot apply: no answer")
    assert (report.number, report.at_s, report.trouble) == (2, 5.0, "cannot apply: no answer")
    assert report.pipelines[0].missing == "m"


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_become_none(bad: float | None) -> None:
    counters = Counters(queue=bad, in_flight=bad, arrivals=bad, due=bad, late=bad, dropped=bad)
    stage = msgspec.structs.replace(
        stage_with(ready=1), routers=(RouterSample(incarnation="i", at_s=bad, counters=counters),)
    )
    record = decided(seen(stage, 5.0))
    told = Told(
        function="p-stage-0", replicas=1, wanted=1, reason="r", arrival_rps=bad, arrival_scv=bad,
        service_s=bad, utilisation_ratio=bad, sojourn_s=bad, model_s=bad, share_s=bad, queue=bad,
    )  # fmt: skip
    record = msgspec.structs.replace(
        record, decision=msgspec.structs.replace(record.decision, reports=(told,))
    )
    report = report_of(Reporter("c"), record)
    (made,) = report.pipelines[0].stages
    assert (made.queue, made.in_flight, made.arrival_rps, made.arrival_cv, made.service_s) == (None,) * 5
    assert (made.wait_s, made.utilisation_ratio, made.share_s) == (None,) * 3
    assert (report.pipelines[0].latency_s, report.pipelines[0].attainment_ratio) == (None, None)


def test_what_is_gone_is_forgotten() -> None:
    reporter = Reporter("c")
    report_of(reporter, decided(seen(stage_with(ready=1), 5.0)))
    report = report_of(reporter, decided(Snapshot(at_s=6.0)))
    assert (report.pipelines, report.functions) == ((), ())
    assert not reporter._told
    assert not reporter._attained
    assert not reporter._states


def chain(execution: str, *after: tuple[int, ...] | None) -> PipelineView:
    stages = tuple(
        StageView(stage=k, scale=FunctionView(function=f"s{k}"), after=one) for k, one in enumerate(after)
    )
    return PipelineView(pipeline="p", execution=execution, slo=Slo(), stages=stages)  # type: ignore[arg-type]


def known(sojourn_s: float | None, arrival_rps: float = 10.0) -> Told:
    return Told(function="f", replicas=1, wanted=1, reason="", sojourn_s=sojourn_s, arrival_rps=arrival_rps)


def test_latency_is_the_sum_of_a_chain_the_longest_way_of_a_graph_and_a_sessions_whole() -> None:
    told = [known(0.1), known(0.2), known(0.4)]
    assert latency_s(chain("single-pass", None, None, None), told) == pytest.approx(0.7)
    assert latency_s(chain("looping", None, None, None), told) == pytest.approx(0.1)
    graph = chain("program", (), (0,), (0,))
    assert latency_s(graph, told) == pytest.approx(0.5)
    assert latency_s(graph, [known(0.1), known(0.2, arrival_rps=40.0), known(0.4)]) == pytest.approx(0.9)
    assert latency_s(graph, [known(0.1), known(None), known(0.4)]) is None
    assert latency_s(graph, [known(0.1), None, known(0.4)]) is None


def counting(at_s: float, *stages: tuple[float, float, float], router: str = "i") -> PipelineView:
    return PipelineView(
        pipeline="p",
        execution="single-pass",
        slo=Slo(deadline_s=1.0),
        stages=tuple(
            StageView(
                stage=k,
                scale=FunctionView(function=f"s{k}"),
                routers=(
                    RouterSample(
                        incarnation=router,
                        at_s=at_s,
                        counters=Counters(due=due, late=late, dropped=dropped),
                    ),
                ),
            )
            for k, (due, late, dropped) in enumerate(stages)
        ),
    )


def test_attainment_counts_what_was_late_at_the_end_or_given_up_anywhere() -> None:
    attained = Attainment()
    assert attained.note(counting(0.0, (50, 9, 1), (49, 5, 3)), 0.0) is None  # where the counters stand
    # 100 more came in: 10 were given up at stage 0; of 90 at the last 6 were late, and 4 given up there.
    assert attained.note(counting(1.0, (150, 30, 11), (139, 11, 7)), 1.0) == pytest.approx(0.8)
    assert attained.note(counting(2.0, (150, 30, 11), (139, 11, 7)), 2.0) == pytest.approx(0.8)
    assert attained.note(counting(3.0, (250, 30, 11), (239, 11, 7)), 3.0) == pytest.approx(0.9)
    # A router that starts anew counts from 0: that is no news of what was late.
    assert attained.note(counting(4.0, (5, 5, 5), (5, 5, 5), router="j"), 4.0) == pytest.approx(0.9)
    late_s = 3.5 + WINDOW_S
    assert attained.note(counting(late_s, (5, 5, 5), (5, 5, 5), router="j"), late_s) is None


def test_attainment_is_not_known_where_nobody_counts() -> None:
    attained = Attainment()
    assert attained.note(chain("single-pass", None), 0.0) is None
    looping = msgspec.structs.replace(counting(0.0, (50, 9, 1)), execution="looping")
    assert attained.note(looping, 0.0) is None


def answering(*routers: tuple[str, float, float], execution: str = "looping") -> PipelineView:
    view = msgspec.structs.replace(chain(execution, None), slo=Slo())
    return msgspec.structs.replace(view, answered=tuple(Answered(*router) for router in routers))


@pytest.mark.parametrize("execution", ["looping", "program"])
def test_attainment_of_whole_requests_is_their_routers_count(execution: str) -> None:
    attained = Attainment()
    assert attained.note(answering(("i", 50, 40), execution=execution), 0.0) is None
    assert attained.note(answering(("i", 150, 60), execution=execution), 1.0) == pytest.approx(0.2)
    both = answering(("i", 150, 60), ("j", 9, 0), execution=execution)
    assert attained.note(both, 2.0) == pytest.approx(0.2)  # a router seen for the first time
    both = answering(("i", 200, 110), ("j", 59, 50), execution=execution)
    assert attained.note(both, 3.0) == pytest.approx(0.6)
    assert Attainment().note(answering(("i", math.nan, 1.0)), 0.0) is None


def test_a_router_that_does_not_count_answers_tells_no_attainment() -> None:
    attained = Attainment()
    assert [attained.note(answering(("i", 0, 0)), at_s) for at_s in (0.0, 1.0, 2.0)] == [None] * 3


@pytest.mark.parametrize(
    ("slo", "wanted"),
    [
        (Slo(), (2.0, None)),
        (Slo(ttft_s=1.0, tpot_s=0.1), (1.0, 0.1)),
        (Slo(tpot_s=0.1), (None, 0.1)),
        (Slo(deadline_s=3.0), (None, None)),
        (Slo(ttft_s=-1.0, tpot_s=math.nan), (2.0, None)),
    ],
)
def test_the_objective_of_tokens(slo: Slo, wanted: tuple[float | None, float | None]) -> None:
    view = msgspec.structs.replace(chain("looping", None), slo=slo)
    assert token_objective_s(PolicySettings(), view) == wanted
    assert token_objective_s(PolicySettings(), msgspec.structs.replace(view, execution="program")) == (
        None,
        None,
    )


def sessions(at_s: float, *, begun_s: float, queue: float = 86.0, due: float = 0.0) -> Record:
    """Two stages of 16 slots, the second with twice as many, computing 95 and 30 % of the time since."""
    counters = Counters(
        arrivals=200.0, gap_sum_s=50.0, gap_sq_sum_s2=30.0, services=100.0, service_sum_s=500.0,
        service_sq_sum_s2=2600.0, sojourn_sum_s=840.0, queue=queue, in_flight=16.0,
    )  # fmt: skip
    stages = tuple(
        StageView(
            stage=k,
            scale=FunctionView(function=f"p-stage-{k}", desired=k + 1, ready=k + 1),
            routers=(RouterSample(incarnation="i", at_s=at_s, counters=counters if k == 0 else IDLE),),
            workers=tuple(
                WorkerSample(
                    replica=f"w{k}{n}", slots=16.0, held_slots=16.0, rows=0.0,
                    busy_s=7.0 + busy * math.floor(max(0.0, at_s - begun_s)),
                )
                for n in range(k + 1)
            ),
        )
        for k, busy in enumerate((0.95, 0.3))
    )  # fmt: skip
    view = PipelineView(
        pipeline="p", execution="looping", slo=Slo(), stages=stages, answered=(Answered("i", due, due / 10),)
    )
    return decided(Snapshot(at_s=at_s, pipelines=(view,)))


IDLE = Counters(
    arrivals=0.0, gap_sum_s=0.0, gap_sq_sum_s2=0.0, services=0.0, service_sum_s=0.0, service_sq_sum_s2=0.0,
    sojourn_sum_s=0.0, queue=0.0, in_flight=0.0,
)  # fmt: skip


def test_a_looping_pipeline_shows_objective_attainment_busy_workers_and_the_wait_that_is_to_come() -> None:
    reporter = Reporter("c")
    for second in range(12):
        record = sessions(100.0 + second, begun_s=100.0, due=10.0 * second)
        (found,) = report_of(reporter, record).pipelines
    assert (found.ttft_s, found.deadline_s) == (2.0, None)
    assert found.attainment_ratio == pytest.approx(0.1)
    assert found.entry_wait_s == pytest.approx(86 * 5.0 / 16, rel=1e-3)  # a slot of the first stage, 5 s each
    assert [stage.utilisation_ratio for stage in found.stages] == pytest.approx([0.95, 0.3])
    assert {fault.about for fault in judging.faults(report_of(reporter, record))} == {"p"}
    assert not report_of(reporter, decided(Snapshot(at_s=200.0))).pipelines
    assert not reporter._busy


def test_busy_time_counts_each_worker_since_it_was_seen() -> None:
    def of(*workers: tuple[str, float | None]) -> StageView:
        samples = tuple(WorkerSample(replica=name, busy_s=busy_s) for name, busy_s in workers)
        return StageView(stage=0, scale=FunctionView(function="f"), workers=samples)

    busy = Busy()
    assert busy.note(of(("a", 5.0)), 0.0) is None
    assert busy.note(of(("a", 6.0)), 1.0) is None  # too short
    assert busy.note(of(("a", 8.0), ("b", 90.0), ("c", None)), 4.0) == pytest.approx(3 / 4)
    assert busy.note(of(("a", 8.0), ("b", 92.0)), 6.0) == pytest.approx((3 + 2) / (6 + 2))
    assert busy.note(of(("a", 1.0), ("b", 92.0)), 6.5) == pytest.approx(2 / 2.5)  # a began anew
    assert busy.note(of(("b", 92.0)), 30.0) == pytest.approx(0.0)  # looks that are old do not count
    assert busy.note(of(("b", 192.0)), 33.0) == 1.0
    assert busy.note(of(), 34.0) is None


def test_a_node_that_is_no_choice_is_shown_all_the_same() -> None:
    only = NodeView(node="here", gpus=(GpuView(80, 20),), in_memory=frozenset({"s0"}))
    report = report_of(Reporter("c"), decided(Snapshot(at_s=1.0, shown=(only,))))
    assert [(node.node, node.in_memory) for node in report.nodes] == [("here", ("s0",))]
    assert report.nodes[0].gpus[0].free_bytes == 20
