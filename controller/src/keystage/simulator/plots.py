"""Draws a simulated run as PNG files: latency, arrivals, and one of the stages of each pipeline.

Before it: `report`. It computes nothing but the curves it draws. Matplotlib is imported inside, for it
is slow to load, and used without pyplot, so that no global state or display is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keystage.simulator.report import Drawn, Report
from keystage.simulator.watch import StagePoint

# Okabe and Ito's palette: told apart with colour-blind eyes and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
_DPI = 130


def draw(report: Report, data: Drawn, folder: Path) -> list[Path]:
    """Writes the plots there is data for, and returns their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in _figures(report, data):
        paths.append(folder / name)
        figure.savefig(paths[-1], dpi=_DPI)
    return paths


def _figures(report: Report, data: Drawn) -> list[tuple[str, Any]]:
    figures = []
    if any(len(arrived) for arrived, _ in data.arrived_s.values()):
        figures += [("latency.png", latency(report, data)), ("arrivals.png", arrivals(data))]
    for pipeline in report.pipelines:
        names = [stage.function for stage in pipeline.stages]
        points = [point for point in data.points if point.function in names]
        if points:
            name = "stages.png" if len(report.pipelines) == 1 else f"stages-{pipeline.pipeline}.png"
            figures.append((name, stages(points, names)))
    return figures


def latency(report: Report, data: Drawn) -> Any:
    """Cumulative distribution of latencies; a curve that ends below 100 % shows unanswered requests."""
    figure, (axes,) = _canvas(1, 6.0, 4.0)
    for k, (name, (_, latencies_s)) in enumerate(data.arrived_s.items()):
        answered = np.sort([value for value in latencies_s if math.isfinite(value)])
        share = 100 * np.arange(1, len(answered) + 1) / max(1, len(latencies_s))
        axes.step(answered, share, where="post", color=_colour(k), label=name, linewidth=1.8)
    axes.set(xlabel="latency (s)", ylabel="requests (%)", ylim=(0, 101), xscale="log")
    axes.set_title(f"Latency under {report.policy}")
    axes.legend(fontsize=8)
    return figure


def arrivals(data: Drawn) -> Any:
    """What came when, and what each request met."""
    figure, (sent, met) = _canvas(2, 9.5, 6.0)
    last_s = max(arrived[-1] for arrived, _ in data.arrived_s.values() if arrived)
    edges = np.linspace(0, max(last_s, 1e-9), 121)
    for k, (name, (arrived, latencies_s)) in enumerate(data.arrived_s.items()):
        sent.hist(arrived, bins=edges.tolist(), histtype="step", color=_colour(k), label=name)
        met.plot(arrived, latencies_s, ".", markersize=2, color=_colour(k))
    sent.set(ylabel=f"requests per {edges[1]:.3g} s", title="Arrivals")
    met.set(xlabel="arrival (s)", ylabel="latency (s)")
    met.set_ylim(bottom=0)
    sent.legend(fontsize=8)
    return figure


def stages(points: Sequence[StagePoint], functions: Sequence[str]) -> Any:
    """Queue, replicas ready and replicas wanted of each stage over time."""
    panels: list[tuple[str, Callable[[StagePoint], float]]] = [
        ("queue (items)", lambda point: point.queue),
        ("in service (items)", lambda point: point.in_flight),
        ("replicas ready", lambda point: point.ready),
        ("replicas wanted", lambda point: point.desired),
    ]
    figure, grid = _canvas(len(panels), 9.5, 8.2)
    for axes, (label, value) in zip(grid, panels, strict=True):
        for k, function in enumerate(functions):
            own = [point for point in points if point.function == function]
            axes.step(
                [point.at_s for point in own],
                [value(point) for point in own],
                where="post",
                color=_colour(k),
                linewidth=1.2 + 1.6 * (len(functions) - 1 - k) / max(1, len(functions) - 1),
                label=function.rsplit("-stage-", 1)[-1],
            )
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    grid[0].set_title("Stages over time")
    grid[0].legend(
        loc="upper right", fontsize=8, ncols=min(8, len(functions)), title="stage", title_fontsize=8
    )
    grid[-1].set(xlabel="time (s)")
    return figure


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _canvas(rows: int, width_in: float, height_in: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, 1, squeeze=False, sharex=rows > 2).flat)
    for axes in panels:
        axes.grid(visible=True, color="0.9", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels
