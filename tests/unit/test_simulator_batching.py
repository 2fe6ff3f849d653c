"""The simulator's scheduled stages: the batches of the live router's core, and the laws of every run."""

from __future__ import annotations

import numpy as np
import pytest
from support.emulated_items import EmulatedItems

from keystage.batching.choice import parse_batching
from keystage.controller.domain.snapshot import Slo
from keystage.router.batch_settings import BatchSettings
from keystage.simulator.api import ArrivalSpec, FailureSpec, Outcome, PipelineSpec, StageSpec, World
from keystage.simulator.errors import WorldError
from keystage.simulator.measures import check
from keystage.simulator.platform import SimulatedPlatform

STAGES = ((0.002, 0.020), (0.003, 0.010))


def world(batching: str, times_s: tuple[float, ...] | None = None, **options: object) -> World:
    replicas = int(str(options.pop("replicas", 2)))
    late = options.pop("late", "demote")
    deadline_s = options.pop("deadline_s", 0.25)
    rate_rps = float(str(options.pop("rate_rps", 200.0)))
    stages = tuple(
        StageSpec(alpha_s=a, beta_s=b, most=16, batching=batching, late=late, replicas=replicas)  # type: ignore[arg-type]
        for a, b in STAGES
    )
    arrivals = ArrivalSpec(times_s=times_s) if times_s else ArrivalSpec(rate_rps=rate_rps)
    pipeline = PipelineSpec(name="p", stages=stages, arrivals=arrivals, slo=Slo(deadline_s=deadline_s))  # type: ignore[arg-type]
    return World(pipelines=(pipeline,), duration_s=10.0, **options)  # type: ignore[arg-type]


def ran(world: World) -> tuple[SimulatedPlatform, Outcome]:
    platform = SimulatedPlatform(world, 1)
    platform.advance(1e6)
    outcome = platform.outcome()
    check(outcome)
    return platform, outcome


@pytest.mark.parametrize("batching", ["eager", "deferred", "timeout:30", "partial-slo"])
@pytest.mark.parametrize("gap_s", [0.002, 0.004, 0.012])
def test_simulator_and_router_make_the_same_batches(batching: str, gap_s: float) -> None:
    gaps_s = np.random.default_rng(5).gamma(0.5, gap_s / 0.5, 400)
    times_s = tuple(np.cumsum(gaps_s).tolist())
    platform, outcome = ran(world(batching, times_s))
    live = EmulatedItems(STAGES, BatchSettings(parse_batching(batching), "demote", 0.25))
    for stage in (0, 0, 1, 1):
        live.add_worker(f"{len(live.fleet.workers)}", (stage,), most=16)
    live.submit_at(times_s)
    live.run()
    finished_s = [live.answered_s[number] for number in range(400)]
    simulated_s = outcome.pipelines[0].finished_s.tolist()
    if batching == "eager":
        # Of two items that came together the simulator's may overtake the other between the stages.
        finished_s, simulated_s = sorted(finished_s), sorted(simulated_s)
    assert finished_s == pytest.approx(simulated_s, rel=1e-6)
    batches = [unit.stage.batches for unit in platform._units.values()]
    assert batches == [len(live.sizes(0)), len(live.sizes(1))]


def test_deferral_makes_larger_batches_in_time_and_leaves_replicas_idle() -> None:
    eager, deferred = ran(world("eager", replicas=4)), ran(world("deferred", replicas=4))
    for _, outcome in (eager, deferred):
        assert np.mean(outcome.pipelines[0].latency_s <= 0.25) > 0.99
    busy = [[stage.busy_ratio for stage in outcome.pipelines[0].stages] for _, outcome in (eager, deferred)]
    assert busy[1][0] < 0.6 * busy[0][0]


def test_what_is_refused_leaves_the_pipeline_and_is_counted() -> None:
    platform, outcome = ran(world("deferred", rate_rps=900.0, late="refuse"))
    pipeline = outcome.pipelines[0]
    dropped = sum(unit.stage.dropped for unit in platform._units.values())
    assert dropped == int(np.sum(np.isnan(pipeline.finished_s))) > 100
    served_s = pipeline.latency_s[np.isfinite(pipeline.latency_s)]
    assert served_s.max() <= 0.25 + 1e-6
    assert platform.is_served


def test_a_death_costs_time_but_no_item() -> None:
    deaths = tuple(FailureSpec(at_s=0.5 * n, function="p-stage-0") for n in range(1, 12))
    _, outcome = ran(world("deferred", failures=deaths))
    assert not np.isnan(outcome.pipelines[0].finished_s).any()


def test_items_without_an_objective_are_not_held_back() -> None:
    _, scheduled = ran(world("deferred", deadline_s=None))
    _, eager = ran(world("eager", deadline_s=None))
    mean_s = [np.mean(outcome.pipelines[0].latency_s) for outcome in (scheduled, eager)]
    assert mean_s[0] <= 1.05 * mean_s[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"batching": "lazy"},
            "'lazy' is no batching: it must be eager, timeout:MS, deferred or partial-slo",
        ),
        ({"batching": "timeout:x"}, "timeout needs milliseconds, 0 to 60000"),
        ({"batching": "timeout:-1"}, "timeout needs milliseconds, 0 to 60000"),
        ({"batching": "deferred:3"}, "is no batching"),
        ({"batching": "deferred", "shared": True}, "stages that take turns on shared GPUs are eager"),
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, object], said: str) -> None:
    stage = StageSpec(alpha_s=0.01, **changes)  # type: ignore[arg-type]
    pipeline = PipelineSpec(name="p", stages=(stage,), arrivals=ArrivalSpec(rate_rps=1.0))
    with pytest.raises(WorldError, match=said):
        SimulatedPlatform(World(pipelines=(pipeline,)), 1)


def test_looping_pipelines_step_in_waves() -> None:
    stage = StageSpec(alpha_s=0.01, batching="deferred")
    pipeline = PipelineSpec(
        name="p", stages=(stage,), arrivals=ArrivalSpec(rate_rps=1.0), execution="looping"
    )
    with pytest.raises(WorldError, match="batching is for single-pass pipelines"):
        SimulatedPlatform(World(pipelines=(pipeline,)), 1)
