"""What holds for every rival whatever it sees: bounds, room, totality; more effort is more replicas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.baselines.bounds import MOST_REPLICAS, fit
from keystage.baselines.cocktail import Cocktail, CocktailSettings
from keystage.baselines.dispatch import instances, rate_bounds
from keystage.baselines.forecast import forecast
from keystage.baselines.inferline import InferLine, InferLineSettings
from keystage.baselines.infless import Infless, InflessSettings
from keystage.baselines.planner import plan
from keystage.baselines.static import Static, StaticSettings, allocate
from keystage.baselines.tunable import Choice, Range, Ranges
from keystage.bench.tuning_search import search, value_at
from keystage.controller.domain.snapshot import (
    BatchProfile,
    Counters,
    FunctionView,
    GpuView,
    NodeView,
    PipelineView,
    RouterSample,
    Slo,
    Snapshot,
    StageView,
)
from keystage.controller.domain.steering import Steering
from keystage.controller.maths.erlang import ggc_wait_s

measured = st.none() | st.floats() | st.floats(0, 1e6)
profiles = st.none() | st.builds(
    BatchProfile, alpha_s=st.floats(-1, 2), beta_s=st.floats(-1, 2), most=st.integers(-1, 8)
)


slos = st.builds(Slo, ttft_s=measured, deadline_s=measured)


def makers(effort: float = 1.0) -> list[Steering]:
    return [
        InferLine(InferLineSettings(effort=effort, first_plan_s=1.0, replan_s=2.0)),
        Infless(InflessSettings(effort=effort)),
        Cocktail(CocktailSettings(effort=effort, sample_s=1.0, interval_s=1.0, react_s=1.0)),
        Static(StaticSettings(rates_rps={"p": 20.0}, effort=1.4 * effort)),
    ]


@st.composite
def stages(draw: st.DrawFn, index: int) -> StageView:
    routers = draw(
        st.lists(
            st.builds(
                RouterSample,
                incarnation=st.sampled_from(["a", "b"]),
                at_s=measured,
                counters=st.builds(
                    Counters,
                    arrivals=measured, services=measured, service_sum_s=measured, sojourn_sum_s=measured,
                    queue=measured,
                ),
            ),
            max_size=2,
        )
    )  # fmt: skip
    scale = FunctionView(
        function=f"p-stage-{index}",
        desired=draw(st.none() | st.integers(0, 30)),
        ready=draw(st.integers(0, 30)),
        min_replicas=draw(st.integers(0, 3)),
        max_replicas=draw(st.integers(1, 2000)),
        cap=draw(st.none() | st.integers(0, 30)),
    )
    return StageView(
        stage=index, scale=scale, routers=tuple(routers), batch=draw(profiles), start_s=draw(measured),
        gpus=draw(st.integers(0, 3)), gpu_bytes=draw(st.integers(0, 20)),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_rival_answers_whatever_it_sees_and_stays_within_bounds(data: st.DataObject) -> None:
    rivals = makers()
    at_s = 0.0
    for _ in range(data.draw(st.integers(1, 6))):
        at_s += data.draw(st.floats(-1, 5))
        views = tuple(data.draw(stages(index)) for index in range(2))
        pipeline = PipelineView(
            pipeline="p",
            execution="single-pass",
            slo=data.draw(slos),
            stages=views,
            missing=data.draw(st.sampled_from(["", "", "", "no router"])),
        )
        scales = {view.scale.function: view.scale for view in views}
        for rival in rivals:
            for action in rival.steer(Snapshot(at_s=at_s, pipelines=(pipeline,))):
                assert not pipeline.missing
                scale = scales[action.function]  # type: ignore[union-attr]
                lowest = max(1, scale.min_replicas)
                highest = min(MOST_REPLICAS, scale.max_replicas, math.inf if scale.cap is None else scale.cap)
                assert lowest <= action.replicas <= max(lowest, highest)  # type: ignore[union-attr]


def steady(effort: float, rates: list[float], most: int, room: int) -> list[list[int]]:
    """Total replicas wanted by every rival at the end of a time line of rates, one a quarter of a second."""
    finals = []
    profile = BatchProfile(alpha_s=0.1, beta_s=0.0, most=1)
    nodes = tuple(NodeView(node=f"n{i}", gpus=(GpuView(10, 10),) * 4) for i in range(room))
    for rival in makers(effort):
        desired, total = [1, 1], 0.0
        for tick, rate in enumerate(rates):
            total += rate * 0.25
            counters = Counters(
                arrivals=total, services=total, service_sum_s=0.0, sojourn_sum_s=0.0, queue=0.0
            )
            sample = RouterSample(incarnation="a", at_s=tick * 0.25, counters=counters)
            views = tuple(
                StageView(
                    stage=i,
                    scale=FunctionView(function=f"p-stage-{i}", desired=n, ready=n, max_replicas=most),
                    routers=(sample,),
                    batch=profile,
                    start_s=1.0,
                    gpus=1,
                )
                for i, n in enumerate(desired)
            )
            view = PipelineView(pipeline="p", execution="single-pass", slo=Slo(deadline_s=2.0), stages=views)
            for action in rival.steer(Snapshot(at_s=tick * 0.25, pipelines=(view,), nodes=nodes)):
                desired[int(action.function[-1])] = action.replicas  # type: ignore[union-attr]
        finals.append(desired)
    return finals


@settings(max_examples=25, deadline=None)
@given(
    rates=st.lists(st.floats(0, 60), min_size=8, max_size=40),
    effort=st.floats(0.25, 2.0),
    factor=st.floats(1.0, 3.0),
)
def test_more_effort_never_means_fewer_replicas(rates: list[float], effort: float, factor: float) -> None:
    rates = [round(rate) * 1.0 for rate in rates]
    for less, more in zip(steady(effort, rates, 100, 0), steady(effort * factor, rates, 100, 0), strict=True):
        assert sum(less) <= sum(more)


@settings(max_examples=25, deadline=None)
@given(rates=st.lists(st.floats(0, 200), min_size=8, max_size=40), room=st.integers(1, 5))
def test_no_rival_asks_for_more_than_the_cluster_holds(rates: list[float], room: int) -> None:
    for desired in steady(3.0, rates, 100, room):
        assert sum(desired) <= 4 * room
        assert min(desired) >= 1


@given(
    wants=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    data=st.data(),
    room=st.integers(8, 60),
)
def test_fitting_keeps_minima_wishes_and_room(wants: list[int], data: st.DataObject, room: int) -> None:
    sizes = [data.draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in wants]
    given_ = fit(wants, [1] * len(wants), sizes, room)
    used = sum(g * s for g, s in zip(given_, sizes, strict=True))
    assert all(1 <= g <= w for g, w in zip(given_, wants, strict=True))
    if sum(sizes) <= room:
        assert used <= room
    if sum(w * s for w, s in zip(wants, sizes, strict=True)) > room and set(sizes) == {1}:
        assert used == max(room, len(wants))


@given(
    rate=st.floats(0, 1e4),
    present=st.integers(1, 50),
    alpha_s=st.floats(1e-3, 2),
    beta_s=st.floats(0, 2),
    most=st.integers(1, 16),
    slo_s=st.floats(1e-3, 20),
    alpha_ratio=st.floats(0, 1),
)
def test_instances_carry_the_rate_and_are_released_only_below_the_line(
    rate: float, present: int, alpha_s: float, beta_s: float, most: int, slo_s: float, alpha_ratio: float
) -> None:
    bounds = rate_bounds(BatchProfile(alpha_s=alpha_s, beta_s=beta_s, most=most), slo_s)
    assert 0 <= bounds.low_rps <= bounds.high_rps
    count = instances(rate, present, bounds, alpha_ratio)
    assert count >= 1
    assert count * bounds.high_rps >= rate * (1 - 1e-6)
    line = alpha_ratio * bounds.low_rps + (1 - alpha_ratio) * bounds.high_rps
    if count < present:
        assert rate <= (count + 1) * line * (1 + 1e-6)


@settings(max_examples=40, deadline=None)
@given(
    gaps=st.lists(st.floats(0, 2), min_size=1, max_size=60),
    services=st.lists(st.floats(0.01, 1), min_size=1, max_size=3),
    slo_s=st.floats(0.01, 10),
)
def test_a_plan_meets_what_it_says_and_its_bounds(
    gaps: list[float], services: list[float], slo_s: float
) -> None:
    times = [math.fsum(gaps[: i + 1]) for i in range(len(gaps))]
    profiles_ = [BatchProfile(alpha_s=s, beta_s=0.0, most=1) for s in services]
    planned = plan(times, profiles_, [6] * len(services), slo_s)
    assert planned is not None
    assert all(1 <= r <= 6 for r in planned.replicas)
    if planned.is_feasible:
        assert planned.p99_s <= slo_s
    assert planned.p99_s >= sum(services) * (1 - 1e-9)


@given(rates=st.lists(st.floats(0, 1e4), max_size=40), steps=st.integers(1, 12), order=st.integers(1, 8))
def test_forecasts_stay_between_nothing_and_the_largest_rate(
    rates: list[float], steps: int, order: int
) -> None:
    ahead = forecast(rates, steps, order)
    if not rates:
        assert ahead is None
        return
    assert ahead is not None
    assert len(ahead.mean_rps) == steps
    top = max(rates)
    assert all(-1e-6 * (1 + top) <= m <= top * (1 + 1e-6) + 1e-9 for m in ahead.mean_rps)
    assert all(math.isfinite(d) and d >= 0 for d in ahead.deviation_rps)


@settings(max_examples=40, deadline=None)
@given(
    rate=st.floats(0.1, 20),
    services=st.lists(st.floats(0.01, 0.3), min_size=2, max_size=3),
    extra=st.integers(0, 4),
)
def test_the_static_allocation_is_the_best_of_all(rate: float, services: list[float], extra: int) -> None:
    total = sum(math.floor(rate * s) + 1 for s in services) + extra

    def wait_s(counts: tuple[int, ...]) -> float:
        return sum(ggc_wait_s(rate, s, c, 4.0, 0.0) for s, c in zip(services, counts, strict=True))

    def splits(left: int, parts: int) -> list[tuple[int, ...]]:
        if parts == 1:
            return [(left,)]
        return [
            (first, *rest) for first in range(1, left - parts + 2) for rest in splits(left - first, parts - 1)
        ]

    counts = allocate(rate, services, 4.0, 0.0, total)
    assert sum(counts) == total
    best = min(wait_s(split) for split in splits(total, len(services)))
    assert wait_s(tuple(counts)) == pytest.approx(best, rel=1e-6, abs=1e-12)


@given(low=st.floats(0.01, 10), span=st.floats(0, 100), place=st.floats(0, 1), is_log=st.booleans())
def test_searched_values_stay_within_their_range(low: float, span: float, place: float, is_log: bool) -> None:
    value = value_at(Range(low, low + span, is_log=is_log), place)
    assert isinstance(value, float)
    assert low <= value <= low + span


@settings(max_examples=20)
@given(budget=st.integers(1, 30), seed=st.integers(0, 5))
def test_a_search_keeps_its_budget_repeats_itself_and_is_never_worse_than_the_defaults(
    budget: int, seed: int
) -> None:
    ranges: Ranges = {
        "x": Range(0.1, 10.0, is_log=True),
        "n": Range(1, 9, is_whole=True),
        "b": Choice((False, True)),
    }

    def score(values: dict[str, str | bool | float]) -> float:
        x, n = float(values.get("x", 3.0)), float(values.get("n", 1))
        return abs(math.log(x)) + abs(n - 4) + (not values.get("b", False))

    found = search(score, ranges, budget, seed)
    assert len(found.trials) == budget
    assert found == search(score, ranges, budget, seed)
    assert found.best.score == min(trial.score for trial in found.trials) <= score({})
    assert all(isinstance(trial.values.get("n", 1), int) for trial in found.trials)
