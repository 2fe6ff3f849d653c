"""The frame of every benchmark: rows, figures with spread, a verdict on noise, table or JSON.

A benchmark measures in rounds inside one run and returns, per figure, one sample a round; a figure
is a ratio of two things measured in the same round wherever it can be. The frame takes medians and
refuses to call a run a result when the spread of a figure is too wide.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from keystage.loadgen.machine import facts

EXIT_NOISY = 3


class BenchError(Exception):
    """A benchmark that cannot run here: names what is missing or wrong."""


MAX_SPREAD_RATIO = 0.5
"""Interquartile range over median above which a figure is noise: half of it is machine, not code."""


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a benchmark.

    Attributes:
        samples: one value a round.
        meaning: what it is, with its unit or the two things it relates.
        target: what it should be, in words; empty for none.
        max_spread_ratio: bound on interquartile range / median.
    """

    samples: Sequence[float]
    meaning: str
    target: str = ""
    max_spread_ratio: float = MAX_SPREAD_RATIO

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return float(np.median(self.samples))

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile over the rounds."""
        low, high = np.percentile(self.samples, [25, 75])
        return float(low), float(high)

    @property
    def is_noisy(self) -> bool:
        """Whether the spread is too wide, or a sample is no number, for this to be a result."""
        if not self.samples or not all(map(math.isfinite, self.samples)):
            return True
        low, high = self.quartiles
        return len(self.samples) > 2 and high - low > self.max_spread_ratio * abs(self.median)


@dataclasses.dataclass(frozen=True, slots=True)
class BenchResult:
    """What a benchmark found.

    Attributes:
        rows: table rows, all with the same keys.
        figures: by name; the names are fixed.
        notes: sentences under the table: how it was measured, where the time goes.
        disturbance: what else happened that makes this no result, in words; empty for nothing.
    """

    rows: list[dict[str, Any]]
    figures: dict[str, Figure]
    notes: list[str] = dataclasses.field(default_factory=list)
    disturbance: str = ""


def document(name: str, result: BenchResult) -> dict[str, Any]:
    """A result with its machine, as JSON takes it.

    Args:
        name: benchmark name.
        result: what it found.
    """
    noisy = [key for key, figure in result.figures.items() if figure.is_noisy]
    return {
        "bench": name,
        "machine": dataclasses.asdict(facts()),
        "rows": result.rows,
        "figures": {key: _rounded(figure.median) for key, figure in result.figures.items()},
        "spread": {
            key: {
                "quartiles": [_rounded(value) for value in figure.quartiles],
                "rounds": len(figure.samples),
                "samples": [_rounded(value) for value in figure.samples],
            }
            for key, figure in result.figures.items()
        },
        "is_result": not noisy and not result.disturbance,
        "noisy": noisy,
        "disturbance": result.disturbance,
        "notes": result.notes,
    }


def report(name: str, result: BenchResult, *, as_json: bool, out: Path | None) -> int:
    """Prints a result and returns the exit code: 0, or `EXIT_NOISY` when it is none.

    Args:
        name: benchmark name.
        result: what it found.
        as_json: one JSON object on standard output instead of tables.
        out: folder that gets `bench-NAME.json`, None for none.
    """
    made = document(name, result)
    noisy: list[str] = made["noisy"]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"bench-{name}.json").write_text(json.dumps(made, indent=2) + "\n")
    if as_json:
        print(json.dumps(made))
    else:
        _print_tables(name, result)
    reasons = [result.disturbance] if result.disturbance else []
    if noisy:
        reasons.append(f"{', '.join(noisy)} spread wider than {MAX_SPREAD_RATIO:.0%} of the median")
    if reasons:
        print(f"not a result: {'; '.join(reasons)}; quiet the machine and run again", file=sys.stderr)
        return EXIT_NOISY
    return 0


def _print_tables(name: str, result: BenchResult) -> None:
    console = Console()
    table = Table(title=f"bench {name}")
    for column in result.rows[0] if result.rows else []:
        table.add_column(column, justify="left" if isinstance(result.rows[0][column], str) else "right")
    for row in result.rows:
        table.add_row(*(_shown(value) for value in row.values()))
    console.print(table)
    figures = Table(title="figures (median over rounds)")
    for column in ("figure", "value", "quartiles", "rounds", "meaning", "target"):
        figures.add_column(column)
    for key, figure in result.figures.items():
        low, high = figure.quartiles
        figures.add_row(
            key, _shown(figure.median), f"{_shown(low)} .. {_shown(high)}", str(len(figure.samples)),
            figure.meaning, figure.target,
        )  # fmt: skip
    console.print(figures)
    for note in result.notes:
        console.print(f"- {note}", highlight=False)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
