"""Draws a report as PNG files: latency, arrivals, stages, slo.

Comes after `report`; computes nothing but the curves it draws. Matplotlib is imported inside, for
it is slow to load, and used without pyplot, so that no global state or display is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keystage.loadgen import curves, files, measures
from keystage.loadgen.report import Report
from keystage.loadgen.series import WINDOW_S, StageSample

# Okabe and Ito's palette: told apart with colour-blind eyes and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
_DPI = 130

MOST_POINTS = 20_000
"""Beyond it a point a request takes long to draw and hides the others: percentiles over time are drawn."""


FILES = ("latency.png", "arrivals.png", "slo.png", "stages.png")


def draw(report: Report, folder: Path) -> list[Path]:
    """Writes the plots the report has data for, and returns their paths.

    Raises:
        OSError: if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted: list[tuple[Callable[[Report], Any], bool]] = [
        (latency, report.requests.served > 0),
        (arrivals, report.requests.sent > 0),
        (slo, bool(report.attainment)),
        (stages, bool(report.samples)),
    ]
    paths = []
    for name, (figure, has_data) in zip(FILES, wanted, strict=True):
        if has_data:
            path = folder / name
            with files.whole(path) as part:
                figure(report).savefig(part, dpi=_DPI, format="png")
            paths.append(path)
    return paths


def latency(report: Report) -> Any:
    """Cumulative distributions over all requests sent: a curve that ends below 100 % shows failures."""
    served = [row for row in report.rows if row.is_served]
    panels = [
        ("Latency of the whole answer (s)", [measures.latency_s(row) for row in served], report.slo.latency_s)
    ]
    if report.ttft_s.count:
        tpots = [value for row in served if (value := measures.tpot_s(row)) is not None]
        ttfts = [value for row in served if (value := measures.ttft_s(row)) is not None]
        panels.insert(
            0, ("Time per output token (ms)", [1000 * v for v in tpots], _scaled(report.slo.tpot_s))
        )
        panels.insert(0, ("Time to first token (s)", ttfts, report.slo.ttft_s))
    figure = _figure(4.2 * len(panels), 3.8)
    for axes, (label, values, bound) in zip(_panels(figure, 1, len(panels)), panels, strict=True):
        _cdf(axes, label, values, bound, report.requests.failed)
    figure.suptitle(f"Latency of {report.requests.sent} requests, {report.requests.failed} failed")
    return figure


def _scaled(bound_s: float | None) -> float | None:
    return None if bound_s is None else 1000 * bound_s


def _cdf(axes: Any, label: str, values: Sequence[float], bound: float | None, failed: int) -> None:
    thinned = curves.cdf(values, failed)
    ordered, share = np.array(thinned.values), 100 * np.array(thinned.share)
    axes.step(ordered, share, where="post", color=COLOURS[0], linewidth=1.8)
    known = measures.percentiles(values, failed)
    for rank, reached, style in ((50, known.p50, ":"), (99, known.p99, "--")):
        if reached is not None:
            axes.axvline(reached, color="0.45", linestyle=style, linewidth=1, label=f"p{rank} {reached:.3g}")
    if bound is not None:
        axes.axvline(bound, color=COLOURS[1], linewidth=1.4, label=f"SLO 1x {bound:.3g}")
    axes.set(xlabel=label, ylabel="requests (%)", ylim=(0, 101))
    axes.set_xlim(left=0)
    axes.legend(loc="best", fontsize=8)


def arrivals(report: Report) -> Any:
    """What was sent when, and what each request met."""
    figure = _figure(9.5, 6.2)
    sent, answered = _panels(figure, 2, 1, sharex=True, height_ratios=[1, 1.5])
    end_s = report.makespan_s
    width_s = max(round(end_s / 60), 1)
    edges = np.arange(0, end_s + width_s, width_s)
    sent.hist([row.sent_s for row in report.rows], bins=edges.tolist(), color=COLOURS[5], label="sent")
    cv = report.arrivals.achieved_cv
    shown = f", CV {cv:.2f}" if cv is not None and report.arrivals.cv_claimed else ""
    sent.set(
        ylabel=f"requests per {width_s} s",
        title=f"Arrivals: {report.arrivals.achieved_rate_rps:.2f}/s{shown}",
    )
    if len(report.rows) > MOST_POINTS:
        _over_time(answered, report)
    else:
        _single(answered, report)
    answered.set(xlabel="scheduled time (s)", ylabel="time from schedule (s)", xlim=(0, end_s))
    answered.set_ylim(bottom=0)
    answered.legend(loc="upper right", fontsize=8)
    return figure


def _over_time(axes: Any, report: Report) -> None:
    """Percentiles of the whole answer in stretches of the run, and where requests failed."""
    spans = curves.spans(report.rows, report.makespan_s)
    middles = [(span.from_s + span.to_s) / 2 for span in spans]
    lines = (
        ("largest", COLOURS[5], [span.max_s for span in spans]),
        ("p99", COLOURS[4], [span.p99_s for span in spans]),
        ("median", COLOURS[0], [span.median_s for span in spans]),
    )
    for label, colour, values in lines:
        axes.plot(middles, [math.nan if v is None else v for v in values], color=colour, label=label)
    lost = [middle for middle, span in zip(middles, spans, strict=True) if span.failed]
    if lost:
        axes.scatter(lost, [0.0] * len(lost), s=28, color=COLOURS[1], marker="x", label="failed")


def _single(answered: Any, report: Report) -> None:
    """A point a request."""
    served = [row for row in report.rows if row.is_served]
    times = [row.scheduled_s for row in served]
    answered.scatter(
        times, [measures.latency_s(row) for row in served], s=14, color=COLOURS[0], label="whole answer"
    )
    if report.ttft_s.count:
        firsts = [measures.ttft_s(row) or 0.0 for row in served]
        answered.scatter(times, firsts, s=14, color=COLOURS[4], marker="^", label="first token")
    lost = [row for row in report.rows if not row.is_served]
    if lost:
        ends = [measures.latency_s(row) for row in lost]
        answered.scatter(
            [row.scheduled_s for row in lost], ends, s=28, color=COLOURS[1], marker="x", label="failed"
        )


def slo(report: Report) -> Any:
    """Attainment over SLO scale, with goodput above the bars."""
    figure = _figure(5.6, 3.9)
    (axes,) = _panels(figure, 1, 1)
    lines = report.attainment
    places = range(len(lines))
    shares = [100 * line.attainment_ratio for line in lines]
    bars = axes.bar(places, shares, color=COLOURS[2], width=0.6)
    axes.bar_label(
        bars,
        [f"{share:.0f} %\n{line.goodput_rps:.2f}/s" for share, line in zip(shares, lines, strict=True)],
        fontsize=8,
    )
    axes.set_xticks(places, [f"{line.scale:g}x" for line in lines])
    axes.set(
        xlabel="SLO scale",
        ylabel="requests within SLO (%)",
        ylim=(0, 118),
        title="SLO attainment and goodput",
    )
    axes.set_yticks(range(0, 101, 20))
    return figure


def stages(report: Report) -> Any:
    """Queue, in flight, replicas and CV of each stage over time."""
    panels: list[tuple[str, Callable[[StageSample], float | None]]] = [
        ("queue (items)", lambda sample: sample.queue),
        ("in flight (items)", lambda sample: sample.in_flight),
        ("ready replicas", lambda sample: sample.ready),
        ("busy (%)", lambda sample: None if sample.busy_ratio is None else 100 * sample.busy_ratio),
        (f"CV of arrivals\n({WINDOW_S:g} s window)", lambda sample: sample.cv),
    ]
    drawn = [(label, value) for label, value in panels if any(value(s) is not None for s in report.samples)]
    figure = _figure(9.5, 1.9 * len(drawn) + 0.6)
    indices = sorted({sample.stage for sample in report.samples})
    grid = _panels(figure, len(drawn), 1, sharex=True)
    for axes, (label, value) in zip(grid, drawn, strict=True):
        for stage in indices:
            points = [(s.at_s, v) for s in report.samples if s.stage == stage and (v := value(s)) is not None]
            if points:
                at_s, values = zip(*points, strict=True)
                _line(axes, at_s, values, stage, len(indices))
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer="(items)" in label or "replicas" in label)
    grid[0].set_title("Stages over time")
    grid[0].legend(loc="upper right", fontsize=8, ncols=min(len(indices), 8))
    grid[-1].set(xlabel="time (s)", xlim=(0, report.makespan_s))
    return figure


def _line(axes: Any, at_s: Sequence[float], values: Sequence[float], stage: int, count: int) -> None:
    """Later stages are thinner, so that equal lines lying on each other all stay visible."""
    width = 1.3 + 2.2 * (count - 1 - stage % count) / max(count - 1, 1)
    colour = COLOURS[stage % len(COLOURS)]
    axes.step(
        at_s,
        values,
        where="post",
        color=colour,
        linewidth=width,
        label=f"stage {stage}",
        solid_capstyle="butt",
    )


def _figure(width_in: float, height_in: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _panels(figure: Any, rows: int, columns: int, **arguments: Any) -> list[Any]:
    """Axes with a light grid and no box, row by row."""
    panels = list(figure.subplots(rows, columns, squeeze=False, **arguments).flat)
    for axes in panels:
        axes.grid(visible=True, color="0.9", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return panels
