"""`keystage bench overload`: goodput from 0 to 10 times the capacity, and what overload costs in memory.

Before it: `keystage bench`. It says what is served and which loads come, lets `overload_world` run them
through the local platform (gateway, routers, workers, wire and HTTP; only devices are emulated), and judges.
Goodput is answers within the SLO a second. The capacity is what a first run under twice the capacity computed
of the devices gives; loads are multiples of it. One pipeline loops, one is single-pass; each request tells
the router its deadline, so that what cannot be in time is refused at once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keystage.bench.frame import BenchResult, Figure
from keystage.bench.overload_world import Kind, Run, looping, opened, single_pass
from keystage.bench.results_page import FOLDER, write_page

LOADS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0)
QUICK_LOADS = (0.5, 1.0, 2.0, 10.0)
JUDGED = (2.0, 5.0, 10.0)
FLAT_FROM = 1.0
MIB = 1 << 20


def run(*, quick: bool = False, full: bool = False, parts: str = "") -> BenchResult:
    """Measures.

    Args:
        quick: few loads for some seconds each, no page.
        full: three rounds of a minute for each load instead of one of 30 s.
        parts: `looping`, `single-pass` or both, separated by a comma; empty: both.
    """
    rounds, seconds = (1, 6.0) if quick else (3, 60.0) if full else (1, 30.0)
    loads = QUICK_LOADS if quick else LOADS
    kinds = [kind for kind in (looping(), single_pass()) if not parts or kind.name in parts.split(",")]
    found = {kind.name: asyncio.run(_measure(kind, loads, rounds, seconds)) for kind in kinds}
    result = _result(kinds, found, seconds)
    if not quick and not parts:
        write_page(
            "overload",
            "Goodput under overload",
            result,
            tables={
                kind.name: [row for row in result.rows if row["pipeline"] == kind.name] for kind in kinds
            },
            pictures=["overload.png"],
        )
        _plot(kinds, found, FOLDER / "overload.png")
    return result


async def _measure(kind: Kind, loads: Sequence[float], rounds: int, seconds: float) -> list[list[Run]]:
    """Runs of every round, by load; the first of each is the one that tells the capacity."""
    measured: list[list[Run]] = []
    async with opened(kind) as world:
        for number in range(rounds):
            first = await world.run(2 * kind.computed_rps, seconds, seed=1000 * number, load=0.0)
            capacity_rps = first.goodput_rps
            print(f"{kind.name}: capacity {capacity_rps:.1f}/s", file=sys.stderr, flush=True)
            runs = [first]
            for place, load in enumerate(loads):
                one = await world.run(load * capacity_rps, seconds, seed=1000 * number + place + 1, load=load)
                runs.append(one)
                told = (
                    f"{kind.name} {load:g}x: {one.goodput_rps:.1f} good/s, p99 {one.p99_s:.2f} s, "
                    f"{one.refused} refused {one.codes}, router {one.memory['router'] / MIB:.0f} MiB"
                )
                print(told, file=sys.stderr, flush=True)
            measured.append(runs)
    return measured


def _result(kinds: Sequence[Kind], found: dict[str, list[list[Run]]], seconds: float) -> BenchResult:
    rows: list[dict[str, Any]] = []
    figures: dict[str, Figure] = {}
    for kind in kinds:
        name = kind.name.replace("-", "_")
        rounds = [runs[1:] for runs in found[kind.name]]
        rows += [_row(kind, list(runs)) for runs in zip(*rounds, strict=True)]
        tops = [_flat_top(runs) for runs in rounds]
        figures[f"{name}_flat_top"] = Figure(
            tops,
            "least goodput from 1 to 10 times the capacity, over the best at any load (over what was "
            "offered, where that was less)",
            "at least 0.95",
        )
        for load in JUDGED:
            ratios = [run.p99_s / kind.slo_s for runs in rounds for run in runs if run.load == load]
            if ratios:
                figures[f"{name}_p99_over_slo_{load:g}x"] = Figure(
                    ratios, f"p99 latency of answered requests over the SLO, at {load:g} times", "at most 1"
                )
        for role in ("router", "gateway"):
            figures[f"{name}_{role}_memory_ratio"] = Figure(
                [_memory_ratio(runs, role) for runs in rounds],
                f"memory of the {role} at 10 times the capacity over that at the capacity",
                "at most 1.5",
            )
    return BenchResult(rows, figures, _notes(kinds, seconds))


def _flat_top(runs: Sequence[Run]) -> float:
    """Arrivals are Poisson: at once the capacity a run may be offered less than it could have answered."""
    peak = max(run.goodput_rps for run in runs)
    return min(run.goodput_rps / min(peak, run.offered_rps) for run in runs if run.load >= FLAT_FROM)


def _memory_ratio(runs: Sequence[Run], role: str) -> float:
    at = {run.load: run.memory[role] for run in runs}
    return at[max(at)] / at[FLAT_FROM]


def _row(kind: Kind, runs: Sequence[Run]) -> dict[str, Any]:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        "pipeline": kind.name,
        "load": runs[0].load,
        "offered_rps": mean([run.offered_rps for run in runs]),
        "goodput_rps": mean([run.goodput_rps for run in runs]),
        "p50_s": mean([run.p50_s for run in runs]),
        "p99_s": mean([run.p99_s for run in runs]),
        "late": mean([run.late for run in runs]),
        "refused at once": mean([run.at_once for run in runs]),
        "refused later": mean([run.refused - run.at_once for run in runs]),
        "refusal p99_ms": 1e3 * mean([run.refusal_p99_s for run in runs]),
        "router_mib": mean([run.memory["router"] for run in runs]) / MIB,
        "gateway_mib": mean([run.memory["gateway"] for run in runs]) / MIB,
        "lag_ms": 1e3 * mean([run.lag_s for run in runs]),
    }


def _notes(kinds: Sequence[Kind], seconds: float) -> list[str]:
    return [
        *(f"{kind.name}: {kind.words}, SLO {kind.slo_s:g} s" for kind in kinds),
        (
            "goodput: answers within the SLO a second, from the scheduled time of sending to the last byte; "
            "each request tells 95 % of the SLO as its deadline (X-Keystage-Deadline-S)"
        ),
        (
            f"Poisson arrivals for {seconds:g} s a load, through the gateway; goodput is of what was "
            "answered in the last three quarters of that time, the other columns of what was sent in them"
        ),
        "capacity: goodput under twice what is computed of the devices; loads are multiples of it",
        "refused at once: 429; refused later: 504, when its turn came or its deadline passed",
        "memory: resident and not shared, the most of a run",
    ]


def _plot(kinds: Sequence[Kind], found: dict[str, list[list[Run]]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 7), sharex=True)
    for kind in kinds:
        runs = found[kind.name][0][1:]
        loads = [run.load for run in runs]
        peak = max(run.goodput_rps for run in runs)
        above.plot(loads, [run.goodput_rps / peak for run in runs], marker="o", label=kind.name)
        for role, style in (("router", "-"), ("gateway", "--")):
            memory = [run.memory[role] / MIB for run in runs]
            below.plot(loads, memory, style, marker=".", label=f"{role}, {kind.name}")
    above.set(ylabel="goodput / peak", ylim=(0, 1.05))
    below.set(xlabel="load / capacity", ylabel="resident memory, MiB", ylim=(0, None))
    for axes in (above, below):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
