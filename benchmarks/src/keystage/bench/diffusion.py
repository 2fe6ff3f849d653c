"""`keystage bench diffusion`: diffusion served step by step, beside request by request (Clockwork-like).

Requests ask for 100 to 125 steps, uniformly: half of the artifact's, each twice as long (`STRETCH`).
Module-level batching puts requests at any step, of any number of steps, into one batch of the denoiser;
request-level batching only those of equal numbers of steps, whole. Both run live on the local platform: same
router, workers, wire, devices, arrivals (gamma, by seed), objectives; both refuse what cannot be in time and
are tried with the same policies. Devices are emulated: modules sleep for the times that the paper's artifact
has for DiT-S/2 on an RTX 4090 (`neustream_models`). With `--device cuda` they are a random-weight DiT of the
ready program `diffusion` on one GPU, 20 to 50 steps.

A request's objective is `scale` times what one with its steps takes alone, step by step, through the whole
system. Offered load is a multiple of what the devices can serve without batching. Goodput counts answers
within their objectives. The paper has up to 5.26 times Clockwork's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from keystage.bench.diffusion_live import Arrivals, Outcome, Serving, System, serving
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
        ways: `KEYSTAGE_BATCHING` and `KEYSTAGE_LATE` that both systems are tried with; the best counts.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One condition; both systems see the same arrivals in it."""

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
        return Setting(device, devices, steps, (4.0,), (3.0,), (8.0,), 8.0, 1, WAYS)
    if full:
        cvs, scales = (1.0, 2.0, 3.0, 4.0), (1.2, 1.5, 2.0, 3.0)
        return Setting(device, devices, steps, cvs, scales, (4.0, 8.0), 40.0, 1, WAYS)
    return Setting(device, devices, steps, (1.0, 4.0), (1.2, 3.0), (8.0,), 30.0, 1, WAYS)


def run(*, quick: bool = False, full: bool = False, device: str = "cpu") -> BenchResult:
    """Runs both systems over all cells.

    Args:
        quick: one cell, 8 s each.
        full: CV 1 to 4, objectives of 1.2 to 3, two loads: an hour and a half.
        device: `cpu`: emulated devices; `cuda`: one GPU.

    Raises:
        BenchError: another device.
    """
    if device != "cpu" and not device.startswith("cuda"):
        raise BenchError(f"--device {device}: cpu (emulated) or cuda")
    chosen = setting(quick=quick, full=full, device=device)
    cells = [
        Cell(*each)
        for each in itertools.product(chosen.cvs, chosen.scales, chosen.loads, range(chosen.seeds))
    ]
    with tempfile.TemporaryDirectory(prefix="bench-diffusion-") as folder:
        alone, outcomes = asyncio.run(_measure(chosen, cells, Path(folder)))
    found = result(chosen, cells, alone, outcomes)
    if not quick:
        on_gpu = device.startswith("cuda")
        name, where = ("diffusion-cuda", "on a GPU") if on_gpu else ("diffusion", "emulated devices")
        write_page(name, f"A diffusion program live, {where}", found)
    return found


def systems(chosen: Setting) -> dict[str, list[System]]:
    """The ways to serve, each with the settings that it is tried in."""
    if chosen.device.startswith("cuda"):
        options: dict[str, Any] = {"shape": GPU_SHAPE, "dtype": "bfloat16", "image": "npy"}
        stepwise = "keystage.streams.programs.diffusion:program", options
        whole: dict[str, Any] = {"steps": list(chosen.steps), "inner": stepwise[0], "inner_options": options}
    else:
        steps_s = [STRETCH * seconds for seconds in DIT_S2.step.seconds]
        times = {"step_s": steps_s, "decoder_s": list(DIT_S2.decoder.seconds)}
        stepwise = "diffusion_programs:stepwise", times
        whole = {"steps": list(chosen.steps), **times}
    return {
        "module": [System("module", *stepwise, *way) for way in chosen.ways],
        "request": [System("request", "diffusion_programs:whole", whole, *way) for way in chosen.ways],
    }


async def _measure(
    chosen: Setting, cells: Sequence[Cell], folder: Path
) -> tuple[tuple[float, float], dict[str, list[Outcome]]]:
    """(seconds a step, seconds beside the steps) of a request alone, and outcomes by system and cell."""
    alone = (0.0, 0.0)
    best: dict[str, list[Outcome]] = {}
    for name, tried in systems(chosen).items():
        for index, system in enumerate(tried):
            home = folder / f"{name}-{index}"
            home.mkdir()
            async with serving(
                system, home, devices=chosen.devices, device=chosen.device, most_batch=MOST_BATCH
            ) as up:
                await _warm_up(up, chosen)
                if name == "module" and index == 0:
                    alone = await _alone(up, chosen)
                found = []
                for cell in cells:
                    found.append(await up.replay(arrivals(chosen, cell, alone)))
                    good, offered = found[-1].good, found[-1].offered
                    print(
                        f"{name} {system.batching}, {cell}: {good} of {offered} good",
                        file=sys.stderr,
                        flush=True,
                    )
            known = best.setdefault(name, found)
            best[name] = [
                max(pair, key=lambda outcome: outcome.good) for pair in zip(known, found, strict=True)
            ]
    return alone, best


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
    )


def _body(chosen: Setting, steps: int, seed: int) -> bytes:
    fields: dict[str, Any] = {"steps": steps}
    if chosen.device.startswith("cuda"):
        fields |= {"prompt": f"picture {seed}", "seed": seed}
    return msgspec.json.encode(fields)


def result(
    chosen: Setting, cells: Sequence[Cell], alone: tuple[float, float], outcomes: dict[str, list[Outcome]]
) -> BenchResult:
    """Rows of every cell, and the ratios.

    Args:
        chosen: what was run.
        cells: in order.
        alone: see `_measure`.
        outcomes: by system, a cell each.
    """
    rows: list[dict[str, Any]] = []
    ratios: dict[float, list[float]] = {}
    for cell, module, request in zip(cells, outcomes["module"], outcomes["request"], strict=True):
        ratio = module.goodput_rps / request.goodput_rps if request.good else float("inf")
        ratios.setdefault(cell.scale, []).append(module.good / max(1, request.good))
        rows.append(
            {
                "CV": cell.cv, "scale": cell.scale, "load": cell.load, "seed": cell.seed,
                "offered": module.offered, "module good": module.good, "request good": request.good,
                "ratio": ratio, "module batch": module.batch, "request batch": request.batch,
                "module refused": module.refused, "request refused": request.refused,
                "module late": module.late, "request late": request.late,
            }
        )  # fmt: skip
    lags_ms = 1e3 * max(o.lag_s for found in outcomes.values() for o in found)
    failed = sum(o.failed for found in outcomes.values() for o in found)
    every = [ratio for found in ratios.values() for ratio in found]
    figures = {
        "best_ratio": Figure(
            [max(every)], "largest goodput over request-level batching's", "paper: up to 5.26"
        ),
        "least_ratio": Figure([min(every)], "smallest of all cells", "at least 1"),
        **{
            f"ratio_scale_{scale:g}": Figure(
                [float(np.median(found))], f"median at objectives of {scale:g} x alone"
            )
            for scale, found in ratios.items()
        },
    }
    device = "emulated DiT-S/2, RTX 4090" if chosen.device == "cpu" else f"{GPU_SHAPE} on {chosen.device}"
    first, last = chosen.steps[0], chosen.steps[-1]
    ways = ", ".join(" ".join(way) for way in chosen.ways)
    notes = [
        f"{chosen.devices} devices ({device}); {first} to {last} steps, of {len(chosen.steps)} numbers",
        f"alone a request takes {1e3 * alone[0]:.2f} ms a step and {1e3 * alone[1]:.1f} ms beside",
        f"{chosen.seconds:g} s a replay, {chosen.seeds} seeds; sent at most {lags_ms:.1f} ms late (p99)",
        f"for each system the better of: {ways}",
    ]
    disturbance = f"{failed} requests failed" if failed else ""
    return BenchResult(rows, figures, notes, disturbance)
