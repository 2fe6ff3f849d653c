"""`keystage bench neustream`: NeuStream's sections 6.2 to 6.5 on emulated devices, beside what it printed.

Stream programs scheduled by the product's own code (partial-SLO batches, Algorithm 2, EFTF order) against
request-level batching (diffusion) and a prefill-first engine (language models, agents). First both sides are
tuned alike, each over as many settings on the same loads and seeds; then every cell is run with what was
found, on other seeds. Emulated time throughout; only the costs of scheduling are measured on this machine.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keystage.bench import neustream_costs, neustream_report
from keystage.bench.frame import BenchResult, Figure, document
from keystage.bench.neustream_cells import (
    CLOCKWORK,
    PARTS,
    SETTINGS,
    TITLES,
    Cell,
    Run,
    Score,
    Setting,
    cells,
    perform_all,
    quick_cells,
)
from keystage.bench.neustream_ratios import Compared, compare, figures, losses, printed_share, row

TUNING_SEED = 9000


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much is run.

    Attributes:
        seeds: of each cell, from 0.
        requests: of a run at CV 1.
        per_cv2: requests of all seeds together per CV squared, where that is more.
        tuning_requests: of a run while tuning.
        tuning_seeds: from `TUNING_SEED`.
        rounds: of the costs.
    """

    seeds: int
    requests: int
    per_cv2: int
    tuning_requests: int
    tuning_seeds: int
    rounds: int

    def of(self, cell: Cell) -> int:
        """Requests of one run of a cell."""
        return max(self.requests, round(self.per_cv2 * cell.cv**2 / self.seeds))


QUICK = Size(2, 150, 0, 60, 1, 3)
SHORT = Size(5, 500, 2000, 200, 2, 7)
FULL = Size(10, 1000, 4000, 400, 4, 15)


def run(*, quick: bool = False, full: bool = False, out: Path = Path("out")) -> BenchResult:
    """Runs the experiment and, unless quick, writes the page of results.

    Args:
        quick: a look: four loads a program, two seeds.
        full: more seeds, all objectives and CVs.
        out: where the page goes when this is a look or no checkout.
    """
    begun_s = time.monotonic()
    size = FULL if full else QUICK if quick else SHORT
    processes = max(1, min(8, len(os.sched_getaffinity(0))))
    costs = neustream_costs.measure(size.rounds)
    settings = tune(size, processes)
    plan = [
        Run(cell, system, settings[part, system], size.of(cell), seed)
        for part in PARTS
        for cell in (quick_cells(part) if quick else cells(part, full=full))
        for system in SETTINGS[part]
        for seed in range(size.seeds)
    ]
    scores = perform_all(plan, processes, "cells")
    compared = compare(scores)
    found = figures(compared) | batch_figures(compared) | cost_figures(costs)
    wall_s = time.monotonic() - begun_s
    notes = [*_method(size), *_tuned(settings), *agreement(compared)]
    lost = losses(compared)
    notes += lost or ["no cell in which a rival serves more"]
    notes.append(f"{len(plan)} runs of cells in {wall_s:.0f} s on {processes} processes")
    rows = [row(one) for one in compared]
    result = BenchResult(_aligned(rows), found, notes)
    folder = neustream_report.FOLDER
    neustream_report.write(
        out if quick or not folder.parent.is_dir() else folder,
        document("neustream", result) | {"scores": _kept(scores)},
        _by_part(compared),
    )
    return result


def tune(size: Size, processes: int) -> dict[tuple[str, str], Setting]:
    """The setting of each system with the highest mean share of good requests over the look's loads."""
    runs = [
        Run(cell, system, setting, size.tuning_requests, TUNING_SEED + seed)
        for part in PARTS
        for cell in quick_cells(part)
        for system, options in SETTINGS[part].items()
        for setting in options
        for seed in range(size.tuning_seeds)
    ]
    shares: dict[tuple[str, str, Setting], list[float]] = {}
    for score in perform_all(runs, processes, "tuning"):
        key = score.run.cell.part, score.run.system, score.run.setting
        shares.setdefault(key, []).append(score.good / score.offered)
    return {
        (part, system): max(options, key=lambda s: sum(shares[part, system, s]))
        for part in PARTS
        for system, options in SETTINGS[part].items()
    }


def batch_figures(compared: Sequence[Compared]) -> dict[str, Figure]:
    """Section 6.2, batching efficiency: mean batch of DiT-S/2's steps over Clockwork's batches."""
    found = {}
    for name, is_fixed, paper in (("s2_batch_ratio", False, 5.35), ("s2_equal_batch_ratio", True, 1.67)):
        mine = [one for one in compared if one.cell.part == "s2" and one.cell.is_fixed == is_fixed]
        if mine:
            one = mine[0] if is_fixed else max(mine, key=lambda c: c.cell.rate_rps)
            pairs = zip(one.ours, one.theirs[CLOCKWORK], strict=True)
            words = "all of equal steps" if is_fixed else f"{one.cell.rate_rps:g} req/s"
            found[name] = Figure(
                [a.batch / b.batch for a, b in pairs],
                f"mean batch of DiT-S/2, ours over clockwork, {words}",
                f"the paper's {paper}",
            )
    return found


def cost_figures(costs: neustream_costs.Costs) -> dict[str, Figure]:
    """Section 6.5: what scheduling costs."""
    return {
        "step_decision_ratio": Figure(
            costs.step_ratio, "deciding a denoising step of 20 over its time", "the paper's 0.0102"
        ),
        "decode_decision_ratio": Figure(
            costs.decode_ratio, "deciding a decode step of 32 over its time", "the paper's 0.0195"
        ),
        "eftf_turn_us": Figure([1e6 * s for s in costs.turn_s], "one batch through the EFTF order, us"),
        "lookup_us": Figure([1e6 * s for s in costs.lookup_s], "two look-ups in a table of 20 points, us"),
        "allocate_ms": Figure([1e3 * s for s in costs.allocate_s], "Algorithm 2, 7 modules, 8 devices, ms"),
    }


def _method(size: Size) -> list[str]:
    last = TUNING_SEED + size.tuning_seeds - 1
    return [
        (
            "profiles: seconds per batch that the paper's authors measured and published with their "
            "artifact (RTX 4090, A6000); emulated devices take exactly these; batches that run at once share "
            "the rate in proportion to SPUs; switching and moving cost nothing on either side"
        ),
        (
            "in time: a diffusion request within SLO x its time alone; a language request whose last token "
            "is there by the first token's objective (3 x, agents 2 x its prefill alone) + SLO x its decode "
            "steps alone: the decode goodput of the paper's own evaluation; in a chain, at every agent"
        ),
        (
            "clockwork batches whole requests of equal steps; padded batches any and lets all stay till the "
            "longest is done; prefill-first prefills what fits the KV pool, decodes all otherwise, puts the "
            "youngest back when the pool is full, refuses nobody (untuned: with the paper's limits); ours "
            "refuses who cannot be in time"
        ),
        (
            "lengths are assumptions where the paper prints none: OPT prompts of 127 tokens in the mean, "
            "three answers of four 300 long, the others from 50 on; agents: prompts of 700, answers of 150 "
            "to 700; agents on one GPU keep the KV room that each has on its own"
        ),
        (
            f"seeds 0 to {size.seeds - 1}, tuning on {TUNING_SEED} to {last}, {size.requests} requests a "
            f"run, at higher CV {size.per_cv2:,} CV^2 over all seeds; ratios are geometric means with 95 % "
            "Student intervals over seeds; whoever served nobody counts as having served one request"
        ),
    ]


def _tuned(settings: Mapping[tuple[str, str], Setting]) -> list[str]:
    return [
        f"{TITLES[part]} tuned: "
        + ", ".join(
            f"{system} ({settings[part, system][0]:g}, {settings[part, system][1]:g}) of {len(options)}"
            for system, options in SETTINGS[part].items()
        )
        for part in PARTS
    ]


def agreement(compared: Sequence[Compared]) -> list[str]:
    """How far the emulated Clockwork is from the published logs of the paper's."""
    gaps = [
        one.share(CLOCKWORK) - printed
        for one in compared
        if CLOCKWORK in one.theirs and (printed := printed_share(one.cell)) is not None
    ]
    if not gaps:
        return []
    mean = sum(gaps) / len(gaps)
    return [
        (
            f"the emulated clockwork serves {mean:+.1%} of the requests more than in the paper's published "
            f"logs, mean over {len(gaps)} loads; {min(gaps):+.1%} to {max(gaps):+.1%}"
        )
    ]


def _aligned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the same columns."""
    columns = list(dict.fromkeys(column for one in rows for column in one))
    return [{column: one.get(column, "") for column in columns} for one in rows]


def _by_part(compared: Sequence[Compared]) -> dict[str, list[dict[str, Any]]]:
    return {
        TITLES[part]: _aligned([row(one) for one in compared if one.cell.part == part])
        for part in PARTS
        if any(one.cell.part == part for one in compared)
    }


_COLUMNS = (
    "part", "rate_rps", "cv", "scale", "is_fixed", "system", "seed", "requests", "offered", "good", "strict",
    "batch",
)  # fmt: skip


def _kept(scores: Sequence[Score]) -> dict[str, Any]:
    """Every score, in as little space as it takes."""
    rows = [
        [
            *dataclasses.astuple(score.run.cell), score.run.system, score.run.seed, score.run.requests,
            score.offered, score.good, score.strict, round(score.batch, 3),
        ]
        for score in scores
    ]  # fmt: skip
    return {"columns": _COLUMNS, "rows": rows}
