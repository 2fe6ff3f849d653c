"""`keystage bench e2e`: every policy drives the real local platform; beside each cell the simulator's figure.

Keystage's controller, the same platform without one (`off`: the best static allocation of equal
replica-seconds, rounded up to whole replicas, found by simulating the very arrivals), and each rival of
`keystage.baselines` in the controller's place (`steered`). Real: supervisor, KeysManager, router, workers,
wire, HTTP, client. Emulated: the devices, which sleep alpha b + beta. Cells are 60 s at CV 1, 4 and 8
(`--full`: 0.1 to 8, three seeds), the same arrivals for every policy of a cell. See `e2e_cells` for loads and
the simulated twin.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from keystage.bench.e2e_cells import (
    FULL,
    LOAD,
    MODEL,
    OFF,
    POOL,
    QUICK,
    SHORT,
    Cell,
    best_static,
    plan,
)
from keystage.bench.frame import BenchResult
from keystage.bench.machine_use import MachineUse
from keystage.bench.paper_arrivals import achieved_cv
from keystage.bench.paper_models import MODELS
from keystage.bench.paper_policies import OURS
from keystage.bench.results_page import write_page
from keystage.bench.sim_vs_local import Profile
from keystage.bench.whole_faults import accounted, faults_of
from keystage.bench.whole_models import described
from keystage.bench.whole_partial import finished, keep, note_failure
from keystage.bench.whole_score import live_score
from keystage.bench.whole_table import Pair, draw, policy_figures, rows, sim_figures
from keystage.bench.whole_twin import measured_beside, simulated
from keystage.bench.whole_world import Outcome, WholeError, measure


def run(*, quick: bool = False, full: bool = False, out: Path = Path("out")) -> BenchResult:
    """Runs all cells, one policy after the other.

    Args:
        quick: one short cell, controller on and off.
        full: CVs 0.1 to 8 and three seeds.
        out: the picture goes to its folder `e2e`.

    Raises:
        WholeError: every cell failed.
        NoAnswers: requests of the idle world failed.
    """
    size = FULL if full else QUICK if quick else SHORT
    use = MachineUse()
    profile = measured_beside()
    pairs: list[Pair] = []
    runs: list[tuple[Cell, str, Outcome]] = []
    texts: list[str] = []
    failed: list[str] = []
    cells = [(cell, policy) for cell in size.cells() for policy in size.policies]
    ours: dict[Cell, float] = {}
    for done, (cell, policy) in enumerate(cells, 1):
        begun_s = time.monotonic()
        label = f"cv {cell.cv:g} seed {cell.seed} {policy}"
        try:
            if policy == OFF and cell not in ours:
                raise WholeError(f"{OURS} failed in this cell, so its replica-seconds are not known")
            allocation = best_static(cell, ours[cell], profile) if policy == OFF else ()
            outcome = measure(plan(cell, policy, allocation))
        except WholeError as error:
            note_failure(failed, label, error)
            continue
        pair = Pair(
            f"cv {cell.cv:g}",
            f"{cell.cv:g}",
            cell.seed,
            policy,
            live_score(outcome),
            simulated(outcome, profile, cell.seed),
        )
        pairs.append(pair)
        runs.append((cell, policy, outcome))
        if policy == OURS:
            ours[cell] = sum(outcome.replicas[0])
        if policy == OFF:
            numbers = "-".join(map(str, allocation))
            texts.append(f"cv {cell.cv:g}, seed {cell.seed}: {numbers} for {ours[cell]:.2f}")
        print(
            f"{label}: mean {1e3 * pair.live.mean_s:.0f} ms, {time.monotonic() - begun_s:.0f} s",
            file=sys.stderr,
        )
        so_far = _result(pairs, _notes(profile, runs, texts), use)
        keep("e2e", so_far, out, f"{done} of {len(cells)} cells, {len(failed)} of them failed")
    if not runs:
        raise WholeError(f"all {len(cells)} cells failed, the first with: {failed[0]}")
    picture = draw(
        out / "e2e" / "e2e.png",
        pairs,
        "CV of arrivals",
        "bench e2e: the real local platform with emulated devices (through) and the simulator (dashed)",
    )
    notes = [*_notes(profile, runs, texts), f"picture: {picture}"]
    result = finished("e2e", _result(pairs, notes, use), out, failed)
    if not quick:
        write_page("e2e", "Every policy on the real local platform", result)
    return result


def _result(pairs: list[Pair], notes: list[str], use: MachineUse) -> BenchResult:
    return BenchResult(
        rows(pairs), policy_figures(pairs, OURS) | sim_figures(pairs), notes, use.disturbance()
    )


def _notes(profile: Profile, runs: list[tuple[Cell, str, Outcome]], static: list[str]) -> list[str]:
    cells = {(cell.cv, cell.seed): cell for cell, _, _ in runs}
    achieved = ", ".join(f"{cv:g}: {achieved_cv(c.times_s()):.2f}" for (cv, _), c in cells.items())
    first = runs[0][0]
    starts = [s for _, _, outcome in runs for s in outcome.start_s]
    low, middle, high = np.percentile(starts, [5, 50, 95]) if starts else (np.nan,) * 3
    lag_ms = [1e3 * float(one.lag_s.mean()) for _, _, outcome in runs for one in outcome.sent]
    busy = [outcome.used_cores for _, _, outcome in runs]
    lost = {
        f"{policy} at cv {cell.cv:g}, seed {cell.seed}": {**one.refused, **one.failed}
        for cell, policy, outcome in runs
        for one in outcome.sent
        if one.refused or one.failed
    }
    return [
        *(
            f"FAILED: {policy} at cv {cell.cv:g}, seed {cell.seed}: {text}"
            for cell, policy, outcome in runs
            for text in faults_of(outcome)
        ),
        accounted([outcome for _, _, outcome in runs]),
        (
            f"emulated: devices, which sleep alpha b + beta; QUART's Table 1 in four stages: "
            f"{described([MODELS.index(MODEL)])}; parameters and activations of its size are not moved"
        ),
        (
            f"{first.rate_rps:.1f} requests/s ({LOAD:g} times one replica of each stage), "
            f"{first.duration_s:g} s cells, objective {first.deadline_s:.3f} s, a pool of {POOL} GPUs (one a "
            f"replica); gamma gaps, CV achieved {achieved}: a cell of 60 s is far shorter than the 2,000 "
            "CV^2 arrivals that a CV above 1 would need, so a cell is a sample path, the same one for every "
            "policy"
        ),
        (
            f"off: the best static allocation of as many replica-seconds as Keystage used, rounded up to "
            f"whole replicas, by a climb over simulated allocations from the proportional one "
            f"({'; '.join(static)})"
        ),
        (
            "rivals with the settings that bench tuning chose on the paper's cluster, Keystage with its "
            "defaults; INFless gets the whole model as one function, one GPU an instance, and starts with "
            "four; static is told mean rate and CV"
        ),
        (
            f"the simulator is told {1e3 * profile.beside_s:.1f} ms beside service a request (measured "
            f"idle), of which {1e3 * profile.occupied_s:.2f} ms a stage keep the replica (measured full), "
            "and the median and spread of each live run's own start times"
        ),
        f"{len(starts)} starts of processes: {middle:.2f} s median ({low:.2f} to {high:.2f}, 5 to 95 %)",
        (
            f"platform and client kept {np.mean(busy):.2f} cores busy (at most {max(busy):.2f}), mean send "
            f"lag {np.mean(lag_ms):.2f} ms (at most {max(lag_ms):.2f}); most stage processes at once "
            f"{max(outcome.most_replicas for _, _, outcome in runs)}"
        ),
        f"not served: {lost or 'none'}",
    ]
