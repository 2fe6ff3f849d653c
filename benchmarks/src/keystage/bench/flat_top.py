"""`keystage bench flat-top`: Symphony's Figures 2 and 14 remade: overload, light load, and network delay.

Before it: nothing. After it: the frame, and in `benchmarks/results` a page and two pictures. Figure 2's
set-up: ten ResNets with an objective of 100 ms on 24 GPUs (the ResNet50 of Table 2; the paper does not say
which, and its axis of 0 to 30,000 requests/s fits this one), Poisson arrivals, emulated. The rate with at
most 1 % bad is found once by binary search; then the load goes from 0 to twice that. A flat top is (section
3.5): above the peak goodput p a bad rate of (o - p) / o, below p an idle fraction of (p - o) / p. The paper
has no rule for p; here it is the highest goodput at any load, since what serves more than p above it would
count as far from the top as what serves less. The distances with the searched rate as p are told as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keystage.bench import batching_arrivals as laws
from keystage.bench.batching_cluster import RunLength, Served, goodput, serve
from keystage.bench.batching_models import TABLE_2, Model, capacity_rps
from keystage.bench.flat_top_network import BENDS, bends, hop_tail
from keystage.bench.flat_top_plot import draw_bends, draw_top
from keystage.bench.frame import BenchResult, Figure
from keystage.bench.results_page import FOLDER, write_page
from keystage.bench.symphony_systems import OURS, SYSTEMS, system

REPLICAS = 24
COUNT = 10
SLO_S = 0.1
WIDE = float("inf")


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much is run.

    Attributes:
        loads: offered over the searched rate.
        seconds: window of each run, emulated.
        seeds: runs of our own system; rivals run once.
        slos_s: objectives of Figure 14.
    """

    loads: Sequence[float]
    seconds: float
    seeds: int
    slos_s: Sequence[float]


QUICK = Size((0.3, 0.9, 1.5), 1.0, 1, (0.025,))
DEFAULT = Size(tuple(k / 10 for k in (1, 3, 5, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20)), 3.0, 3, (0.025, 0.1))
FULL = Size(tuple(k / 20 for k in range(1, 41)), 10.0, 5, (0.02, 0.025, 0.05, 0.1))


def resnets() -> list[Model]:
    """The models of Figure 2."""
    return [dataclasses.replace(TABLE_2[0].model, name=f"ResNet50-{i}", slo_s=SLO_S) for i in range(COUNT)]


def searched_rps(models: Sequence[Model], seed: int, requests: int = 80_000) -> float:
    """The highest rate with at most 1 % bad, all models alike, from runs of so many requests.

    With 20,000 it scatters by 1 %.
    """
    shares = [1 / len(models)] * len(models)
    most = capacity_rps(models, shares, REPLICAS)
    found = goodput(
        system(OURS, models, shares),
        models,
        lambda rate, seconds, drawn: laws.arrivals([rate / len(models)] * len(models), seconds, drawn),
        REPLICAS,
        most_rps=most,
        seed=seed,
        pooled=True,
        length=RunLength(requests=requests),
        tolerance_ratio=0.002,
    )
    return found.rate_rps


def offered(name: str, models: Sequence[Model], rate_rps: float, seconds: float, seed: int) -> Served:
    """One run of a system at a load."""
    shares = [1 / len(models)] * len(models)
    warm_s = 5 * SLO_S
    drawn = laws.arrivals([rate_rps / len(models)] * len(models), warm_s + seconds, seed)
    make = functools.partial(system(name, models, shares), rate_rps)
    return serve(make, models, drawn, REPLICAS, seconds=warm_s + seconds, warm_s=warm_s)


def run(*, quick: bool = False, full: bool = False, out: Path = Path("out")) -> BenchResult:
    """Loads from 0 to twice the peak, and goodput over network delay.

    Args:
        quick: three loads, one second each.
        full: 40 loads, ten seconds each, five seeds.
        out: folder with `bench-hop.json`, if `bench hop` was run before.
    """
    size = QUICK if quick else FULL if full else DEFAULT
    models = resnets()
    requests = 20_000 if quick else 80_000
    searched = [searched_rps(models, seed, requests) for seed in range(size.seeds)]
    rate = float(np.median(searched))
    rows: list[dict[str, Any]] = []
    for load in size.loads:
        for name in SYSTEMS:
            for seed in range(size.seeds if name == OURS else 1):
                served = offered(name, models, load * rate, size.seconds, 100 + seed)
                rows.append(_row(name, load, seed, served))
    peak = _peak(rows)
    for row in rows:
        row["ideal_bad_ratio"] = max(0.0, 1 - peak / row["offered_rps"])
        row["ideal_idle_ratio"] = max(0.0, 1 - row["offered_rps"] / peak)
    tail = hop_tail(out, quick=quick)
    network = bends(size.slos_s, tail, quick=quick)
    result = BenchResult(rows, _figures(searched, rows, network), _notes(peak, rate, tail.source))
    if not quick:
        draw_top(rows, peak, FOLDER / "flat-top.png")
        draw_bends(network, tail, FOLDER / "flat-top-network.png")
        write_page(
            "flat-top",
            "Flat top and network delay",
            result,
            tables={"Load (Figure 2)": rows, "Network delay (Figure 14)": network},
            pictures=("flat-top.png", "flat-top-network.png"),
        )
    return result


def _peak(rows: Sequence[Mapping[str, Any]]) -> float:
    """p: the highest of our goodputs at any load, each the median over the seeds."""
    mine: dict[float, list[float]] = {}
    for row in rows:
        if row["system"] == OURS:
            mine.setdefault(row["load"], []).append(row["goodput_rps"])
    return max(float(np.median(found)) for found in mine.values())


def _gaps(rows: Sequence[Mapping[str, Any]], peak: float) -> tuple[list[float], list[float]]:
    """Points (of 100) from the flat top: of our bad rates above the peak, of our idle fractions below it."""
    bad, idle = [], []
    for row in rows:
        rate = row["offered_rps"]
        if row["system"] == OURS and rate >= peak:
            bad.append(100 * (row["bad_ratio"] - (rate - peak) / rate))
        elif row["system"] == OURS:
            idle.append(100 * (row["idle_ratio"] - (peak - rate) / peak))
    return bad, idle


def _row(name: str, load: float, seed: int, served: Served) -> dict[str, Any]:
    return {
        "system": name,
        "load": load,
        "seed": seed,
        "offered_rps": float(served.offered.sum()) / served.seconds,
        "goodput_rps": served.goodput_rps,
        "bad_ratio": served.bad_ratio,
        "ideal_bad_ratio": 0.0,
        "idle_ratio": served.idle_ratio,
        "ideal_idle_ratio": 0.0,
        "median_batch": served.median_batch(0),
    }


def _figures(
    searched: list[float], rows: list[dict[str, Any]], network: list[dict[str, Any]]
) -> dict[str, Figure]:
    made = {
        "searched_rps": Figure(
            searched,
            "the highest rate with at most 1 % bad on 24 GPUs, requests/s; loads are of this",
            "",
            0.05,
        ),
        "peak_rps": Figure([_peak(rows)], "p: our highest goodput at any load, requests/s"),
    }
    for rate, of, bounds in (
        (_peak(rows), "", ("at most 2", "at most 5")),
        (float(np.median(searched)), "_from_searched", ("", "")),
    ):
        for gaps, kind, ideal, bound in zip(
            _gaps(rows, rate),
            ("bad", "idle"),
            ("the bad rate from (o - p) / o", "the idle fraction from (p - o) / p"),
            bounds,
            strict=True,
        ):
            made[f"{kind}_gap_points{of}"] = Figure(
                [max(map(abs, gaps), default=0.0)],
                f"largest distance of {ideal}, points" + (", the searched rate as p" if of else ""),
                bound,
            )
    for name in SYSTEMS:
        mine = [row for row in rows if row["system"] == name]
        top = max(row["load"] for row in mine)
        last = [row["goodput_rps"] for row in mine if row["load"] == top]
        made[f"goodput_at_{top:g}x_{name}"] = Figure(
            last, f"goodput at {top:g} times the searched rate, requests/s", "", WIDE
        )
    for slo in sorted({row["slo_ms"] for row in network}):
        at_tail = [row["of_none"] for row in network if row["slo_ms"] == slo and row["is_ours"]]
        made[f"at_our_hop_{slo:g}ms"] = Figure(
            at_tail, "goodput at our hand-off tail over that without delay"
        )
    return made


def _notes(peak: float, rate: float, source: str) -> list[str]:
    return [
        f"p = {peak:.0f} requests/s, the highest median over seeds at any load",
        f"loads are parts of {rate:.0f} requests/s, the highest rate with at most 1 % bad",
        "profile l(b) = 1.053 b + 5.072 ms, SLO 100 ms",
        "emulated GPUs take exactly l(b); requests and GPUs are objects of one process; rivals are ours",
        "nexus plans for the offered rate, which it is told",
        f"our hand-off tail: {source}",
        "network delay is what the scheduler reckons with, a high percentile (section 5.6): it decides so "
        "much earlier; "
        + ", ".join(f"{1e3 * seconds:g} ms {what}" for seconds, what in BENDS.items() if what),
    ]
