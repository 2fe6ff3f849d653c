"""Every rival steers a small bursty world from one replica a stage: all is served, faster than unsteered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from keystage.baselines.cocktail import Cocktail
from keystage.baselines.inferline import InferLine
from keystage.baselines.infless import Infless
from keystage.baselines.static import Static, StaticSettings
from keystage.baselines.tunable import Choice
from keystage.bench import tuning
from keystage.bench.paper_arrivals import PaperTraceError
from keystage.bench.paper_cells import Cell
from keystage.bench.paper_policies import Traffic, policy
from keystage.bench.tuning import EFFORT, POLICIES, allowed_gpu_s, score, tune
from keystage.bench.tuning_chosen import CHOSEN, chosen
from keystage.controller.domain.snapshot import Slo
from keystage.controller.domain.steering import Steering
from keystage.simulator.api import ArrivalSpec, LoadSpec, NodeSpec, Outcome, PipelineSpec, StageSpec, World
from keystage.simulator.run import simulate

RATE_RPS = 40.0
TIMES_S = (0.05, 0.1, 0.05)
MAKERS: dict[str, Callable[[], Steering]] = {
    "inferline": InferLine,
    "infless": Infless,
    "cocktail": Cocktail,
    "static": lambda: Static(StaticSettings(rates_rps={"p": RATE_RPS}, arrival_scv=4.0)),
}


def world(nodes: int = 4) -> World:
    stages = tuple(
        StageSpec(
            alpha_s=t / 2, beta_s=t / 2, most=2, gpus=1, parameter_bytes=1_000, max_replicas=16, scv=0.1
        )
        for t in TIMES_S
    )
    arrivals = ArrivalSpec(rate_rps=RATE_RPS, cv=2.0, count=2000)
    pipeline = PipelineSpec(name="p", stages=stages, arrivals=arrivals, slo=Slo(deadline_s=2.0))
    return World(
        pipelines=(pipeline,),
        nodes=(NodeSpec(count=nodes, gpus=4, gpu_bytes=10_000),),
        load=LoadSpec(fixed_s=1.0, disk_bps=1e6),
    )


def mean_s(outcome: Outcome) -> float:
    return float(np.mean(outcome.pipelines[0].latency_s))


@pytest.fixture(scope="module")
def alone_s() -> float:
    """Mean latency when nobody steers."""
    return mean_s(simulate(world(), None, 1))


@pytest.mark.parametrize("name", MAKERS)
def test_serves_everything_faster_than_nobody(name: str, alone_s: float) -> None:
    outcome = simulate(world(), MAKERS[name](), 1)
    latencies = outcome.pipelines[0].latency_s
    assert len(latencies) == 2000
    assert np.isfinite(latencies).all()
    assert mean_s(outcome) < alone_s / 2
    peaks = [stage.series[:, 1].max() for stage in outcome.pipelines[0].stages]
    assert sum(peaks) <= 16 * len(peaks)
    assert max(peaks) > 1


@pytest.mark.parametrize("name", MAKERS)
def test_same_seed_same_outcome(name: str) -> None:
    first, second = (simulate(world(), MAKERS[name](), 3) for _ in range(2))
    np.testing.assert_array_equal(first.pipelines[0].finished_s, second.pipelines[0].finished_s)
    assert first.gpu_s == second.gpu_s


def test_the_search_runs_every_policy_on_the_same_cells() -> None:
    cell = Cell("cv", 2, 1.0, 3.0)
    assert allowed_gpu_s(cell) > 0
    for name in POLICIES:
        found = tune(name, 2, (cell,), (("B", 9000),))
        assert found.trials[0].score == score(name, {}, (cell,), (("B", 9000),))
        assert found.best.score <= found.trials[0].score


@pytest.mark.parametrize("name", CHOSEN)
def test_what_was_chosen_lies_in_the_ranges(name: str) -> None:
    for path, value in CHOSEN[name].items():
        span = {**POLICIES[name], "effort": EFFORT}[path]
        if isinstance(span, Choice):
            assert value in span.values
        else:
            assert span.low <= float(value) <= span.high
            assert isinstance(value, int) == span.is_whole
    effort, values = chosen(name)
    policy(name, values).make(effort, Traffic("p", 1.0, 1.0))


def test_tuning_reads_the_traces_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("trace", 1, 0.0, 20.0)
    with pytest.raises(PaperTraceError, match="lacks"):
        score("inferline", {}, (cell,), (("B", 9000),), tmp_path)
    monkeypatch.setenv("KEYSTAGE_TRACE_FOLDER", str(tmp_path))
    with pytest.raises(PaperTraceError, match="lacks"):
        tuning.run(quick=True)
