"""`keystage bench burst`: the controller under bursts, beside the best static allocation.

Four emulated single-pass stages, batch 1, one of them twice as slow, gamma arrivals of CV 4 at 80 %
of the slow stage's rate. Every position of the slow stage and every seed is run three times on the
same arrivals: with the controller; with the static allocation that an exact search finds best among
those of as many replica-seconds as the controller used, rounded up to whole replicas (to the
baseline's favour); and with one replica each. Only the device time is emulated.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from keystage.bench.burst_lane import Outcome, Run, measure
from keystage.bench.burst_search import Allocation, mean_latency_s, search
from keystage.bench.frame import BenchResult, Figure

STAGES = 4
FAST_S = 0.02
SLOW_S = 0.04
"""Long beside the router's own time per hop (one or two milliseconds), short enough for 5,000 arrivals."""
CV = 4.0
UTILISATION = 0.8
ARRIVALS = 5000
SEEDS = 5
LEAST_KEY_RATIO = 0.5
NEAR_RATIO = 1.05


class KeyStageMissed(AssertionError):
    """The controller did not name the slow stage first most of the time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One position and seed under the three policies, and what the search expected.

    Attributes:
        controller: with the controller.
        static: the best static allocation.
        one_each: one replica per stage.
        best: the search's answer.
        second: the next allocation within 5 % that differs in its mean, None when there is none.
        one_each_s: modelled mean latency of one replica each.
    """

    controller: Outcome
    static: Outcome
    one_each: Outcome
    best: Allocation
    second: Allocation | None
    one_each_s: float


def run(*, quick: bool = False) -> BenchResult:
    """Runs all positions and seeds (quick: one position, two seeds, a fifth of the arrivals).

    Raises:
        KeyStageMissed: see there.
    """
    positions, seeds, arrivals = (
        (range(1, 2), 2, ARRIVALS // 5) if quick else (range(STAGES), SEEDS, ARRIVALS)
    )
    rate_rps = UTILISATION / SLOW_S
    plan = [
        [
            Run(position, seed, services_s(position), rate_rps, CV, arrivals / rate_rps)
            for position in positions
        ]
        for seed in range(seeds)
    ]
    controlled = _in_lanes(plan)
    found = [_search(outcome) for outcome in controlled]
    chosen = {_key(outcome): best[0].replicas for outcome, best in zip(controlled, found, strict=True)}
    static = _in_lanes(_with(plan, lambda run_: chosen[run_.position, run_.seed]))
    one_each = _in_lanes(_with(plan, lambda _: (1,) * STAGES))
    trials = [
        Trial(*outcomes, best[0], _second(best), _modelled_s(outcomes[0].run, (1,) * STAGES))
        for *outcomes, best in zip(controlled, static, one_each, found, strict=True)
    ]
    return result(trials)


def services_s(position: int) -> tuple[float, ...]:
    """Service times with the slow stage at `position`."""
    return tuple(SLOW_S if stage == position else FAST_S for stage in range(STAGES))


def result(trials: Sequence[Trial]) -> BenchResult:
    """Rows per position, figures over all trials, notes.

    Raises:
        KeyStageMissed: see there.
    """
    positions = sorted({t.controller.run.position for t in trials})
    rows = [row for p in positions for row in _rows(p, [t for t in trials if t.controller.run.position == p])]
    key_ratios = [t.controller.key_ratio for t in trials]
    if min(key_ratios) < LEAST_KEY_RATIO:
        worst = min(trials, key=lambda t: t.controller.key_ratio).controller
        raise KeyStageMissed(
            f"position {worst.run.position}, seed {worst.run.seed}: the slow stage led the key-stage list for "
            f"{worst.key_ratio:.0%} of the time, the bound is {LEAST_KEY_RATIO:.0%}"
        )
    figures = {
        "latency_vs_static": Figure(
            [_mean_s(t.controller) / _mean_s(t.static) for t in trials],
            "mean latency, controller / best static allocation of equal replica-seconds (rounded up)",
            "below 1",
        ),
        "latency_vs_one_each": Figure(
            [_mean_s(t.controller) / _mean_s(t.one_each) for t in trials],
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
    return BenchResult(rows, figures, _notes(trials))


# ---------------------------------------------------------------- running


def _in_lanes(plan: Sequence[Sequence[Run]]) -> list[Outcome]:
    """All runs at once, a lane (world) per seed, in the plan's order."""
    with ProcessPoolExecutor(len(plan), multiprocessing.get_context("spawn")) as pool:
        return [outcome for lane in pool.map(measure, plan) for outcome in lane]


def _with(plan: Sequence[Sequence[Run]], replicas: Callable[[Run], tuple[int, ...]]) -> list[list[Run]]:
    return [[dataclasses.replace(run_, replicas=replicas(run_)) for run_ in lane] for lane in plan]


def _key(outcome: Outcome) -> tuple[int, int]:
    return outcome.run.position, outcome.run.seed


def _search(outcome: Outcome) -> list[Allocation]:
    """Allocations of at most the replica-seconds the controller used."""
    most = max(STAGES, math.ceil(sum(outcome.replicas) - 1e-9))
    return search(outcome.run.arrivals_s(), outcome.run.services_s, most)


def _second(found: Sequence[Allocation]) -> Allocation | None:
    best_s = found[0].mean_s
    return next((a for a in found if 1 + 1e-6 < a.mean_s / best_s <= NEAR_RATIO), None)


def _modelled_s(run_: Run, replicas: tuple[int, ...]) -> float:
    return mean_latency_s(run_.arrivals_s(), run_.services_s, replicas)


# ---------------------------------------------------------------- reporting


def _mean_s(outcome: Outcome) -> float:
    return float(np.mean(outcome.latencies_s)) if outcome.latencies_s else math.nan


def _rows(position: int, trials: Sequence[Trial]) -> list[dict[str, object]]:
    """One row per policy; numbers are means over the seeds."""
    static = ", ".join(sorted({"-".join(map(str, t.best.replicas)) for t in trials}))
    return [
        _row(position, "controller", [t.controller for t in trials], ""),
        _row(position, "best static", [t.static for t in trials], static),
        _row(position, "one each", [t.one_each for t in trials], "-".join("1" * STAGES)),
    ]


def _row(position: int, policy: str, outcomes: Sequence[Outcome], allocation: str) -> dict[str, object]:
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


def _notes(trials: Sequence[Trial]) -> list[str]:
    first = trials[0].controller.run
    starts_s = [s for t in trials for s in t.controller.start_s]
    near = [t.second.mean_s / t.best.mean_s for t in trials if t.second is not None]
    return [
        f"{STAGES} stages of {1e3 * FAST_S:g} ms, the slow one {1e3 * SLOW_S:g} ms, batch 1; "
        f"{len(first.arrivals_s())} arrivals a run at {first.rate_rps:g}/s ({UTILISATION:.0%} of the slow "
        f"stage), gamma CV {CV:g} ({_achieved_cv(trials):.2f} achieved); latency counts from the scheduled time",
        "real supervisor, controller, routers, workers, wire and HTTP; only the device time is emulated; "
        f"{len({t.controller.run.seed for t in trials})} worlds at once with one pipeline per position, "
        "one policy after the other on the same arrivals",
        "replica-seconds: processes that exist (starting and draining too) within the schedule, sampled every "
        "50 ms; the static baseline may use the controller's, rounded up to whole replicas",
        _starts(starts_s),
        f"the search is exact for constant service times; {len(near)} of {len(trials)} had another allocation "
        f"within {NEAR_RATIO - 1:.0%} of the best (at most {max(near, default=1) - 1:.1%} behind), not run live",
        f"hand-off: one replica each took {1e3 * _overhead_s(trials):.1f} ms more than the model",
        *(_load(name, [getattr(t, name) for t in trials]) for name in ("controller", "static", "one_each")),
    ]


def _starts(starts_s: Sequence[float]) -> str:
    if not starts_s:
        return "no replica was started"
    low, middle, high = np.percentile(starts_s, [5, 50, 95])
    return (
        f"{len(starts_s)} cold starts of real processes: {middle:.2f} s median ({low:.2f} to {high:.2f} s, "
        "5 to 95 %), and the tick before it"
    )


def _overhead_s(trials: Sequence[Trial]) -> float:
    return float(np.median([_mean_s(t.one_each) - t.one_each_s for t in trials]))


def _achieved_cv(trials: Sequence[Trial]) -> float:
    gaps = [np.diff(t.controller.run.arrivals_s()) for t in trials]
    return float(np.median([g.std() / g.mean() for g in gaps]))


def _load(name: str, outcomes: Sequence[Outcome]) -> str:
    lanes = {o.run.seed: o.used_s / o.run.duration_s for o in outcomes}
    lag_ms = 1e3 * float(np.mean([o.lag_s for o in outcomes]))
    return f"{name}: {sum(lanes.values()):.2f} cores busy in all, mean send lag {lag_ms:.2f} ms"
