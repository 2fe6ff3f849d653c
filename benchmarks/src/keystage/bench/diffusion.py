"""`keystage bench diffusion`: diffusion served step by step, beside request by request (Clockwork-like).

Requests ask for 100 to 125 steps, uniformly: half of the artifact's, each twice as long (`STRETCH`).
Module-level batching puts requests at any step, of any number of steps, into one batch of the denoiser;
request-level batching takes whole requests: `equal` only those of equal numbers of steps together, as the
paper's Clockwork does, `padded` any. All run live on the local platform: same router, workers, wire, devices,
arrivals (gamma, by seed), objectives; all refuse what cannot be in time. Devices are emulated: modules sleep
for the times that the paper's artifact has for DiT-S/2 on an RTX 4090 (`neustream_models`). With
`--device cuda` they are a random-weight DiT of the ready program `diffusion` on one GPU, 20 to 50 steps.

A request's objective is `scale` times what one with its steps takes alone, step by step, through the whole
system. Offered load is a multiple of what the devices can serve without batching. Goodput counts answers
within their objectives. The paper has up to 5.26 times Clockwork's.

Effort: ours is tried live with two policies. The rival's profile is measured where it serves
(`diffusion_whole`), its rule is chosen of 14 for each cell, on emulated devices with other seeds of the
cell's arrivals (`diffusion_rival`), and both groupings are tried live. Of what is tried live the best counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from keystage.bench.diffusion_live import Arrivals, Outcome, Serving, System, replay, serving
from keystage.bench.diffusion_rival import LEASTS, Grouping, Rule, WholeProfile, tuned
from keystage.bench.diffusion_whole import RequestLevel, measured
from keystage.bench.frame import BenchError, BenchResult, Figure
from keystage.bench.neustream_models import DIT_S2
from keystage.bench.results_page import write_page

MOST_BATCH = 20
DEVICES = 2
STRETCH = 2
"""An emulated request has half of the artifact's steps, each twice as long: router, workers and clients share
two cores here, and half as many hand-offs keep what is measured the batching."""
GPU_STEPS = tuple(range(20, 51, 5))
GPU_SHAPE = "dit-xl"
WAYS = (("eager", "refuse"), ("partial-slo", "refuse"))
"""Both gather what meets the first deadline; the second also minds what a round may take."""
GROUPINGS: tuple[Grouping, ...] = ("equal", "padded")
TUNING_SEEDS = range(100, 104)
"""Of arrivals that the rival's rule is chosen with; no cell has them."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, MOST_BATCH)
QUICK_SIZES = (1, 4, 12, MOST_BATCH)
_BODY_SEED = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What is run.

    Attributes:
        device: `cpu` (emulated) or `cuda`.
        devices: workers with a device each.
        steps: numbers of steps that requests ask for.
        cvs: coefficients of variation of the arrivals.
        scales: objectives over the time alone.
        loads: offered load over what unbatched requests could use of the devices.
        seconds: of one replay.
        seeds: replays of each cell.
        ways: `KEYSTAGE_BATCHING` and `KEYSTAGE_LATE` that ours is tried with; the best counts.
        sizes: batches of whole requests that are measured, ascending.
        rounds: how often.
    """

    device: str
    devices: int
    steps: Sequence[int]
    cvs: Sequence[float]
    scales: Sequence[float]
    loads: Sequence[float]
    seconds: float
    seeds: int
    ways: Sequence[tuple[str, str]]
    sizes: Sequence[int] = SIZES
    rounds: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One condition; all systems see the same arrivals in it."""

    cv: float
    scale: float
    load: float
    seed: int


def setting(*, quick: bool, full: bool, device: str) -> Setting:
    """The size of a run."""
    on_gpu = device.startswith("cuda")
    steps = GPU_STEPS if on_gpu else tuple(range(DIT_S2.steps[0] // STRETCH, DIT_S2.steps[1] // STRETCH + 1))
    devices = 1 if on_gpu else DEVICES
    if quick:
        return Setting(device, devices, steps, (4.0,), (3.0,), (8.0,), 8.0, 1, WAYS, QUICK_SIZES, 1)
    if full:
        cvs, scales = (1.0, 2.0, 3.0, 4.0), (1.2, 1.5, 2.0, 3.0)
        return Setting(device, devices, steps, cvs, scales, (4.0, 8.0), 40.0, 1, WAYS)
    return Setting(device, devices, steps, (1.0, 4.0), (1.2, 3.0), (8.0,), 30.0, 1, WAYS)


def run(*, quick: bool = False, full: bool = False, device: str = "cpu") -> BenchResult:
    """Runs all systems over all cells.

    Args:
        quick: one cell, 8 s each; the rival's profile of fewer sizes, once.
        full: CV 1 to 4, objectives of 1.2 to 3, two loads: an hour and a half.
        device: `cpu`: emulated devices; `cuda`: one GPU.

    Raises:
        BenchError: another device, or one that is not there.
    """
    check(device)
    chosen = setting(quick=quick, full=full, device=device)
    cells = [
        Cell(*each)
        for each in itertools.product(chosen.cvs, chosen.scales, chosen.loads, range(chosen.seeds))
    ]
    with tempfile.TemporaryDirectory(prefix="bench-diffusion-") as folder:
        alone, outcomes, rival = asyncio.run(measure(chosen, cells, Path(folder)))
    found = result(chosen, cells, alone, outcomes, rival)
    if not quick:
        on_gpu = device.startswith("cuda")
        name, where = ("diffusion-cuda", "on a GPU") if on_gpu else ("diffusion", "emulated devices")
        write_page(name, f"A diffusion program live, {where}", found)
    return found


def check(device: str) -> None:
    """Refuses a device before anything is made for it.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.

    Raises:
        BenchError: another name, or one that this machine does not have.
    """
    if device == "cpu":
        return
    kind, colon, index = device.partition(":")
    if kind != "cuda" or (colon and not index.isdecimal()):
        raise BenchError(f"--device {device}: it must be cpu (emulated), cuda or cuda:N")
    import torch

    there = torch.cuda.device_count()
    if int(index or 0) >= there:
        raise BenchError(f"--device {device}: this machine shows {there} CUDA devices")


def systems(chosen: Setting) -> tuple[list[System], System]:
    """Ours, with each way that it is tried in, and what runs the rival's batches."""
    if chosen.device.startswith("cuda"):
        options: dict[str, Any] = {"shape": GPU_SHAPE, "dtype": "bfloat16", "image": "npy"}
        stepwise = "keystage.streams.programs.diffusion:program", options
        whole: dict[str, Any] = {"inner": stepwise[0], "inner_options": options}
    else:
        steps_s = [STRETCH * seconds for seconds in DIT_S2.step.seconds]
        whole = {"step_s": steps_s, "decoder_s": list(DIT_S2.decoder.seconds)}
        stepwise = "diffusion_programs:stepwise", whole
    ours = [System("module", *stepwise, *way, MOST_BATCH) for way in chosen.ways]
    # The router hands each message, a batch of requests, to a free worker.
    return ours, System("request", "diffusion_programs:whole", whole, "eager", "demote", 1)


async def measure(
    chosen: Setting, cells: Sequence[Cell], folder: Path
) -> tuple[tuple[float, float], dict[str, list[Outcome]], Rival]:
    """Seconds of a request alone (a step, beside the steps), outcomes by system and cell, the rival."""
    alone = (0.0, 0.0)
    outcomes: dict[str, list[Outcome]] = {}
    ours, whole = systems(chosen)
    for index, system in enumerate(ours):
        async with _up(system, folder / f"module-{index}", chosen) as up:
            await _warm_up(up, chosen)
            if index == 0:
                alone = await _alone(up, chosen)
            found = []
            for cell in cells:
                found.append(await replay(up, arrivals(chosen, cell, alone)))
                _tell(system.batching, cell, found[-1])
        known = outcomes.setdefault("module", found)
        outcomes["module"] = [best(pair) for pair in zip(known, found, strict=True)]
    async with _up(whole, folder / "request", chosen) as up:
        few, many = chosen.steps[-1] // 5, chosen.steps[-1]
        bodies = _body(chosen, few, 0), _body(chosen, many, 0)
        rival = Rival(*await measured(up, bodies, (few, many), chosen.devices, chosen.sizes, chosen.rounds))
        for cell in cells:
            for grouping in GROUPINGS:
                rule = rival.rule(chosen, cell, alone, grouping)
                front = RequestLevel(up, rival.profile, rule, chosen.devices, MOST_BATCH)
                outcome = await replay(front, arrivals(chosen, cell, alone))
                outcomes.setdefault(grouping, []).append(outcome)
                rival.rules.append(rule)
                _tell(str(rule), cell, outcome)
    return alone, outcomes, rival


def _up(system: System, home: Path, chosen: Setting) -> contextlib.AbstractAsyncContextManager[Serving]:
    return serving(system, home, devices=chosen.devices, device=chosen.device)


def _tell(what: str, cell: Cell, outcome: Outcome) -> None:
    print(f"{what}, {cell}: {outcome.good} of {outcome.offered} good", file=sys.stderr, flush=True)


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """The one with most requests in time, the first of several."""
    return max(outcomes, key=lambda outcome: outcome.good)


@dataclasses.dataclass(frozen=True, slots=True)
class Rival:
    """Request-level batching, measured.

    Attributes:
        profile: of a batch of whole requests.
        margin_ratio: by how much longer than that it is reckoned.
        rules: what was tried live, by cell and grouping.
    """

    profile: WholeProfile
    margin_ratio: float
    rules: list[Rule] = dataclasses.field(default_factory=list)

    def rule(self, chosen: Setting, cell: Cell, alone: tuple[float, float], grouping: Grouping) -> Rule:
        """The best for such arrivals on emulated devices."""
        schedules = tuning_schedules(chosen, cell, alone)
        return tuned(self.profile, grouping, MOST_BATCH, chosen.devices, schedules, self.margin_ratio)


def tuning_schedules(
    chosen: Setting, cell: Cell, alone: tuple[float, float]
) -> list[list[tuple[float, float, int]]]:
    """What comes in the cell with other seeds, as `diffusion_rival.emulated` takes it."""
    drawn = [arrivals(chosen, dataclasses.replace(cell, seed=seed), alone) for seed in TUNING_SEEDS]
    return [list(zip(each.times_s, each.objectives_s, each.steps, strict=True)) for each in drawn]


async def _warm_up(up: Serving, chosen: Setting) -> None:
    """Batches of several sizes, for the fits; failures would be failures of the run."""
    for count in (1, 4, 12):
        body = _body(chosen, chosen.steps[0], 0)
        statuses = [status for status, _ in await asyncio.gather(*(up.ask(body) for _ in range(count)))]
        if set(statuses) != {200}:
            raise BenchError(f"warm-up answered {statuses}")


async def _alone(up: Serving, chosen: Setting) -> tuple[float, float]:
    """Times of the fewest and the most steps, the best of four, as a line through both."""
    first, last = chosen.steps[0], chosen.steps[-1]
    fewest_s, most_s = [
        min([(await up.ask(_body(chosen, steps, 0)))[1] for _ in range(4)]) for steps in (first, last)
    ]
    slope_s = (most_s - fewest_s) / (last - first)
    beside_s = fewest_s - slope_s * first
    # On a machine that is not quiet a difference of two times may be none.
    return (slope_s, beside_s) if 0 <= beside_s < 0.5 * fewest_s else (most_s / last, 0.0)


def arrivals(chosen: Setting, cell: Cell, alone: tuple[float, float]) -> Arrivals:
    """The schedule of a cell: gamma gaps, uniform steps."""
    draw = np.random.default_rng([_BODY_SEED, cell.seed, int(10 * cell.cv)])
    mean_s = alone[0] * float(np.mean(chosen.steps)) + alone[1]
    rate_rps = cell.load * chosen.devices / mean_s
    shape = 1 / cell.cv**2
    count = max(8, int(rate_rps * chosen.seconds))
    times_s = np.cumsum(draw.gamma(shape, 1 / (shape * rate_rps), count))
    times_s *= chosen.seconds / times_s[-1]  # every cell offers its load exactly
    steps = draw.choice(np.asarray(chosen.steps), count)
    return Arrivals(
        [float(t) for t in times_s],
        [_body(chosen, int(n), k) for k, n in enumerate(steps)],
        [cell.scale * float(alone[0] * n + alone[1]) for n in steps],
        [int(n) for n in steps],
    )


def _body(chosen: Setting, steps: int, seed: int) -> bytes:
    fields: dict[str, Any] = {"steps": steps}
    if chosen.device.startswith("cuda"):
        fields |= {"prompt": f"picture {seed}", "seed": seed}
    return msgspec.json.encode(fields)


def result(
    chosen: Setting,
    cells: Sequence[Cell],
    alone: tuple[float, float],
    outcomes: dict[str, list[Outcome]],
    rival: Rival,
) -> BenchResult:
    """Rows of every cell, and the ratios.

    Args:
        chosen: what was run.
        cells: in order.
        alone: see `measure`.
        outcomes: by system, a cell each.
        rival: the rules that it was tried with.
    """
    rows: list[dict[str, Any]] = []
    by_scale: dict[float, list[float]] = {}
    to_equal: list[float] = []
    each = zip(cells, *(outcomes[name] for name in ("module", *GROUPINGS)), strict=True)
    for index, (cell, module, equal, padded) in enumerate(each):
        request = best((equal, padded))
        by_scale.setdefault(cell.scale, []).append(module.good / max(1, request.good))
        to_equal.append(module.good / max(1, equal.good))
        rules = rival.rules[index * len(GROUPINGS) : (index + 1) * len(GROUPINGS)]
        rows.append(
            {
                "CV": cell.cv, "scale": cell.scale, "load": cell.load, "seed": cell.seed,
                "offered": module.offered, "module good": module.good,
                "equal good": equal.good, "padded good": padded.good,
                "ratio": by_scale[cell.scale][-1], "ratio to equal": to_equal[-1],
                "module batch": module.batch, "equal batch": equal.batch, "padded batch": padded.batch,
                **{f"{name} lost": lost(outcome) for name, outcome in
                   (("module", module), ("equal", equal), ("padded", padded))},
                "rules": "; ".join(map(str, rules)),
            }
        )  # fmt: skip
    every = [ratio for found in by_scale.values() for ratio in found]
    figures = {
        "best_ratio": Figure(
            [max(to_equal)], "largest goodput over that of requests of equal steps", "paper: up to 5.26"
        ),
        "best_ratio_to_padded": Figure([max(every)], "largest over the better of equal and padded"),
        "least_ratio": Figure([min(every)], "smallest over the better of equal and padded", "at least 1"),
        **{
            f"ratio_scale_{scale:g}": Figure(
                [float(np.median(found))], f"median over the better, at objectives of {scale:g} x alone"
            )
            for scale, found in by_scale.items()
        },
    }
    failed = sum(o.failed for found in outcomes.values() for o in found)
    disturbance = f"{failed} requests failed" if failed else ""
    return BenchResult(rows, figures, notes(chosen, alone, outcomes, rival), disturbance)


def lost(outcome: Outcome) -> str:
    """Refused before their time was up, refused then, answered late."""
    return f"{outcome.refused} / {outcome.expired} / {outcome.late}"


def notes(
    chosen: Setting, alone: tuple[float, float], outcomes: dict[str, list[Outcome]], rival: Rival
) -> list[str]:
    """How it was measured."""
    lags_ms = 1e3 * max(o.lag_s for found in outcomes.values() for o in found)
    device = "emulated DiT-S/2, RTX 4090" if chosen.device == "cpu" else f"{GPU_SHAPE} on {chosen.device}"
    first, last = chosen.steps[0], chosen.steps[-1]
    ways = ", ".join(" ".join(way) for way in chosen.ways)
    sizes = rival.profile.step.batches
    took = ", ".join(f"{b}: {rival.profile.seconds([last] * b):.3f}" for b in sizes)
    return [
        f"{chosen.devices} devices ({device}); {first} to {last} steps, of {len(chosen.steps)} numbers",
        f"alone a request takes {1e3 * alone[0]:.2f} ms a step and {1e3 * alone[1]:.1f} ms beside",
        f"{chosen.seconds:g} s a replay, {chosen.seeds} seeds; sent at most {lags_ms:.1f} ms late (p99)",
        "lost: refused before the objective had passed / refused when it had / answered after it",
        f"ours: the better of {ways}; equal, padded: whole requests, the best of {len(LEASTS)} rules each",
        f"batches of whole requests of {last} steps, s by size: {took}",
        f"the rival reckons with {100 * rival.margin_ratio:.1f} % more (third quartile of what was measured)",
    ]
