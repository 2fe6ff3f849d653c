"""`keystage bench burst`: the controller under bursts, beside the best static allocation.

Four emulated single-pass stages, batch 1, one of them twice as slow, gamma arrivals of CV 4 at 80 %
of the slow stage's rate. Every position of the slow stage and every seed is run on the same
arrivals with the controller, and with the static allocation that an exact search finds best among
those of as many replica-seconds as the controller used, rounded up to whole replicas (to the
baseline's favour). One replica each is run once per seed: with single servers of constant service
time the order of stages does not change the time through them. Only the device time is emulated.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from keystage.bench.burst_lane import Outcome, Run, measure
from keystage.bench.burst_search import Allocation, mean_latency_s, search
from keystage.bench.frame import BenchResult, Figure

STAGES = 4
FAST_S = 0.01
SLOW_S = 0.02
"""Long beside a hop's own time (about a millisecond); 5,000 arrivals take 125 s, the bench 20 minutes."""
CV = 4.0
UTILISATION = 0.8
ARRIVALS = 5000
SEEDS = 5
LEAST_KEY_RATIO = 0.5
NEAR_RATIO = 1.05
PIPELINES_PER_WORLD = 1
"""Five at once, each with a seed of its own. With two of one seed in a world their bursts coincided and
ten pipelines' cold starts queued for two cores: 3.6 s in the median instead of 0.6 s."""


class KeyStageMissed(AssertionError):
    """The controller did not name the slow stage first most of the time."""


class NoAnswers(Exception):
    """A run in which no request was answered."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One position and seed under both policies, and what the search expected.

    Attributes:
        controller: with the controller.
        static: the best static allocation.
        best: the search's answer.
        second: the next allocation within 5 % that differs in its mean, None when there is none.
    """

    controller: Outcome
    static: Outcome
    best: Allocation
    second: Allocation | None


def run(*, quick: bool = False) -> BenchResult:
    """Runs all positions and seeds (quick: one position, two seeds, a fifth of the arrivals).

    Raises:
        KeyStageMissed: see there.
        NoAnswers: see there.
    """
    positions, seeds, arrivals = tuple(range(STAGES)), SEEDS, ARRIVALS
    if quick:
        positions, seeds, arrivals = (1,), 2, ARRIVALS // 5
    rate_rps = UTILISATION / SLOW_S
    duration_s = arrivals / rate_rps
    parts = [positions[i : i + PIPELINES_PER_WORLD] for i in range(0, len(positions), PIPELINES_PER_WORLD)]
    trials: list[Trial] = []
    one_each: list[Outcome] = []
    for number, part in enumerate(parts):
        plan = [[Run(p, s, services_s(p), rate_rps, CV, duration_s) for p in part] for s in range(seeds)]
        controlled = _in_lanes(plan)
        found = [[_search(outcome) for outcome in lane] for lane in controlled]
        best = [
            [dataclasses.replace(o.run, replicas=f[0].replicas) for o, f in zip(lane, searched, strict=True)]
            for lane, searched in zip(controlled, found, strict=True)
        ]
        alone = [dataclasses.replace(lane[0], replicas=(1,) * STAGES) for lane in plan[number :: len(parts)]]
        *static, last = _in_lanes([*best, alone])
        one_each += last
        for ours, theirs, searched in zip(controlled, static, found, strict=True):
            trials += [Trial(c, s, f[0], second(f)) for c, s, f in zip(ours, theirs, searched, strict=True)]
    return result(trials, one_each)


def services_s(position: int) -> tuple[float, ...]:
    """Service times with the slow stage at `position`."""
    return tuple(SLOW_S if stage == position else FAST_S for stage in range(STAGES))


def second(found: Sequence[Allocation]) -> Allocation | None:
    """The best of the allocations that differ from the first, if it is within 5 % of it."""
    best_s = found[0].mean_s
    return next((a for a in found if 1 + 1e-6 < a.mean_s / best_s <= NEAR_RATIO), None)


def result(trials: Sequence[Trial], one_each: Sequence[Outcome]) -> BenchResult:
    """Rows per position, figures over all trials, notes.

    Args:
        trials: every position and seed.
        one_each: one replica each, one run per seed.

    Raises:
        KeyStageMissed: see there.
        NoAnswers: see there.
    """
    for outcome in (*one_each, *(o for t in trials for o in (t.controller, t.static))):
        if not outcome.latencies_s:
            raise NoAnswers(
                f"position {outcome.run.position}, seed {outcome.run.seed}: none of "
                f"{len(outcome.run.arrivals_s())} requests was answered"
            )
    key_ratios = [t.controller.key_ratio for t in trials]
    if min(key_ratios) < LEAST_KEY_RATIO:
        worst = min(trials, key=lambda t: t.controller.key_ratio).controller
        raise KeyStageMissed(
            f"position {worst.run.position}, seed {worst.run.seed}: the slow stage led the key-stage list "
            f"for {worst.key_ratio:.0%} of the time, the bound is {LEAST_KEY_RATIO:.0%}"
        )
    rows: list[dict[str, object]] = []
    for position in sorted({t.controller.run.position for t in trials}):
        mine = [t for t in trials if t.controller.run.position == position]
        allocations = ", ".join(sorted({"-".join(map(str, t.best.replicas)) for t in mine}))
        rows.append(_row(str(position), "controller", [t.controller for t in mine], ""))
        rows.append(_row(str(position), "best static", [t.static for t in mine], allocations))
    rows.append(_row("any", "one each", one_each, "-".join("1" * STAGES)))
    alone_s = {outcome.run.seed: _mean_s(outcome) for outcome in one_each}
    figures = {
        "latency_vs_static": Figure(
            [_mean_s(t.controller) / _mean_s(t.static) for t in trials],
            "mean latency, controller / best static allocation of equal replica-seconds (rounded up)",
            "below 1",
        ),
        "latency_vs_one_each": Figure(
            [_mean_s(t.controller) / alone_s[t.controller.run.seed] for t in trials],
            "mean latency, controller / one replica each (which uses fewer replica-seconds)",
            "below 1",
        ),
        "key_stage_share": Figure(
            key_ratios, "part of the time the slow stage led the published key-stage list", "above 0.5"
        ),
        "model_vs_live": Figure(
            [t.best.mean_s / _mean_s(t.static) for t in trials],
            "mean latency of the best static allocation, searched / live",
        ),
    }
    return BenchResult(rows, figures, _notes(trials, one_each))


def _in_lanes(plan: Sequence[Sequence[Run]]) -> list[list[Outcome]]:
    """All runs at once, a process with a world of its own per lane."""
    with ProcessPoolExecutor(len(plan), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(measure, plan))


def _search(outcome: Outcome) -> list[Allocation]:
    """Allocations of at most the replica-seconds the controller used."""
    most = max(STAGES, math.ceil(sum(outcome.replicas) - 1e-9))
    return search(outcome.run.arrivals_s(), outcome.run.services_s, most)


# ---------------------------------------------------------------- reporting


def _mean_s(outcome: Outcome) -> float:
    return float(np.mean(outcome.latencies_s))


def _row(position: str, policy: str, outcomes: Sequence[Outcome], allocation: str) -> dict[str, object]:
    """Means over the seeds."""

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values))

    return {
        "slow_stage": position,
        "policy": policy,
        "mean_ms": 1e3 * mean([_mean_s(o) for o in outcomes]),
        "p99_ms": 1e3 * mean([float(np.percentile(o.latencies_s, 99)) for o in outcomes]),
        "replica_s": mean([sum(o.replicas) * o.run.duration_s for o in outcomes]),
        "replicas": mean([sum(o.replicas) for o in outcomes]),
        "by_stage": " ".join(f"{x:.2f}" for x in np.mean([o.replicas for o in outcomes], axis=0)),
        "allocation": allocation,
        "key_stage_share": mean([o.key_ratio for o in outcomes]),
        "decisions": mean([o.decisions for o in outcomes]),
        "cold_starts": mean([o.cold_starts for o in outcomes]),
        "failed": sum(o.failed for o in outcomes),
    }


def _notes(trials: Sequence[Trial], one_each: Sequence[Outcome]) -> list[str]:
    first = trials[0].controller.run
    near = [t.second.mean_s / t.best.mean_s for t in trials if t.second is not None]
    worlds = len({t.controller.run.seed for t in trials})
    gaps = [np.diff(o.run.arrivals_s()) for o in one_each]
    achieved_cv = float(np.median([g.std() / g.mean() for g in gaps]))
    hand_off_s = float(
        np.median(
            [
                _mean_s(o) - mean_latency_s(o.run.arrivals_s(), o.run.services_s, (1,) * STAGES)
                for o in one_each
            ]
        )
    )
    return [
        (
            f"{STAGES} stages of {1e3 * FAST_S:g} ms, the slow one {1e3 * SLOW_S:g} ms, batch 1; "
            f"{len(first.arrivals_s())} arrivals a run at {first.rate_rps:.3g}/s ({UTILISATION:.0%} of the "
            f"slow stage), gamma CV {CV:g} ({achieved_cv:.2f} achieved); latency counts from the "
            "scheduled time"
        ),
        (
            "real supervisor, controller, routers, workers, wire and HTTP; only the device time is emulated; "
            f"{worlds} worlds at once with up to {PIPELINES_PER_WORLD} pipelines each, one policy after the "
            "other on the same arrivals (one replica each beside the static ones)"
        ),
        (
            "replica-seconds: processes that exist (starting and draining too) within the schedule, sampled "
            "every 50 ms; the static baseline may use the controller's, rounded up to whole replicas"
        ),
        (
            "one each: one run per seed, the slow stage at positions in turn: with single servers of "
            "constant service time the order of stages does not change the time through them"
        ),
        _starts([s for t in trials for s in t.controller.start_s]),
        (
            f"the search is exact for constant service times; {len(near)} of {len(trials)} had another "
            f"allocation within {NEAR_RATIO - 1:.0%} of the best (at most {max(near, default=1.0) - 1:.1%} "
            "behind), not run live"
        ),
        f"hand-off and load: one replica each took {1e3 * hand_off_s:.1f} ms more than the model",
        _load("controller", [t.controller for t in trials]),
        _load("static", [t.static for t in trials]),
        _load("one each", one_each),
    ]


def _starts(starts_s: Sequence[float]) -> str:
    if not starts_s:
        return "no replica was started"
    low, middle, high = np.percentile(starts_s, [5, 50, 95])
    return (
        f"{len(starts_s)} cold starts of real processes: {middle:.2f} s median ({low:.2f} to {high:.2f} s, "
        "5 to 95 %), and the tick before it"
    )


def _load(name: str, outcomes: Sequence[Outcome]) -> str:
    cores = float(np.mean([o.used_s / o.run.duration_s for o in outcomes]))
    lag_ms = 1e3 * float(np.mean([o.lag_s for o in outcomes]))
    return f"{name}: a world (with its client) keeps {cores:.2f} cores busy, mean send lag {lag_ms:.2f} ms"
