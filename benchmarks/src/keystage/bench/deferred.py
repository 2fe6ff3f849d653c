"""`keystage bench deferred`: goodput of deferred batching on the live platform, beside eager and time-out.

Before it: `keystage bench`. It describes cells (what is served, how many workers, which deadline), lets
`deferred_world` run loads, and searches for each batching's goodput: the highest rate of gamma arrivals at
which 99 % are answered within their deadline. In every step of the search each batching is measured once,
one right after the other, on arrivals of the same seed. Emulated cells take their service times from
Symphony's tables, stretched so that a batch is long beside what two cores need for HTTP; the real cell
computes a BERT.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keystage.batching.profile import LatencyProfile
from keystage.bench.batching_models import Model, staggered
from keystage.bench.deferred_world import Load, Run, Served, opened
from keystage.bench.frame import BenchError, BenchResult, Figure
from keystage.bench.results_page import write_page
from keystage.bundle.api import emulated

GOOD_RATIO = 0.99
CV = 1.2
"""Of the gaps: gamma of shape 0.7, a little burstier than Poisson arrivals."""
LOW, HIGH = 0.2, 1.1
"""Goodput is searched between these parts of the staggered bound (Symphony, equations 1 and 2)."""

LOWER, MORE_STEPS = 0.7, 6
"""What has held nowhere there is tried at so much less, so often."""
TIMEOUT_SHARES = (0.0, 0.15)
"""Time-outs, as parts of a stage's deadline. Of 0: what the papers call eager, which plans by deadlines; the
platform's `eager` does not, and serves all in order of arrival."""
TOKENS = (48, 80)
TOKENS_ON_GPU = (384, 512)
"""Long requests of a large model: with short ones of a small model a GPU would answer more requests a second
than one router passes on, and every batching would reach the same."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One thing to serve.

    Attributes:
        name: in figures.
        words: in tables.
        served: see there.
        bound_rps: staggered bound of one stage.
        batchings: `eager`, the time-outs, `deferred`.
    """

    name: str
    words: str
    served: Served
    bound_rps: float
    batchings: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The goodput of one batching in one round, and the run that showed it."""

    goodput_rps: float
    run: Run | None


def run(*, quick: bool = False, full: bool = False, device: str = "cpu", parts: str = "") -> BenchResult:
    """Measures.

    Args:
        quick: one emulated cell, one round of short runs, no page.
        full: five rounds of long runs instead of two of short ones.
        device: of the real cell: `cpu`, `cuda`, `cuda:N`.
        parts: cells by name, separated by commas; empty: all.

    Raises:
        BenchError: a part that does not exist.
    """
    rounds, steps, seconds = (1, 3, 4.0) if quick else (5, 5, 15.0) if full else (2, 4, 5.0)
    with tempfile.TemporaryDirectory(prefix="keystage-deferred-bundle-") as folder:
        names = ("densenet",) if quick and not parts else tuple(parts.split(",")) if parts else CELLS
        unknown = [name for name in names if name not in CELLS]
        if unknown:
            raise BenchError(f"no part {unknown[0]!r}; there are {', '.join(CELLS)}")
        cells = [_cell(name, Path(folder), device) for name in names]
        if quick:  # one time-out is enough for a look
            cells = [dataclasses.replace(c, batchings=(c.batchings[0], *c.batchings[2:])) for c in cells]
        found = [asyncio.run(_measure(cell, rounds, steps, seconds)) for cell in cells]
    result = _result(cells, found, steps, seconds)
    if not quick and device.startswith("cuda"):
        write_page("deferred-cuda", "Deferred batching, live, on a GPU", result)
    elif not quick and not parts:
        write_page("deferred", "Deferred batching, live", result)
    return result


# ---------------------------------------------------------------- cells

CELLS = ("resnet", "densenet", "densenet-2-stages", "bert")


def _cell(name: str, folder: Path, device: str) -> Cell:
    match name:
        case "resnet":
            return _emulated(
                name, Model("ResNet50 (A100)", LatencyProfile(0.268e-3, 5.172e-3), 0.020), 30, 1, 4
            )
        case "densenet":
            return _emulated(name, _DENSENET, 15, 1, 4)
        case "densenet-2-stages":
            return _emulated(name, _DENSENET, 15, 2, 3)
        case _:
            return _bert(name, folder, device)


_DENSENET = Model("DenseNet121 (1080Ti)", LatencyProfile(1.061e-3, 10.312e-3), 0.029)


def _emulated(name: str, model: Model, stretch: float, stages: int, workers: int) -> Cell:
    """Stages of a published model's service time, `stretch` times as long, its deadline too."""
    profile = LatencyProfile(model.profile.alpha_s * stretch, model.profile.beta_s * stretch)
    slo_s = model.slo_s * stretch
    devices = (f"emulated:alpha={profile.alpha_s:.9g},beta={profile.beta_s:.9g}",) * stages
    pipeline = emulated(name, stages, execution="single-pass", activation_bytes=256)
    served = Served(None, pipeline, devices, workers, slo_s * stages, "raw", (b"x" * 256,))
    bound_rps = staggered(Model(name, profile, slo_s), workers)[1]
    words = f"{model.name} x {stretch:g}, {stages} stage{'s' * (stages > 1)} of {workers} workers"
    return Cell(name, words, served, bound_rps, _batchings(slo_s))


def _bert(name: str, folder: Path, device: str) -> Cell:
    """A real BERT: a small one on a CPU, BERT-large's shape on a GPU; weights drawn by seed.

    On a CPU each of two stages has one worker, which is a core each on two cores: more of them, or a model so
    small that HTTP weighs as much, would measure who gets the cores.
    """
    from keystage.bundle.split import split
    from keystage.bundle.store import load
    from keystage.models.profile import Grid, measure_bundle

    is_gpu = device.startswith("cuda")
    stages, workers = 2, 1
    bundle = split(_random_bert(folder / "model", is_gpu=is_gpu), stages, "uniform", folder / "bundle", name)
    lengths = TOKENS_ON_GPU if is_gpu else TOKENS
    # Items as long as the requests are: a batch of short ones costs another time.
    grid = Grid(batches=(1, 2, 4, 8), item_tokens=sum(lengths) // 2, repeats=5)
    profiles = [m.profile for m in measure_bundle(bundle, device, grid=grid, write=True)]
    slowest = max(profiles, key=lambda profile: profile.alpha_s)
    turns = stages if is_gpu else 1  # stages on one GPU compute in turns
    profile = LatencyProfile(turns * slowest.alpha_s, turns * slowest.beta_s)
    slo_s = 2 * profile.latency_s(8) + 0.05
    rng = np.random.default_rng(3)
    bodies = tuple(
        b'{"input":['
        + ",".join(map(str, rng.integers(1000, 20000, size=rng.integers(*lengths)))).encode()
        + b"]}"
        for _ in range(32)
    )
    served = Served(bundle, load(bundle), (device,) * stages, workers, slo_s * stages, "embeddings", bodies)
    bound_rps = staggered(Model(name, profile, slo_s), workers)[1]
    shape = "BERT-large" if is_gpu else "BERT of 8 layers, 512 wide,"
    words = f"{shape} on {device}, {stages} stages of {workers} worker"
    return Cell(name, words, served, bound_rps, _batchings(slo_s))


def _random_bert(folder: Path, *, is_gpu: bool) -> Path:
    import torch
    from transformers import BertConfig, BertModel

    shape = (1024, 24, 16, 4096) if is_gpu else (512, 8, 8, 2048)
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=30522, hidden_size=shape[0], num_hidden_layers=shape[1], num_attention_heads=shape[2],
        intermediate_size=shape[3], max_position_embeddings=512,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder, safe_serialization=True)
    return folder


def _batchings(slo_s: float) -> tuple[str, ...]:
    return ("eager", *(f"timeout:{1e3 * share * slo_s:.0f}" for share in TIMEOUT_SHARES), "deferred")


# ---------------------------------------------------------------- search


async def _measure(cell: Cell, rounds: int, steps: int, seconds: float) -> dict[str, list[Found]]:
    """Goodput of every batching in every round."""
    found: dict[str, list[Found]] = {batching: [] for batching in cell.batchings}
    async with opened(cell.served, cell.batchings) as world:
        for number in range(rounds):
            for batching, best in (await _round(world.run, cell, number, steps, seconds)).items():
                found[batching].append(best)
    return found


async def _round(
    asked: Callable[[str, Load], Awaitable[Run]], cell: Cell, number: int, steps: int, seconds: float
) -> dict[str, Found]:
    """Bisects for every batching at once, on a logarithmic scale; the order of the batchings rotates.

    What has held at no rate by then is tried at lower ones, so that a ratio to it is one.
    """
    low = dict.fromkeys(cell.batchings, LOW)
    high = dict.fromkeys(cell.batchings, HIGH)
    best: dict[str, Run | None] = dict.fromkeys(cell.batchings)
    for step in range(steps + MORE_STEPS):
        turn = (number + step) % len(cell.batchings)
        for batching in (*cell.batchings[turn:], *cell.batchings[:turn]):
            middle = (low[batching] * high[batching]) ** 0.5
            if step >= steps:
                if best[batching]:
                    continue
                middle = LOWER * high[batching]
            rate_rps = middle * cell.bound_rps
            load = Load(rate_rps, CV, seconds, min(1.0, seconds / 4), 1000 * number + step)
            outcome = await asked(batching, load)
            found = f"{outcome.good_ratio:.3f} good, batches of {outcome.batch:.1f}"
            print(f"{cell.name} {batching}, {rate_rps:.0f}/s: {found}", file=sys.stderr, flush=True)
            if outcome.good_ratio >= GOOD_RATIO:
                low[batching], best[batching] = middle, outcome
            else:
                high[batching] = middle
    return {b: Found(low[b] * cell.bound_rps if best[b] else 0.0, best[b]) for b in cell.batchings}


# ---------------------------------------------------------------- result


def _result(
    cells: Sequence[Cell], found: Sequence[dict[str, list[Found]]], steps: int, seconds: float
) -> BenchResult:
    rows: list[dict[str, Any]] = []
    figures: dict[str, Figure] = {}
    for cell, by_batching in zip(cells, found, strict=True):
        for batching, results in by_batching.items():
            rows.append(_row(cell, batching, results))
        eager, deferred = by_batching["eager"], by_batching["deferred"]
        timeouts = [by_batching[b] for b in cell.batchings if b.startswith("timeout")]
        best = [max(results[i].goodput_rps for results in timeouts) for i in range(len(eager))]
        name = cell.name.replace("-", "_")
        for rival, goodputs_rps, words in (
            ("eager", [found.goodput_rps for found in eager], "eager"),
            ("timeout", best, "the better time-out, 0 (the papers' eager) among them"),
        ):
            figures[f"{name}_deferred_{rival}_ratio"] = Figure(
                [_ratio(d.goodput_rps, r) for d, r in zip(deferred, goodputs_rps, strict=True)],
                f"goodput of deferred over {words}",
                "" if cell.name == "bert" else "above 1",
            )
    return BenchResult(rows, figures, [f"{c.name}: {c.words}" for c in cells] + _notes(steps, seconds))


def _ratio(ours_rps: float, theirs_rps: float) -> float:
    """NaN, which makes the figure none, where the rival had no goodput at the lowest rate tried."""
    return ours_rps / theirs_rps if theirs_rps else math.nan


def _row(cell: Cell, batching: str, results: Sequence[Found]) -> dict[str, Any]:
    runs = [found.run for found in results if found.run is not None]

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values)) if values else 0.0

    return {
        "cell": cell.name,
        "deadline_ms": 1e3 * cell.served.slo_s,
        "batching": batching,
        "goodput_rps": mean([found.goodput_rps for found in results]),
        "of_bound": mean([found.goodput_rps for found in results]) / cell.bound_rps,
        "batch": mean([run.batch for run in runs]),
        "idle": mean([run.idle_ratio for run in runs]),
        "lag_ms": 1e3 * mean([run.lag_s for run in runs]),
    }


def _notes(steps: int, seconds: float) -> list[str]:
    step = (HIGH / LOW) ** (0.5**steps) - 1
    return [
        (
            f"goodput: the highest rate at which {GOOD_RATIO:.0%} are answered within their deadline, from "
            f"the scheduled time of sending to the whole answer, by bisection to {step:.0%}"
        ),
        (
            f"gamma arrivals of CV {CV:.2g} for {seconds:g} s a run; every batching on the same seeds, one "
            "right after the other in one world; all refuse what cannot be in time (KEYSTAGE_LATE=refuse)"
        ),
        "real supervisor, routers, workers, wire and HTTP; profiles are the routers' own fits",
        "batch, idle: mean batch of the first stage and idle part of its replicas at the goodput",
        "eager is the platform's default, in order of arrival; timeout:0 is eager as in the papers",
        "of_bound: over the staggered bound of evenly spaced arrivals (Symphony, equations 1 and 2)",
    ]
