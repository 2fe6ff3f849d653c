"""`keystage bench mixed`: several pipelines on one pool of GPUs under the Azure Functions trace.

Simulated: the 8 hours of the 2019 sample of 100 functions at 100 times their speed, Keystage beside the best
static allocation of equal GPU-seconds and every rival, first as tuned, then brought to Keystage's GPU-seconds
by effort.
Live: ten minutes at 10 times their speed on the real local platform with emulated devices, through its
gateway, beside the simulated twin. See `mixed_cells` for pools and pipelines, `whole_trace` for the trace.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

from keystage.bench.config import BenchSettings
from keystage.bench.frame import BenchResult
from keystage.bench.machine_use import MachineUse
from keystage.bench.mixed_cells import (
    BEGIN_LOAD,
    LIVE_MODELS,
    LIVE_POOL,
    OFF,
    POLICIES,
    POOL_LOAD,
    SIMULATED_MODELS,
    Cell,
    Equal,
    Load,
    equalise,
    live_plan,
    servers,
    simulate_cell,
)
from keystage.bench.paper_policies import OURS, RIVALS
from keystage.bench.paper_world import GPUS
from keystage.bench.results_page import write_page
from keystage.bench.sim_vs_local import Profile
from keystage.bench.whole_faults import accounted, faults_of
from keystage.bench.whole_models import described
from keystage.bench.whole_partial import finished, keep, note_failure
from keystage.bench.whole_score import live_score
from keystage.bench.whole_table import Pair, draw, policy_figures, rows, sim_figures
from keystage.bench.whole_trace import CountTrace, Sample, load
from keystage.bench.whole_twin import measured_beside, simulated
from keystage.bench.whole_world import Outcome, WholeError, measure

SAMPLE: Sample = 100
SPEED, LIVE_SPEED = 100.0, 10.0
SEARCH_MINUTES = 120
SEARCH_SEED = 390
"""Of times within minutes while efforts are searched; used nowhere else."""


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much is run.

    Attributes:
        minutes: of the trace, simulated.
        seeds: of simulated runs.
        live_minutes: of the trace, live.
        live_seeds: of live runs.
        policies: who steers, Keystage first.
    """

    minutes: int
    seeds: tuple[int, ...]
    live_minutes: int
    live_seeds: tuple[int, ...]
    policies: tuple[str, ...] = POLICIES


QUICK = Size(60, (310,), 2, (310,), (OURS, OFF))
SHORT = Size(480, (300,), 10, (300,))
FULL = Size(480, (300, 301, 302, 303, 304), 10, (300, 301, 302))


def run(*, quick: bool = False, full: bool = False, out: Path = Path("out")) -> BenchResult:
    """Runs both parts.

    Args:
        quick: an hour simulated and 12 s live, controller on and off.
        full: five seeds simulated, three live.
        out: pictures go to its folder `mixed`.

    Raises:
        PaperTraceError: a traces folder was named that cannot be used.
        WholeError: the worlds that hand-offs are measured in did not come up.
        NoAnswers: requests of the idle world failed.
    """
    size = FULL if full else QUICK if quick else SHORT
    trace = load(SAMPLE, BenchSettings().trace_folder)
    use = MachineUse()
    done = _Done()
    _simulated(size, trace, done, lambda: keep("mixed", _result(done, use), out, "simulated policies"))
    done.profile = measured_beside()
    use = MachineUse()
    _live(size, trace, done, lambda: keep("mixed", _result(done, use), out, "live policies"))
    folder = out / "mixed"
    title = "bench mixed, simulated: one pool under the trace"
    pictures = [draw(folder / "mixed-simulated.png", done.tuned + done.equal, "settings", title)]
    if done.live:
        words = "bench mixed: live (through), its twin (dashed)"
        pictures.append(draw(folder / "mixed-live.png", done.live, "window", words))
    made = _result(done, use)
    made.notes.append(f"pictures: {', '.join(map(str, pictures))}")
    result = finished("mixed", made, out, done.failed)
    if not quick:
        write_page("mixed", "Several pipelines on one pool under the Azure Functions trace", result)
    return result


@dataclasses.dataclass
class _Done:
    """What has been run so far."""

    tuned: list[Pair] = dataclasses.field(default_factory=list)
    equal: list[Pair] = dataclasses.field(default_factory=list)
    found: dict[tuple[int, str], Equal] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    live: list[Pair] = dataclasses.field(default_factory=list)
    runs: list[Outcome] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)
    profile: Profile | None = None


def _result(done: _Done, use: MachineUse) -> BenchResult:
    figures = policy_figures(done.tuned, OURS, "_simulated") | policy_figures(done.equal, OURS, "_equal")
    figures |= policy_figures(done.live, OURS, "_live") | sim_figures(done.live)
    notes = [
        *done.notes,
        *(
            f"equal GPU-seconds, seed {seed}, {policy}: {one.effort:.2f} times the tuned effort, of "
            f"{one.tried} tried on another seed's first {SEARCH_MINUTES} minutes, there {one.ratio:.3f} "
            "of Keystage's"
            for (seed, policy), one in done.found.items()
        ),
    ]
    if done.profile is not None and done.runs:
        notes += _live_notes(done.profile, done.runs)
    return BenchResult(
        rows(done.tuned + done.equal, "simulated") + rows(done.live), figures, notes, use.disturbance()
    )


def _simulated(size: Size, trace: CountTrace, done: _Done, kept: Callable[[], object]) -> None:
    tuned, equal = done.tuned, done.equal
    for seed in size.seeds:
        cell = Cell(SAMPLE, SIMULATED_MODELS, 0, size.minutes, SPEED, seed)
        one = Load(cell, trace)
        part = Load(
            dataclasses.replace(cell, minutes=min(size.minutes, SEARCH_MINUTES), seed=SEARCH_SEED), trace
        )
        target_gpu_s = simulate_cell(part, OURS)[0].gpu_s if len(size.policies) > 2 else 0.0
        done.notes = done.notes or _simulated_notes(one, trace)
        gpus = 0.0
        for policy in size.policies:
            begun_s = time.monotonic()
            score, _ = simulate_cell(one, policy, one.off(gpus) if policy == OFF else ())
            gpus = score.gpu_s / score.schedule_s if policy == OURS else gpus
            tuned.append(Pair("as tuned", "as tuned", seed, policy, score, None))
            if policy in (OURS, OFF):
                equal.append(Pair("equal", "equal", seed, policy, score, None))
            elif policy in RIVALS:
                effort = done.found[seed, policy] = equalise(part, policy, target_gpu_s)
                again, _ = simulate_cell(one, policy, effort=effort.effort)
                equal.append(Pair("equal", "equal", seed, policy, again, None))
            _tell(f"simulated, seed {seed} {policy}: mean {1e3 * score.mean_s:.0f} ms", begun_s)
            kept()


def _live(size: Size, trace: CountTrace, done: _Done, kept: Callable[[], object]) -> None:
    assert done.profile is not None
    for seed in size.live_seeds:
        one = Load(Cell(SAMPLE, LIVE_MODELS, 0, size.live_minutes, LIVE_SPEED, seed), trace)
        gpus: float | None = None
        for policy in size.policies:
            begun_s = time.monotonic()
            label = f"live, seed {seed} {policy}"
            try:
                if policy == OFF and gpus is None:
                    raise WholeError(f"{OURS} failed, so its replica-seconds are not known")
                outcome = measure(live_plan(one, policy, one.off(gpus or 0.0) if policy == OFF else ()))
            except WholeError as error:
                note_failure(done.failed, label, error)
                continue
            done.runs.append(outcome)
            gpus = sum(map(sum, outcome.replicas)) if policy == OURS else gpus
            score = live_score(outcome)
            twin = simulated(outcome, done.profile, seed)
            done.live.append(Pair("live", "live", seed, policy, score, twin))
            _tell(f"{label}: mean {1e3 * score.mean_s:.0f} ms", begun_s)
            kept()


def _tell(text: str, begun_s: float) -> None:
    print(f"{text}, {time.monotonic() - begun_s:.0f} s", file=sys.stderr)


def _simulated_notes(one: Load, trace: CountTrace) -> list[str]:
    rates = ", ".join(f"{rate:.1f}" for rate in one.rates_rps)
    return [
        (
            f"{trace.source}: minutes {one.cell.from_minute} to {one.cell.from_minute + one.cell.minutes} of "
            f"the file at {one.cell.speed:g}x, per-minute counts exactly, times within a minute as a Poisson "
            f"process has them; function i goes to pipeline i mod {len(one.cell.models)}: {rates} requests/s"
        ),
        (
            f"simulated pool: {servers(one)} servers of {GPUS} GPUs, so that the mean load of "
            f"{one.erlangs:.0f} erlang fills {POOL_LOAD:.0%}; {described(one.cell.models)}; parameters lie "
            f"in every host memory; everybody begins at a utilisation of {BEGIN_LOAD:g}; the first "
            f"{one.cell.warm_minutes:g} minutes do not count; objective five execution times"
        ),
        (
            "off: static, the best by the G/G/c model of as many GPU-seconds as Keystage used, rounded up; "
            "rivals as bench tuning chose on single models, then with the effort that brings them to "
            "Keystage's GPU-seconds; INFless: whole models, OPT-66B on three GPUs of one server"
        ),
    ]


def _live_notes(profile: Profile, runs: list[Outcome]) -> list[str]:
    lost = {k: {**s.refused, **s.failed} for k, o in enumerate(runs) for s in o.sent if s.refused or s.failed}
    busy = max(o.used_cores for o in runs)
    return [
        *(f"FAILED: live run {k}: {text}" for k, o in enumerate(runs) for text in faults_of(o)),
        (
            f"live: real supervisor, KeysManager, controller or rival, gateway, routers, workers, wire, "
            f"HTTP; devices emulated (asleep for alpha b + beta); {described(LIVE_MODELS)}; at most "
            f"{LIVE_POOL} replicas; at {LIVE_SPEED:g}x; the twin is told {1e3 * profile.beside_s:.1f} ms "
            "beside service and each run's own start times, and nothing of the gateway"
        ),
        f"live: not served {lost or 'none'}, at most {busy:.2f} cores busy",
        accounted(runs),
    ]
