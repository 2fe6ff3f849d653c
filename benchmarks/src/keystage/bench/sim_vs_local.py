"""`keystage bench sim-vs-local`: the local world with emulated devices beside the simulator.

The same policy with the same settings, the same arrivals, the same profile: four single-pass stages of
batch 1, one twice as slow, gamma arrivals of CV 4 at 80 % of the slow stage (as in `bench burst`). Local:
real supervisor, controller, router, workers, wire and HTTP; only device time is emulated. What the
simulator is told beyond that is measured apart from the compared runs: in an idle world the seconds a
request spends beside its service (hand-offs, HTTP), in a full one the part of them during which a hand-off
keeps a replica from its next item (added to service; the rest is spread over the hops), and the median
start of a replica, which is that of the compared run's own starts, since start times are part of a profile.
Both worlds see the same warm-up before the schedule, which is not counted: a controller that has never seen a
request reacts to a burst otherwise. Mean latency and replica-seconds are compared; the aim is within 10 %.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from keystage.bench.burst import CV, FAST_S, SLOW_S, UTILISATION
from keystage.bench.burst_lane import WARM_UP_GAP_S, WARM_UP_REQUESTS, Outcome, Run, measure
from keystage.bench.frame import BenchError, BenchResult, Figure
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.steering import Keystage
from keystage.simulator import api
from keystage.simulator.run import simulate
from keystage.simulator.watch import StagePoint, Watched

SERVICES_S = (FAST_S, SLOW_S, FAST_S, FAST_S)
SLOW_STAGE = 1
RATE_RPS = UTILISATION / SLOW_S
SEEDS = 3
DURATION_S = 60.0
IDLE_RPS = 5.0
IDLE_S = 12.0
FULL_RPS = 400.0
FULL_S = 1.0
LEAD_S = 4.0
"""From the first request of the warm-up to the schedule, as it takes in the local world."""
MOST_REPLICAS = 20
"""The local world's own bound of a function."""


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """What a request takes beside its service.

    Attributes:
        beside_s: in all, in an idle world.
        occupied_s: part of it, a stage, in which the replica takes nothing else.
    """

    beside_s: float
    occupied_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """One seed in both worlds.

    Attributes:
        local: what the local world gave.
        simulated: what the simulator gave.
        replicas_by_stage: time-averaged simulated replicas within the schedule.
        start_s: start time the simulator was told.
    """

    local: Outcome
    simulated: api.Outcome
    replicas_by_stage: tuple[float, ...]
    start_s: float

    @property
    def latencies_s(self) -> tuple[float, float]:
        """Mean latency, local and simulated."""
        return float(np.mean(self.local.latencies_s)), float(self.simulated_s.mean())

    @property
    def simulated_s(self) -> api.Floats:
        """Simulated latencies within the schedule."""
        pipeline = self.simulated.pipelines[0]
        return pipeline.latency_s[pipeline.arrived_s >= LEAD_S]

    @property
    def replicas(self) -> tuple[float, float]:
        """Time-averaged replicas of all stages, local and simulated."""
        return sum(self.local.replicas), sum(self.replicas_by_stage)


class NoAnswers(BenchError):
    """A local run in which no request was answered."""


def run(*, quick: bool = False) -> BenchResult:
    """Runs both worlds on every seed.

    Args:
        quick: one seed, a third of the time.

    Raises:
        NoAnswers: see there.
    """
    seeds, duration_s = (1, DURATION_S / 3) if quick else (SEEDS, DURATION_S)
    profile = measured_profile()
    pairs = [_pair(seed, duration_s, profile) for seed in range(seeds)]
    return result(pairs, profile)


def result(pairs: Sequence[Pair], profile: Profile) -> BenchResult:
    """Rows of both worlds and the figures between them.

    Args:
        pairs: one a seed.
        profile: what the simulator was told.
    """
    rows: list[dict[str, object]] = []
    for pair in pairs:
        local = pair.local
        starts = sum(stage.starts for stage in pair.simulated.pipelines[0].stages)
        latency_s = pair.simulated_s
        sent_s = np.asarray(local.latencies_s)
        failed = int(np.isinf(latency_s).sum())
        rows.append(_row(local.run, "local", sent_s, local.replicas, local.cold_starts, local.failed))
        rows.append(_row(local.run, "simulator", latency_s, pair.replicas_by_stage, starts, failed))
    figures = {
        "latency_vs_local": Figure(
            [p.latencies_s[1] / p.latencies_s[0] for p in pairs],
            "mean latency, simulated / local",
            "0.9 to 1.1",
        ),
        "gpu_seconds_vs_local": Figure(
            [p.replicas[1] / p.replicas[0] for p in pairs], "replica-seconds, simulated / local", "0.9 to 1.1"
        ),
    }
    lag_ms = 1e3 * float(np.mean([p.local.lag_s for p in pairs]))
    services = ", ".join(f"{1e3 * s:g}" for s in SERVICES_S)
    starts_s = ", ".join(f"{p.start_s:.2f}" for p in pairs)
    notes = [
        (
            f"stages of {services} ms, {RATE_RPS:g}/s at CV {CV:g}; the simulator is told "
            f"{1e3 * profile.beside_s:.1f} ms beside service a request (measured idle), of which "
            f"{1e3 * profile.occupied_s:.1f} ms a stage keep the replica (measured full), and starts of "
            f"{starts_s} s (median of the local run)"
        ),
        (
            "a local latency counts from the scheduled time and holds what sharing cores between client, "
            f"router, controller and workers adds under load (mean send lag {lag_ms:.2f} ms); the simulator "
            "has none of that"
        ),
    ]
    return BenchResult(rows, figures, notes)


def world(arrivals_s: Sequence[float], start_s: float, profile: Profile) -> api.World:
    """The simulated twin of the local pipeline.

    Args:
        arrivals_s: when requests are sent.
        start_s: seconds from wanted to ready.
        profile: what a request takes beside its service.
    """
    stages = tuple(
        api.StageSpec(alpha_s=s / 2, beta_s=s / 2 + profile.occupied_s, most=1, max_replicas=MOST_REPLICAS)
        for s in SERVICES_S
    )
    between_s = profile.beside_s - len(stages) * profile.occupied_s
    times_s = [WARM_UP_GAP_S * i for i in range(WARM_UP_REQUESTS)] + [LEAD_S + at_s for at_s in arrivals_s]
    return api.World(
        pipelines=(
            api.PipelineSpec(name="twin", stages=stages, arrivals=api.ArrivalSpec(times_s=tuple(times_s))),
        ),
        load=api.LoadSpec(fixed_s=start_s),
        hop_s=max(0.0, between_s) / (len(stages) - 1),
        duration_s=times_s[-1],
        limit_s=times_s[-1] + 300.0,
        warm_s=LEAD_S,
    )


def _pair(seed: int, duration_s: float, profile: Profile) -> Pair:
    (local,) = measure([Run(SLOW_STAGE, seed, SERVICES_S, RATE_RPS, CV, duration_s)], one_by_one=True)
    if not local.latencies_s:
        raise NoAnswers(f"seed {seed}: none of {len(local.run.arrivals_s())} requests was answered")
    start_s = float(np.median(local.start_s)) if local.start_s else PolicySettings().start_s
    twin = world(local.run.arrivals_s().tolist(), start_s, profile)
    watched = Watched(Keystage(PolicySettings()))
    simulated = simulate(twin, watched, seed)
    return Pair(local, simulated, _averages(watched.points, duration_s), start_s)


def _averages(points: Sequence[StagePoint], duration_s: float) -> tuple[float, ...]:
    """Time-averaged replicas of each stage within the schedule, starting ones too; ticks are even."""
    within = [p for p in points if LEAD_S <= p.at_s <= LEAD_S + duration_s]
    names = sorted({p.function for p in within})
    return tuple(float(np.mean([p.ready + p.starting for p in within if p.function == n])) for n in names)


def measured_profile() -> Profile:
    """What hand-offs take, in an idle and in a full world of one replica each; half a minute.

    Raises:
        NoAnswers: requests failed.
    """
    one_each = (1,) * len(SERVICES_S)
    idle = Run(SLOW_STAGE, 0, SERVICES_S, IDLE_RPS, 0.0, IDLE_S, replicas=one_each)
    full = Run(SLOW_STAGE, 0, SERVICES_S, FULL_RPS, 0.0, FULL_S, replicas=one_each)
    outcomes = [measure([run])[0] for run in (idle, full)]
    for outcome in outcomes:
        if len(outcome.latencies_s) < len(outcome.run.arrivals_s()):
            raise NoAnswers(f"{outcome.failed} requests of the world at {outcome.run.rate_rps:g}/s failed")
    beside_s = max(0.0, float(np.median(outcomes[0].latencies_s)) - sum(SERVICES_S))
    ended_s = np.sort(full.arrivals_s() + np.asarray(outcomes[1].latencies_s))
    half = len(ended_s) // 2  # the second half: the slow stage is full all the time
    cycle_s = float(ended_s[-1] - ended_s[half - 1]) / (len(ended_s) - half)
    return Profile(beside_s, min(max(0.0, cycle_s - SLOW_S), beside_s / len(SERVICES_S)))


def _row(
    run: Run, name: str, latencies_s: api.Floats, replicas: Sequence[float], starts: int, failed: int
) -> dict[str, object]:
    return {
        "seed": str(run.seed),
        "world": name,
        "mean_ms": 1e3 * float(np.mean(latencies_s)),
        "p50_ms": 1e3 * float(np.percentile(latencies_s, 50)),
        "p99_ms": 1e3 * float(np.percentile(latencies_s, 99)),
        "replica_s": sum(replicas) * run.duration_s,
        "by_stage": " ".join(f"{x:.2f}" for x in replicas),
        "cold_starts": starts,
        "failed": failed,
    }
