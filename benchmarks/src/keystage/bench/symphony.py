"""`keystage bench symphony`: Symphony's sections 5.1, 5.2, 5.3 and 5.7 remade on emulated GPUs.

Before it: nothing. After it: the frame, and `benchmarks/results/symphony.md` with one table a section, our
ratios beside the paper's. Every search is a process of its own, as many at once as there are cores; time is
emulated, so neither the machine nor its load changes a number. Rivals are ours (`keystage.batching.rivals`),
each with choices in its favour, so ratios below the paper's are to be expected.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeAlias, TypeVar

import numpy as np

from keystage.bench.frame import BenchResult, Figure
from keystage.bench.results_page import FOLDER, write_page
from keystage.bench.symphony_changing import Changing, course, draw
from keystage.bench.symphony_changing import rows as course_rows
from keystage.bench.symphony_fewest import RATE_RPS, Asked, fewest, mixed, single
from keystage.bench.symphony_goodput import SETS, Cell, resnets, search, zoo
from keystage.bench.symphony_systems import OURS, RIVALS, SYSTEMS

WIDE = float("inf")

PAPER_GOODPUT = {
    ("1080Ti", "mixed"): "2.0 to 2.4 (both GPUs)",
    ("A100", "mixed"): "2.0 to 2.4 (both GPUs)",
    ("1080Ti", "strong"): "3.5",
    ("A100", "strong"): "5.7",
    ("1080Ti", "weak"): "1.23",
    ("A100", "weak"): "1.10",
}
"""Section 5.1, Symphony over the baselines."""

PAPER_FEWEST = {
    ("ResNet50 25 ms", "shepherd"): "2 to 6 more than ours",
    ("ResNet50 25 ms", "nexus"): "2 to 6 more than ours",
    ("ResNet50 25 ms", "clockwork"): "more than double",
    ("37 models", "shepherd"): "1.90 of ours",
    ("37 models", "nexus"): "2.66 of ours",
    ("37 models", "clockwork"): "none",
}
"""Section 5.2."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much is run.

    Attributes:
        seeds: of every cell of 5.1 to 5.3.
        courses: seeds of 5.7.
        each: requests of the rarest model in a run, at least.
        gpus: of 5.1.
        slos_ms: of 5.3.
        seconds: of 5.7.
        replicas: of 5.7.
    """

    seeds: int
    courses: int
    each: int
    gpus: Sequence[str]
    slos_ms: Sequence[float]
    seconds: int
    replicas: int


QUICK = Size(1, 1, 100, ("1080Ti",), (25,), 20, 32)
DEFAULT = Size(2, 1, 300, ("1080Ti", "A100"), (15, 25, 50, 100), 60, 512)
FULL = Size(5, 3, 1000, ("1080Ti", "A100"), (15, 20, 25, 30, 40, 50, 70, 100), 300, 512)

POPULARITY = {"equal": 0.0, "Zipf 0.9": 0.9}
ARRIVALS = {"Poisson": 1.0, "Gamma 0.05": 0.05}


def run(*, quick: bool = False, full: bool = False) -> BenchResult:
    """Remakes the four sections.

    Args:
        quick: one seed, one GPU, one SLO, 32 GPUs under changing load.
        full: five seeds, eight SLOs, five minutes of changing load.
    """
    size = QUICK if quick else FULL if full else DEFAULT
    with ProcessPoolExecutor(os.cpu_count() or 1, multiprocessing.get_context("spawn")) as pool:
        goodputs = _by_tag(_mapped(pool, search, _mixed_cells(size)))
        fewests = _by_tag(_mapped(pool, fewest, _asked(size)))
        qualities = _by_tag(_mapped(pool, search, _quality_cells(size)))
        runs = _mapped(pool, course, _changing(size))
    changing = [row for asked, seconds in runs for row in course_rows(asked, seconds)]
    tables = {
        "5.1 Goodput on 64 GPUs (Figure 9)": _goodputs(goodputs),
        f"5.2 Fewest GPUs for {RATE_RPS:,.0f} requests/s (Figure 10)": _fewests(fewests),
        "5.3 SLO, popularity and arrivals (Figure 11): 20 ResNet50, 32 GPUs": _qualities(qualities),
        f"5.7 Changing load on {size.replicas} GPUs (Figure 15)": changing,
    }
    rows = [{"section": name[:3], "what": _words(row)} for name, table in tables.items() for row in table]
    result = BenchResult(rows, _figures(goodputs, fewests, qualities, changing), _NOTES)
    if not quick:
        draw(runs[:2], FOLDER / "symphony-changing.png")
        write_page(
            "symphony", "Symphony, sections 5.1 to 5.3 and 5.7", result,
            tables=tables, pictures=("symphony-changing.png",),
        )  # fmt: skip
    return result


def _mapped(
    pool: ProcessPoolExecutor, work: Callable[[_In], _Out], asked: Sequence[_In]
) -> list[tuple[_In, _Out]]:
    """Every piece of work with its answer, in order; the pool takes them one by one."""
    return list(zip(asked, pool.map(work, asked), strict=True))


def _mixed_cells(size: Size) -> list[Cell]:
    return [
        Cell(name, zoo(gpu, kind), 64, 0.0, 1.0, seed, size.each, f"{gpu} {kind}")
        for gpu in size.gpus for kind in SETS for name in SYSTEMS for seed in range(size.seeds)
    ]  # fmt: skip


def _quality_cells(size: Size) -> list[Cell]:
    return [
        Cell(name, resnets(slo / 1e3), 32, zipf, shape, seed, size.each, f"{slo:g}|{popular}|{arrivals}")
        for slo in size.slos_ms
        for popular, zipf in POPULARITY.items()
        for arrivals, shape in ARRIVALS.items()
        for name in SYSTEMS
        for seed in range(size.seeds)
    ]


def _asked(size: Size) -> list[Asked]:
    return [
        Asked(name, models, seed, size.each, tag)
        for tag, models in (("ResNet50 25 ms", single()), ("37 models", mixed()))
        for name in SYSTEMS
        for seed in range(size.seeds)
    ]


def _changing(size: Size) -> list[Changing]:
    return [
        Changing(size.replicas, size.seconds, follows, seed)
        for seed in range(size.courses)
        for follows in (False, True)
    ]


Table: TypeAlias = dict[str, dict[str, list[Any]]]
"""Answers by what was asked and system, in order of the seeds."""


def _by_tag(found: Iterable[tuple[Any, Any]]) -> Table:
    table: Table = {}
    for asked, answer in found:
        table.setdefault(asked.tag, {}).setdefault(asked.name, []).append(answer)
    return table


def _goodputs(found: Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for tag, systems in found.items():
        gpu, kind = tag.split()
        ratios = {name: _ratios(systems, name) for name in RIVALS}
        rows.append(
            {"gpu": gpu, "models": kind}
            | {f"{name}_rps": float(np.mean(systems[name])) for name in SYSTEMS}
            | {f"over_{name}": _interval(ratios[name]) for name in RIVALS}
            | {"paper": PAPER_GOODPUT[gpu, kind]}
        )
    return rows


def _qualities(found: Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for tag, systems in found.items():
        slo, popular, arrivals = tag.split("|")
        rows.append(
            {"slo_ms": float(slo), "popularity": popular, "arrivals": arrivals}
            | {f"{name}_rps": float(np.mean(systems[name])) for name in SYSTEMS}
            | {f"over_{name}": _interval(_ratios(systems, name)) for name in RIVALS}
        )
    return rows


def _fewests(found: Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for tag, systems in found.items():
        ours = float(np.mean([n for n in systems[OURS] if n is not None]))
        for name, numbers in systems.items():
            told = [n for n in numbers if n is not None]
            rows.append(
                {
                    "models": tag,
                    "system": name,
                    "gpus": _interval([float(n) for n in told]) if told else "none",
                    "of_ours": float(np.mean(told)) / ours if told else "none",
                    "paper": PAPER_FEWEST.get((tag, name), ""),
                }
            )
    return rows


def _ratios(systems: dict[str, list[float]], name: str) -> list[float]:
    """Ours over a rival's, seed by seed (the same arrivals)."""
    return [a / b if b else WIDE for a, b in zip(systems[OURS], systems[name], strict=True)]


def _interval(samples: Sequence[float]) -> str:
    """Mean and 95 % interval over the seeds (Student's t); with one seed the value."""
    if not np.isfinite(samples).all():
        return "no goodput of its own"
    mean = float(np.mean(samples))
    if len(samples) < 2:
        return f"{mean:.4g}"
    from scipy.stats import t

    half = float(t.ppf(0.975, len(samples) - 1) * np.std(samples, ddof=1) / len(samples) ** 0.5)
    return f"{mean:.4g} ± {half:.2g}"


def _figures(
    goodputs: Table, fewests: Table, qualities: Table, changing: list[dict[str, Any]]
) -> dict[str, Figure]:
    made: dict[str, Figure] = {}
    for tag, systems in goodputs.items():
        gpu, kind = tag.split()
        paper = f"paper, over each: {PAPER_GOODPUT[gpu, kind]}"
        made[f"goodput_{gpu.lower()}_{kind}"] = Figure(
            _over_best(systems), "ours over the best rival", paper, WIDE
        )
        for name in ("nexus", "shepherd"):
            key = f"goodput_{gpu.lower()}_{kind}_over_{name}"
            made[key] = Figure(_ratios(systems, name), f"ours over {name}", paper, WIDE)
    for tag, systems in fewests.items():
        for name in ("shepherd", "nexus"):
            both = zip(systems[name], systems[OURS], strict=True)
            samples = [rival / own if rival and own else WIDE for rival, own in both]
            paper = f"paper {PAPER_FEWEST[tag, name]}"
            key = f"fewest_{tag.split()[0].lower()}_{name}"
            made[key] = Figure(samples, f"GPUs of {name} over ours", paper, WIDE)
    every = [ratio for systems in qualities.values() for ratio in _over_best(systems)]
    made["quality_over_best"] = Figure(every, "5.3: ours over the best rival, all cells", "", WIDE)
    for advice in ("written down", "followed"):
        calm = [r["bad_ratio"] for r in changing if r["advice"] == advice and r["part"] == "before the surge"]
        key = f"changing_bad_ratio_{advice.split()[0]}"
        made[key] = Figure(calm, "5.7: bad rate before the surge", "at most 0.01", WIDE)
    # A rival that serves nothing within the objective has no ratio.
    return {key: figure for key, figure in made.items() if np.isfinite(figure.samples).all()}


def _over_best(systems: dict[str, list[float]]) -> list[float]:
    """Ours over the best rival, seed by seed."""
    best = [max(numbers) for numbers in zip(*(systems[name] for name in RIVALS), strict=True)]
    return [own / rival if rival else WIDE for own, rival in zip(systems[OURS], best, strict=True)]


def _words(row: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())


_NOTES = [
    "emulated GPUs take exactly l(b); goodput: no model has more than 1 % bad requests; Poisson by default",
    "eager and our Clockwork choose alike (the most urgent model first), so their rows are equal",
    "intervals: 95 %, Student's t over seeds; ratios are paired by seed (the same arrivals)",
    "5.3 takes the ResNet50 of Table 2 twenty times; the paper says only that profiles are similar to it",
    "5.7: rates are synthesised (a wave and noise a model, one surge for all); the paper's are of videos",
    "the paper's figures 9 to 11 and 15 are drawn, not printed: what its text says stands beside ours",
]
