"""`keystage bench simulator`: events a second of the simulator, with and without a policy, and its memory.

An event is one entry taken from the engine's heap: a request comes from outside, a batch is done (which
takes the next batch and hands the finished items on), items arrive after a hop, a wave returns, a replica
is ready, something fails. Batches handed on without a hop time cost no event of their own and count none.
Each world runs whole in every round; the figure adds events and seconds of all single-pass worlds.
"""

from __future__ import annotations

import tracemalloc

from keystage.bench.frame import BenchResult, Figure
from keystage.controller.domain.snapshot import Slo
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.steering import Keystage
from keystage.simulator.api import ArrivalSpec, LoadSpec, NodeSpec, PipelineSpec, StageSpec, World
from keystage.simulator.measures import check
from keystage.simulator.run import simulate

GB = 1_000_000_000
ROUNDS, QUICK_ROUNDS = 5, 2
REQUESTS = 40_000


def run(quick: bool = False) -> BenchResult:
    """Runs every world in rounds.

    Args:
        quick: fewer rounds.
    """
    rounds = QUICK_ROUNDS if quick else ROUNDS
    rates: list[float] = []
    steered: list[float] = []
    sums: dict[str, tuple[int, float]] = {}
    for seed in range(rounds):
        events, wall_s = 0, 0.0
        for name, world in _worlds().items():
            outcome = simulate(world, None, seed)
            check(outcome)
            before = sums.get(name, (0, 0.0))
            sums[name] = (before[0] + outcome.events, before[1] + outcome.wall_s)
            if world.pipelines[0].execution == "single-pass":
                events, wall_s = events + outcome.events, wall_s + outcome.wall_s
        rates.append(events / wall_s)
        outcome = simulate(_cluster(), Keystage(PolicySettings()), seed)
        check(outcome)
        steered.append(outcome.events / outcome.wall_s)
    rows = [
        {"world": name, "events a run": events // rounds, "events/s": events / wall_s}
        for name, (events, wall_s) in sums.items()
    ]
    ticks = _cluster().duration_s / _cluster().tick_s
    rows.append({"world": "cluster, steered", "events a run": outcome.events, "events/s": steered[-1]})
    return BenchResult(
        rows=rows,
        figures={
            "events_per_s": Figure(
                rates, "events a second of the single-pass worlds, nobody steers", ">= 150000"
            ),
            "events_per_s_steered": Figure(
                steered, f"events a second of the cluster with the policy at about {ticks:.0f} ticks in it"
            ),
            "peak_bytes": Figure(
                [_peak_bytes(seed) for seed in range(rounds)],
                f"most bytes allocated in a run of the chain of 8 with {REQUESTS} requests",
            ),
        },
        notes=[
            "an event is one entry taken from the heap (arrival, batch done, hop, wave, ready, failure)",
            "peak_bytes is measured in runs of their own, because tracing slows them",
        ],
    )


def _worlds() -> dict[str, World]:
    ring = [StageSpec(alpha_s=0.001, beta_s=0.004, most=8, replicas=2) for _ in range(4)]
    return {
        "M/M/1": _queue(StageSpec(alpha_s=0.01, scv=1.0), 80.0),
        "M/M/16": _queue(StageSpec(alpha_s=0.01, scv=1.0, replicas=16), 1300.0),
        "chain of 8": _chain(),
        "chain of 8, hops": _chain(hop_s=0.001),
        "cluster": _cluster(),
        "ring of 4": World(
            pipelines=(
                PipelineSpec(
                    name="ring",
                    stages=tuple(ring),
                    arrivals=ArrivalSpec(rate_rps=8.0, count=400),
                    execution="looping",
                ),
            )
        ),
    }


def _queue(stage: StageSpec, rate_rps: float) -> World:
    arrivals = ArrivalSpec(rate_rps=rate_rps, count=2 * REQUESTS)
    return World(pipelines=(PipelineSpec(name="queue", stages=(stage,), arrivals=arrivals),))


def _chain(hop_s: float = 0.0) -> World:
    stage = StageSpec(alpha_s=0.02, beta_s=0.01, most=8, replicas=4)
    arrivals = ArrivalSpec(rate_rps=120.0, cv=2.0, count=REQUESTS)
    return World(pipelines=(PipelineSpec(name="chain", stages=(stage,) * 8, arrivals=arrivals),), hop_s=hop_s)


def _cluster() -> World:
    """Five pipelines of eight stages that share 12 servers; one burst each may grow into the rest."""
    stage = StageSpec(alpha_s=0.02, gpus=1, parameter_bytes=5 * GB, most=4)
    return World(
        pipelines=tuple(
            PipelineSpec(
                name=f"model-{i}",
                stages=(stage,) * 8,
                arrivals=ArrivalSpec(rate_rps=30.0, cv=4.0),
                slo=Slo(deadline_s=2.0),
            )
            for i in range(5)
        ),
        nodes=(NodeSpec(count=12, gpus=4, gpu_bytes=40 * GB, cores=108.0),),
        load=LoadSpec(memory_bps=7 * GB, disk_bps=GB, holders="key-stages"),
        network_s=0.001,
        network_bps=10.0 * GB,
        duration_s=60.0,
        limit_s=600.0,
    )


def _peak_bytes(seed: int) -> float:
    """Peak of what one run allocates, numpy's arrays included."""
    tracemalloc.start()
    try:
        check(simulate(_chain(), None, seed))
        return float(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
