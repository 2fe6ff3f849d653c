"""Draws a survey as PNG files: rate, gaps, scales, functions, durations or tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from keystage.loadgen.plots import COLOURS
from keystage.loadgen.traces.survey import GAP_EDGES_S, Quantiles, Survey

_DPI = 130


def draw(survey: Survey, folder: Path) -> list[Path]:
    """Writes the plots that there is data for, and returns their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    has_tokens = survey.context_tokens is not None
    wanted: list[tuple[str, Callable[[Survey], Any], bool]] = [
        ("rate.png", rate, survey.rows > 0),
        ("gaps.png", gaps, survey.rows > 2),
        ("scales.png", scales, any(scale.dispersion for scale in survey.scales)),
        ("functions.png", functions, len(survey.ranked) > 1),
        ("durations.png", durations, survey.duration_s is not None),
        ("tokens.png", tokens, has_tokens),
    ]
    paths = []
    for name, figure, has_data in wanted:
        if has_data:
            figure(survey).savefig(folder / name, dpi=_DPI)
            paths.append(folder / name)
    return paths


def rate(survey: Survey) -> Any:
    """Arrivals a second over time."""
    figure, axes = _figure(9.5, 3.6)
    series = survey.series
    end_s = max(survey.window_s, survey.last_s or 0.0)
    used = min(max(math.ceil((end_s - series.from_s) / series.width_s), 1), series.MOST)
    per_bin = max(round(used / 240), 1)
    width_s = per_bin * series.width_s
    counts = np.add.reduceat(series.counts[:used], np.arange(0, used, per_bin))
    starts = series.from_s + np.arange(len(counts)) * width_s
    widths = np.minimum(width_s, series.from_s + used * series.width_s - starts)
    axes.step(starts, counts / widths, where="post", color=COLOURS[0], linewidth=1.3)
    axes.set(
        xlabel="time (s)",
        ylabel="arrivals per second",
        title=f"{survey.rows} arrivals, means over {width_s:g} s",
    )
    axes.set_ylim(bottom=0)
    return figure


def gaps(survey: Survey) -> Any:
    """Share of inter-arrival times longer than a length, beside the exponential of the same mean."""
    figure, axes = _figure(5.6, 3.9)
    longer = 1 - np.cumsum(survey.gap_counts[:-1]) / survey.gap_counts.sum()
    axes.loglog(
        GAP_EDGES_S, np.where(longer > 1e-9, longer, np.nan), color=COLOURS[0], linewidth=1.8, label="trace"
    )
    mean_s = ((survey.last_s or 0.0) - (survey.first_s or 0.0)) / max(survey.rows - 1, 1)
    if mean_s > 0:
        poisson = np.exp(-GAP_EDGES_S / mean_s)
        poisson[poisson < 1e-7] = np.nan
        axes.loglog(
            GAP_EDGES_S,
            np.where(poisson > 1e-7, poisson, np.nan),
            color="0.45",
            linestyle="--",
            label="Poisson",
        )
    shown = "" if survey.gap_cv is None else f", CV {survey.gap_cv:.2f}"
    axes.set(xlabel="inter-arrival time (s)", ylabel="share that is longer", title=f"Gaps{shown}")
    axes.legend(loc="best", fontsize=8)
    return figure


def scales(survey: Survey) -> Any:
    """Index of dispersion of the counts over the scale."""
    figure, axes = _figure(5.6, 3.9)
    points = [(scale.scale_s, scale.dispersion) for scale in survey.scales if scale.dispersion]
    widths, values = zip(*points, strict=True)
    axes.loglog(widths, values, marker="o", color=COLOURS[1], label="trace")
    axes.axhline(1, color="0.45", linestyle="--", linewidth=1, label="Poisson")
    axes.set(xlabel="scale (s)", ylabel="variance / mean of counts", title="Index of dispersion")
    axes.legend(loc="best", fontsize=8)
    return figure


def functions(survey: Survey) -> Any:
    """Share of invocations of the busiest functions together."""
    figure, axes = _figure(5.6, 3.9)
    share = 100 * np.cumsum(survey.ranked) / survey.ranked.sum()
    axes.semilogx(np.arange(1, len(share) + 1), share, color=COLOURS[2], linewidth=1.8)
    axes.set(
        xlabel="busiest functions",
        ylabel="of all invocations (%)",
        title=f"{survey.functions} functions",
        ylim=(0, 102),
    )
    return figure


def durations(survey: Survey) -> Any:
    """Distribution of durations."""
    figure, axes = _figure(5.6, 3.9)
    _curve(axes, survey.duration_s, COLOURS[3], "duration")
    axes.set(xlabel="duration (s)", ylabel="invocations (%)", title="Durations", ylim=(0, 102))
    axes.set_xscale("symlog", linthresh=1e-3)
    axes.set_xlim(left=0)
    return figure


def tokens(survey: Survey) -> Any:
    """Distributions of token counts."""
    figure, axes = _figure(5.6, 3.9)
    _curve(axes, survey.context_tokens, COLOURS[0], "context")
    _curve(axes, survey.generated_tokens, COLOURS[1], "generated")
    axes.set(xlabel="tokens", ylabel="requests (%)", title="Token counts", ylim=(0, 102))
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(left=0)
    axes.legend(loc="best", fontsize=8)
    return figure


def _curve(axes: Any, quantiles: Quantiles | None, colour: str, label: str) -> None:
    if quantiles is not None:
        shares, values = zip(*quantiles.at, strict=True)
        axes.plot(values, [100 * share for share in shares], marker=".", color=colour, label=label)


def _figure(width_in: float, height_in: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.grid(visible=True, color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
