"""The policy under generated snapshots: total, bounded, monotone, within budget, repeatable."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.controller.decisions import DecisionLog, Record, replay
from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.snapshot import (
    BatchProfile,
    Counters,
    CpuView,
    FunctionView,
    GatewayLoad,
    GpuView,
    NodeView,
    Override,
    PipelineView,
    Placed,
    RouterSample,
    Slo,
    Snapshot,
    StageView,
    Starting,
    StartTimes,
    Target,
    WorkerSample,
)
from keystage.controller.domain.state import PolicyState
from keystage.controller.maths.erlang import servers_for_wait
from keystage.controller.maths.pid import PidGains, PidState, step
from keystage.controller.policy import demand
from keystage.controller.policy.decide import decide
from keystage.controller.policy.demand import Load
from keystage.controller.policy.settings import MOST_REPLICAS, PolicySettings

garbled = st.sampled_from([math.nan, math.inf, -1.0, 0.0, 1e308, 5e-324, 2.0**62])
wild = st.none() | garbled | st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e6)
tame = st.floats(0, 1e6)
count = st.integers(-3, 40)
many = count | st.just(2**62)
real = garbled | st.floats(0, 100)
finite = real.filter(math.isfinite)  # as JSON has it where a number cannot be missing
moment = st.floats(0, 1e4)
gpu_indices = st.lists(st.integers(-1, 4), max_size=2).map(tuple)


def functions(
    name: str, instant: st.SearchStrategy[float], real_number: st.SearchStrategy[float]
) -> st.SearchStrategy[FunctionView]:
    return st.builds(
        FunctionView,
        function=st.just(name),
        desired=st.none() | count,
        ready=many,
        starting=st.lists(st.builds(Starting, st.just("r"), instant), max_size=3).map(tuple),
        min_replicas=count,
        max_replicas=st.integers(-3, 10**9),
        cap=st.none() | count,
        override=st.none() | st.builds(Override, count, instant),
        wake=st.booleans(),
        placed=st.lists(
            st.builds(Placed, st.sampled_from("vw"), st.sampled_from(["n0", "n1", "gone"]), gpu_indices),
            max_size=2,
        ).map(tuple),
        zero_after_s=st.none() | real_number,
        target=st.none()
        | st.builds(Target, st.sampled_from(["capacity", "rps"]), real_number, st.none() | count),
        loads=st.none()
        | st.lists(st.builds(GatewayLoad, st.sampled_from("gh"), wild, wild), max_size=2).map(tuple),
    )


def stages(
    index: int, instant: st.SearchStrategy[float], number: st.SearchStrategy[float]
) -> st.SearchStrategy[StageView]:
    names = Counters.__struct_fields__
    counters = st.builds(Counters, **dict.fromkeys(names, wild)) | st.builds(
        Counters, **dict.fromkeys(names, tame)
    )
    routers = st.builds(RouterSample, incarnation=st.sampled_from("ab"), at_s=wild | tame, counters=counters)
    workers = st.builds(
        WorkerSample, replica=st.sampled_from("vw"), slots=wild, held_slots=wild, busy_s=tame, rows=tame
    )
    return st.builds(
        StageView,
        stage=st.just(index),
        scale=functions(f"p-stage-{index}", instant, number),
        start_s=wild,
        profile_s=wild,
        routers=st.lists(routers, max_size=2).map(tuple),
        workers=st.lists(workers, max_size=2).map(tuple),
        batch=st.none() | st.builds(BatchProfile, number, number, many),
        starts=st.none() | st.builds(StartTimes, wild, wild, wild, wild),
        cpu=st.none() | st.builds(CpuView, number, number, wild, wild, wild, wild),
        after=st.none() | st.lists(st.integers(-1, 5), max_size=3).map(tuple),
        gpus=st.integers(-1, 3),
        gpu_bytes=many,
        parameter_bytes=many,
    )


def snapshots(
    at: st.SearchStrategy[float], instant: st.SearchStrategy[float], number: st.SearchStrategy[float]
) -> st.SearchStrategy[Snapshot]:
    pipeline = st.builds(
        PipelineView,
        pipeline=st.just("p"),
        execution=st.sampled_from(["looping", "single-pass"]),
        slo=st.builds(Slo, wild, wild, wild),
        stages=st.integers(0, 4).flatmap(
            lambda n: st.tuples(*(stages(k, instant, number) for k in range(n)))
        ),
        missing=st.sampled_from(["", "", "router is gone"]),
    )
    return st.builds(
        Snapshot,
        at_s=at,
        pipelines=st.lists(pipeline, max_size=1).map(tuple),
        functions=st.lists(functions("f", instant, number), max_size=1).map(tuple),
        budget_replicas=st.none() | count,
        nodes=st.just(()) | clusters(number),
    )


def clusters(number: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[NodeView, ...]]:
    """Up to three nodes of distinct names, their numbers as garbled as the rest."""
    gpus = st.lists(st.builds(GpuView, many, many, count), max_size=3).map(tuple)
    held = st.sets(st.sampled_from(["p-stage-0", "p-stage-1"])).map(frozenset)

    def node(name: str) -> st.SearchStrategy[NodeView]:
        return st.builds(
            NodeView,
            node=st.just(name),
            gpus=gpus,
            cores_free=number,
            memory_free_bytes=many,
            in_memory=held,
            on_disk=held,
        )

    return st.integers(1, 3).flatmap(lambda n: st.tuples(*(node(f"n{j}") for j in range(n))))


an_instant = st.floats() | moment
anything = snapshots(moment | st.sampled_from([math.nan, math.inf]), an_instant, real)
sane_time = snapshots(moment, moment, finite)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(anything, min_size=1, max_size=4))
def test_decide_is_total_and_bounded(seen: list[Snapshot]) -> None:
    state = PolicyState()
    for snapshot in seen:
        decision = decide(PolicySettings(), snapshot, state)
        state = decision.state
        views = {s.scale.function: s.scale for p in snapshot.pipelines for s in p.stages}
        every = views | {f.function: f for f in snapshot.functions}
        for action in decision.actions:
            if isinstance(action, SetReplicas):
                assert 0 <= action.replicas <= MOST_REPLICAS
                view = every[action.function]
                (report,) = [r for r in decision.reports if r.function == action.function]
                if action.replicas == 0:
                    assert is_stopped(view, 0) or may_be_zero(view, report.reason)
                else:
                    assert action.replicas >= max(0, view.min_replicas)
        if snapshot.budget_replicas is None:
            for report in decision.reports:
                if report.reason.startswith("hold") and ";" not in report.reason:
                    assert report.replicas == views[report.function].current


def is_stopped(view: FunctionView, replicas: int) -> bool:
    """A person asked for none."""
    return replicas == 0 and view.override is not None and view.override.replicas <= 0


def may_be_zero(view: FunctionView, reason: str) -> bool:
    """The minimum allows it, and it had none, its bounds leave none, or it says that it idles."""
    if view.min_replicas > 0 and view.zero_after_s is None:
        return False
    bound = view.max_replicas if view.cap is None else min(view.max_replicas, view.cap)
    return view.current == 0 or bound <= 0 or "nothing came for" in reason


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(sane_time, min_size=1, max_size=3))
def test_the_budget_is_kept_unless_minimums_exceed_it(seen: list[Snapshot]) -> None:
    state = PolicyState()
    for snapshot in seen:
        decision = decide(PolicySettings(), snapshot, state)
        state = decision.state
        if snapshot.budget_replicas is None:
            continue
        stage = [r.replicas for r in decision.reports if r.function.startswith("p-stage")]
        least = sum(max(1, s.scale.min_replicas) for p in snapshot.pipelines for s in p.stages)
        assert sum(stage) <= max(snapshot.budget_replicas, least)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(sane_time, min_size=1, max_size=4))
def test_the_log_replays_to_the_same_decisions(tmp_path_factory: object, seen: list[Snapshot]) -> None:
    path = Path(tmp_path_factory.mktemp("log")) / "decisions.jsonl"  # type: ignore[attr-defined]
    log, state = DecisionLog(path, 1 << 30), PolicyState()
    for snapshot in seen:
        decision = decide(PolicySettings(), snapshot, state)
        log.append(Record(before=state, snapshot=snapshot, decision=decision))
        state = decision.state
    assert replay(path) == (len(seen), [])


loads = st.builds(
    Load,
    arrival_rps=st.floats(0, 500),
    arrival_scv=st.floats(0, 64),
    service_s=st.floats(1e-3, 2),
    service_scv=st.floats(0, 8),
    servers=st.integers(1, 16),
    backlog=st.floats(0, 1e4),
    wait_s=st.floats(1e-3, 5),
)


@given(loads, st.floats(0, 500), st.floats(0, 1e4))
def test_demand_grows_with_arrivals_and_backlog(load: Load, more_rps: float, more: float) -> None:
    fields = {f: getattr(load, f) for f in ("arrival_scv", "service_s", "service_scv", "servers", "wait_s")}
    larger = Load(arrival_rps=load.arrival_rps + more_rps, backlog=load.backlog + more, **fields)
    assert demand.for_wait(larger, 50) >= demand.for_wait(load, 50)
    for starting in ((), (Starting("r", 0.3), Starting("s", 9.0))):
        few = demand.for_backlog(load, 2, starting, 0.0, 0.4, 0.2, 50)
        many = demand.for_backlog(larger, 2, starting, 0.0, 0.4, 0.2, 50)
        assert 0 <= few <= many <= 50


@given(st.floats(0, 1e4), st.floats(1e-6, 10), st.floats(0, 100), st.floats(1e-6, 10), st.integers(1, 300))
def test_a_looser_target_never_needs_more(
    rate: float, service_s: float, scv: float, wait_s: float, most: int
) -> None:
    tight = servers_for_wait(rate, service_s, scv, 1.0, wait_s, most)
    assert 1 <= servers_for_wait(rate, service_s, scv, 1.0, wait_s * 2, most) <= tight <= most


@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(-1, 100)), max_size=30))
def test_pid_output_and_integral_are_bounded(steps: list[tuple[float, float]]) -> None:
    gains, state = PidGains(kp=0.3, ki=0.1, kd=0.05, limit=0.7), PidState()
    for error, dt_s in steps:
        value, state = step(gains, state, error, dt_s)
        assert abs(value) <= 0.7
        assert abs(state.integral) <= 0.7


@pytest.mark.slow
@settings(deadline=None)
@given(sane_time)
def test_snapshots_survive_json(snapshot: Snapshot) -> None:
    back = msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot)
    assert msgspec.json.decode(msgspec.json.encode(back), type=Snapshot) == back
    assert decide(PolicySettings(), back, PolicyState()) == decide(PolicySettings(), snapshot, PolicyState())
