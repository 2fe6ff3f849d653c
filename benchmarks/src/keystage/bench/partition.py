"""`keystage bench partition`: dividing models over sub-clusters (Symphony, appendix A.2 and Figure 16).

Before it: nothing; the models are drawn here. After it: the frame, and `benchmarks/results/partition.md`.
Two sizes, 400 models over 4 sub-clusters and 800 over 20; each seed draws models of Tables 3 and 4 with
replacement (variants of one network), rates from an exponential law as the paper does. Memory is not in the
paper: parameters are counted as Keras Applications lists them, at 4 bytes; dynamic memory is drawn. The rival
is the paper's: random divisions for the same time, the best of those within all bounds. Then rates drift, and
the division is made anew with a bound on what is loaded and unloaded.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from keystage.batching.partition import LIMIT_S, partition
from keystage.batching.partition_problem import (
    Bounds,
    Division,
    Problem,
    SharedModel,
    division,
    imbalance_ratio,
    totals,
    violations,
)
from keystage.bench.frame import BenchResult, Figure
from keystage.bench.results_page import write_page

SIZES = ((400, 4), (800, 20))
SLACK_RATIO = 1.6
"""Bounds over the means; tighter ones are met by no random division."""
MOVED_RATIO = 0.05
"""Of all parameter bytes, what may be loaded and unloaded when rates have drifted."""
DRIFT = 0.5
"""Sigma of the lognormal factor on each model's rate."""

MILLION_PARAMETERS = {
    "NASNetMobile": 5.3, "MobileNetV3Small": 2.9, "DenseNet169": 14.3, "DenseNet121": 8.1,
    "DenseNet201": 20.2, "EfficientNetV2B0": 7.2, "MobileNetV3Large": 5.4, "InceptionV3": 23.9,
    "EfficientNetV2B1": 8.2, "ResNet50V2": 25.6, "ResNet152V2": 60.4, "ResNet101V2": 44.7,
    "InceptionResNetV2": 55.9, "EfficientNetB0": 5.3, "MobileNetV2": 3.5, "ResNet101": 44.7,
    "EfficientNetB1": 7.9, "ResNet50": 25.6, "EfficientNetV2B2": 10.2, "VGG19": 143.7, "ResNet152": 60.4,
    "MobileNet": 4.3, "VGG16": 138.4, "EfficientNetB2": 9.2, "EfficientNetV2B3": 14.5, "NASNetLarge": 88.9,
    "EfficientNetV2S": 21.6, "EfficientNetB3": 12.3, "EfficientNetV2L": 119.0, "EfficientNetV2M": 54.4,
    "EfficientNetB5": 30.6, "Xception": 22.9, "SSDMobilenet": 6.8, "EfficientNetB4": 19.5,
    "EfficientNetB6": 43.3, "EfficientNetB7": 66.7, "BERT": 110.0,
}  # fmt: skip
"""Parameters of the networks of Tables 3 and 4, in millions (Keras Applications; BERT base)."""


def draw(count: int, clusters: int, seed: int) -> Problem:
    """A problem of one configuration."""
    random = np.random.default_rng([seed, count])
    names = random.choice(list(MILLION_PARAMETERS), count)
    rates = random.exponential(100.0, count)
    dynamic = random.uniform(50e6, 400e6, count)
    models = [
        SharedModel(f"{name}-{i}", float(rates[i]), 4e6 * MILLION_PARAMETERS[str(name)], float(dynamic[i]))
        for i, name in enumerate(names)
    ]
    return Problem(models, _bounds(models, clusters))


def drifted(problem: Problem, now: Division, seed: int) -> Problem:
    """The same models at other rates, with the division that is in force and a bound on leaving it."""
    random = np.random.default_rng([seed, 1])
    factors = random.lognormal(0.0, DRIFT, len(problem.models))
    models = [
        SharedModel(m.name, m.rate_rps * float(f), m.static_bytes, m.dynamic_bytes)
        for m, f in zip(problem.models, factors, strict=True)
    ]
    clusters = problem.bounds.sub_clusters
    most = 2 * MOVED_RATIO * sum(m.static_bytes for m in models)
    costs = [[m.static_bytes] * clusters for m in models]
    return Problem(models, _bounds(models, clusters, most), current=now.assigned, costs=costs)


def _bounds(models: list[SharedModel], clusters: int, disruption: float = float("inf")) -> Bounds:
    rate = SLACK_RATIO * sum(m.rate_rps for m in models) / clusters
    memory = SLACK_RATIO * sum(m.static_bytes for m in models) / clusters
    return Bounds(clusters, rate, memory + max(m.dynamic_bytes for m in models), disruption)


def random_search(problem: Problem, seconds: float, seed: int) -> tuple[Division | None, int]:
    """The paper's baseline: the best random division within all bounds, and how many were drawn."""
    random = np.random.default_rng([seed, 2])
    rate = np.array([m.rate_rps for m in problem.models])
    static = np.array([m.static_bytes for m in problem.models])
    dynamic = max(m.dynamic_bytes for m in problem.models)
    clusters, bounds = problem.bounds.sub_clusters, problem.bounds
    best: npt.NDArray[np.int64] | None = None
    best_value, drawn, end_s = np.inf, 0, time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        many = random.integers(0, clusters, (64, len(rate)))
        drawn += len(many)
        flat = (many + clusters * np.arange(len(many))[:, None]).ravel()
        shape = (len(many), clusters)
        rates = np.bincount(flat, np.tile(rate, len(many)), shape[0] * shape[1]).reshape(shape)
        memories = np.bincount(flat, np.tile(static, len(many)), shape[0] * shape[1]).reshape(shape)
        fits = (rates.max(axis=1) <= bounds.rate_rps) & (
            memories.max(axis=1) + dynamic <= bounds.memory_bytes
        )
        mean_rate, mean_static = rate.sum() / clusters, static.sum() / clusters
        value = np.abs(rates / mean_rate - 1).max(axis=1) + np.abs(memories / mean_static - 1).max(axis=1)
        value[~fits] = np.inf
        k = int(np.argmin(value))
        if value[k] < best_value:
            best_value, best = float(value[k]), many[k].copy()
    return (division(problem, best.tolist(), "random", 0.0) if best is not None else None), drawn


def run(*, quick: bool = False, full: bool = False) -> BenchResult:
    """Divides, beside random search, and divides anew after a drift.

    Args:
        quick: 1 configuration a size and 2 s for each.
        full: 30 configurations a size instead of 5.
    """
    seeds = range(1 if quick else 30 if full else 5)
    limit_s = 2.0 if quick else LIMIT_S
    rows: list[dict[str, Any]] = []
    samples: dict[str, list[float]] = {}
    for count, clusters in SIZES:
        for seed in seeds:
            row = _one(count, clusters, seed, limit_s)
            rows.append(row)
            for key in ("load", "memory", "random_load", "random_memory", "seconds", "again_load"):
                value = row[key]
                samples.setdefault(f"{key}_{count}x{clusters}", []).append(value)
            samples.setdefault("used_of_bound", []).append(row["moved_of_bound"])
            samples.setdefault(f"vs_random_{count}x{clusters}", []).append(
                max(row["load"] / row["random_load"], row["memory"] / row["random_memory"])
            )
    result = BenchResult(rows, _figures(samples), _NOTES)
    if not quick:
        write_page("partition", "Dividing models over sub-clusters", result)
    return result


def _one(count: int, clusters: int, seed: int, limit_s: float) -> dict[str, Any]:
    """One configuration: divided, beside random search, then divided anew."""
    problem = draw(count, clusters, seed)
    begin_s = time.perf_counter()
    ours = partition(problem, time.perf_counter, limit_s=limit_s)
    seconds = time.perf_counter() - begin_s
    rival, drawn = random_search(problem, limit_s, seed)
    later = drifted(problem, ours, seed)
    before_load, _, _ = totals(later, ours.assigned)
    begin_s = time.perf_counter()
    again = partition(later, time.perf_counter, limit_s=limit_s)
    again_s = time.perf_counter() - begin_s
    assert not violations(problem, ours.assigned)
    assert not violations(later, again.assigned)
    return {
        "models": count,
        "sub_clusters": clusters,
        "seed": seed,
        "load": ours.rate_imbalance_ratio,
        "memory": ours.memory_imbalance_ratio,
        "status": ours.status,
        "seconds": seconds,
        "random_load": rival.rate_imbalance_ratio if rival else float("inf"),
        "random_memory": rival.memory_imbalance_ratio if rival else float("inf"),
        "drawn": drawn,
        "drifted_load": imbalance_ratio(before_load),
        "again_load": again.rate_imbalance_ratio,
        "again_memory": again.memory_imbalance_ratio,
        "moved": again.moved,
        "moved_of_bound": again.disruption / later.bounds.disruption,
        "again_status": again.status,
        "again_s": again_s,
    }


def _figures(samples: dict[str, list[float]]) -> dict[str, Figure]:
    """Figures by size; spread over configurations is not noise, so it does not fail the run."""
    wide = float("inf")
    made: dict[str, Figure] = {}
    for count, clusters in SIZES:
        size = f"{count}x{clusters}"
        made |= {
            f"load_imbalance_{size}": Figure(
                samples[f"load_{size}"], "(max - min) / mean of requests/s", "below random search", wide
            ),
            f"memory_imbalance_{size}": Figure(
                samples[f"memory_{size}"], "(max - min) / mean of static memory", "below random search", wide
            ),
            f"vs_random_{size}": Figure(
                samples[f"vs_random_{size}"], "the worse of both over random search's", "at most 0.1", wide
            ),
            f"again_load_imbalance_{size}": Figure(
                samples[f"again_load_{size}"], "the same after a drift, moves bounded", "", wide
            ),
            f"seconds_{size}": Figure(samples[f"seconds_{size}"], "until an answer", "at most 10", wide),
        }
    made["disruption_of_bound"] = Figure(
        samples["used_of_bound"], "moves over their bound", "at most 1", wide
    )
    return made


_NOTES = [
    "random search: uniform divisions for the same limit, the best within all bounds (appendix A.2)",
    "status: `gap` is within a thousandth of the mean of what is possible, `optimal` is proven",
    f"after a drift (lognormal, sigma {DRIFT}) at most {MOVED_RATIO:.0%} of the bytes may move",
    "the paper's Figure 16 shows curves without numbers, so there is no figure of it to set beside",
]
