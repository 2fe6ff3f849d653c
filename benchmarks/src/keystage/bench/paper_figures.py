"""Draws the paper's figures from our runs: 2a-b, 3a, 6a-d, 7a-b, 8a-b.

Before it: scores. After it: PNG files. It computes nothing but the means it draws: over seeds, with the
spread of seeds as bars where there is one value a model. Matplotlib is imported inside, without pyplot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keystage.bench.paper_ratios import goodput
from keystage.bench.paper_run import PERCENTILES, SLO_RATIOS, Score

COLOURS = {
    "keystage": "#0072B2",
    "infless": "#D55E00",
    "inferline": "#009E73",
    "cocktail": "#CC79A7",
    "static": "#7F7F7F",
    "off": "#000000",
}
MARKS = {"keystage": "o", "infless": "s", "inferline": "^", "cocktail": "D", "static": "x", "off": "v"}
_DPI = 130

ByPolicy = Mapping[str, Sequence[Score]]


def draw(folder: Path, by_policy: ByPolicy, suffix: str) -> list[Path]:
    """Writes figures 6, 7 and 8 of one table, those there are runs for.

    Args:
        folder: where to.
        by_policy: scores by policy name.
        suffix: of the file names, empty for Table A.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trace = {n: [s for s in scores if s.run.cell.load == "trace"] for n, scores in by_policy.items()}
    varied = {n: [s for s in scores if s.run.cell.load == "cv"] for n, scores in by_policy.items()}
    drawings: list[tuple[str, Any]] = []
    if all(trace.values()):
        drawings.append(("figure-6", _figure_6(trace)))
    if all(varied.values()):
        drawings.append(("figure-7", _figure_7(varied)))
        drawings.append(("figure-8", _figure_8(varied)))
    paths = []
    for name, figure in drawings:
        paths.append(folder / f"{name}{suffix}.png")
        figure.savefig(paths[-1], dpi=_DPI)
    return paths


def draw_case_study(
    path: Path, cvs: Sequence[float], queues: Sequence[float], busy: Sequence[float], loads: Sequence[str]
) -> Path:
    """Writes figures 2a, 2b and 3a: CV, queue and utilisation by stage of five.

    Args:
        path: PNG file.
        cvs: CV of arrivals by stage.
        queues: mean waiting requests by stage.
        busy: busy part of the GPU by stage.
        loads: the load of each panel, in words.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, panels = canvas(1, 3, 11.5, 3.3)
    wanted = (("CV of arrivals", cvs), ("waiting requests", queues), ("busy (%)", [100 * b for b in busy]))
    for axes, name, (label, values), load in zip(panels, ("2a", "2b", "3a"), wanted, loads, strict=True):
        bars = axes.bar(range(1, len(values) + 1), values, color=COLOURS["keystage"], width=0.65)
        axes.bar_label(bars, [f"{v:.3g}" for v in values], fontsize=8)
        axes.set(xlabel="stage", ylabel=label, title=f"{name}: {load}")
    figure.savefig(path, dpi=_DPI)
    return path


def _figure_6(by_policy: ByPolicy) -> Any:
    figure, (mean, slo, p75, p99) = canvas(2, 2, 11.0, 7.2)
    _by_model(
        mean, by_policy, lambda s: s.mean_s / s.run.cell.of.exec_s, "6a: mean latency (execution times)"
    )
    for name, scores in by_policy.items():
        shares = 100 * np.mean([s.met_ratios for s in scores], axis=0)
        kept = [i for i, r in enumerate(SLO_RATIOS) if r <= 3]
        line(slo, name, [SLO_RATIOS[i] for i in kept], [shares[i] for i in kept])
    slo.set(
        xlabel="objective (execution times)",
        ylabel="within it (%)",
        title="6b: SLO satisfaction",
        ylim=(0, 101),
    )
    slo.legend(fontsize=8)
    for axes, rank, name in ((p75, 75, "6c"), (p99, 99, "6d")):
        title = f"{name}: {rank}th percentile (execution times)"
        _by_model(axes, by_policy, functools.partial(_relative, rank), title)
    return figure


def _relative(rank: int, score: Score) -> float:
    return score.percentile_s(rank) / score.run.cell.of.exec_s


def _figure_7(by_policy: ByPolicy) -> Any:
    figure, (latency, tokens) = canvas(1, 2, 11.0, 3.8)
    _by_cv(latency, by_policy, lambda s: s.mean_s / s.run.cell.of.exec_s)
    latency.set(ylabel="execution times", title="7a: mean latency", yscale="log")
    _by_cv(tokens, by_policy, lambda s: goodput(s) / (s.run.cell.rate_rps * s.run.cell.of.tokens))
    tokens.set(ylabel="of the tokens asked for", title="7b: goodput", ylim=(0, 1.02))
    return figure


def _figure_8(by_policy: ByPolicy) -> Any:
    figure, (quantiles, queue) = canvas(1, 2, 11.0, 3.8)
    for name, scores in by_policy.items():
        logs = np.log([np.array(s.percentiles_s) / s.run.cell.of.exec_s for s in scores])
        line(quantiles, name, list(PERCENTILES), np.exp(logs.mean(axis=0)).tolist())
    quantiles.set(xlabel="percentile", ylabel="execution times", title="8a: latency, all CVs", yscale="log")
    quantiles.legend(fontsize=8)
    _by_cv(queue, by_policy, lambda s: max(1e-3, s.queue))
    queue.set(ylabel="waiting requests a stage", title="8b: mean queue", yscale="log")
    return figure


def _by_model(axes: Any, by_policy: ByPolicy, value: Callable[[Score], float], title: str) -> None:
    models = sorted({s.run.cell.model for scores in by_policy.values() for s in scores})
    width = 0.8 / len(by_policy)
    names: dict[int, str] = {}
    for place, (policy, scores) in enumerate(by_policy.items()):
        means, errors = [], []
        for model in models:
            own = [s for s in scores if s.run.cell.model == model]
            names[model] = own[0].run.cell.of.name
            values = [value(s) for s in own]
            means.append(float(np.mean(values)))
            errors.append(float(np.std(values)) if len(values) > 1 else 0.0)
        at = np.arange(len(models)) + (place - (len(by_policy) - 1) / 2) * width
        axes.bar(at, means, width, yerr=errors, color=COLOURS.get(policy, "0.6"), label=policy, capsize=2)
    axes.set_xticks(range(len(models)), [names[m] for m in models], fontsize=8)
    axes.set(title=title, yscale="log")
    axes.legend(fontsize=8)


def _by_cv(axes: Any, by_policy: ByPolicy, value: Callable[[Score], float]) -> None:
    """Geometric means over models and seeds."""
    for name, scores in by_policy.items():
        cvs = sorted({s.run.cell.cv for s in scores})
        means = [
            float(np.exp(np.mean([np.log(max(1e-6, value(s))) for s in scores if s.run.cell.cv == cv])))
            for cv in cvs
        ]
        line(axes, name, list(range(len(cvs))), means)
        axes.set_xticks(range(len(cvs)), [f"{cv:g}" for cv in cvs])
    axes.set(xlabel="CV of arrivals")
    axes.legend(fontsize=8)


def line(axes: Any, name: str, x: Sequence[float], y: Sequence[float]) -> None:
    """Draws a policy's line in its colour and marks."""
    axes.plot(x, y, marker=MARKS.get(name, "."), color=COLOURS.get(name, "0.6"), label=name, linewidth=1.6)


def canvas(rows: int, columns: int, width_in: float, height_in: float) -> tuple[Any, list[Any]]:
    """A figure and its panels, row by row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.grid(visible=True, color="0.9", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels
