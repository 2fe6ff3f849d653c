"""Draws what `soak` saw: PNG files. It computes nothing but the percentiles and sums it draws.

Before it: an outcome and its trends. Matplotlib is imported inside, without pyplot (`paper_figures.canvas`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from keystage.bench.paper_figures import canvas
from keystage.bench.soak_trend import Trend
from keystage.bench.whole_client import Floats
from keystage.bench.whole_watch import COLUMNS, ROLES
from keystage.bench.whole_world import Outcome
from keystage.simulator import api

DPI = 130
BINS = 36
_MIB = float(1 << 20)


def draw_live(path: Path, outcome: Outcome, trends: dict[str, Trend]) -> Path:
    """Requests, latency, lag, memory, files and processes over the live run.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, panels = canvas(2, 3, 14.0, 7.6)
    rate, latency, lag, memory, files, number = panels
    edges_s = np.linspace(0, outcome.plan.duration_s, BINS + 1)
    for served, sent in zip(outcome.plan.served, outcome.sent, strict=True):
        middle, tail = _binned(sent.scheduled_s, 1e3 * sent.latency_s, edges_s)
        (drawn,) = latency.plot(edges_s[:-1], middle, label=f"{served.name} p50")
        latency.plot(edges_s[:-1], tail, linestyle="--", color=drawn.get_color(), label=f"{served.name} p99")
        counts = np.histogram(sent.scheduled_s, edges_s)[0]
        rate.plot(edges_s[:-1], counts / np.diff(edges_s), label=served.name)
        lag.plot(edges_s[:-1], _binned(sent.scheduled_s, 1e3 * sent.lag_s, edges_s)[1], label=served.name)
    rate.set(ylabel="requests/s", title="sent")
    latency.set(ylabel="ms", yscale="log", title="latency")
    lag.set(ylabel="ms", title="send lag, p99")
    grown = [name for name, one in trends.items() if one.is_growing]
    memory.set(ylabel="MiB", yscale="log", title=f"memory by role; grows: {', '.join(grown) or 'nothing'}")
    files.set(ylabel="open files", yscale="log", title="files by role")
    number.set(ylabel="processes", title="processes by role")
    for index, role in enumerate(ROLES):
        mine = outcome.processes[outcome.processes[:, 2] == index]
        if not len(mine):
            continue
        at_s, place = np.unique(mine[:, 0], return_inverse=True)
        memory.plot(at_s, _sums(place, mine[:, COLUMNS.index("private_bytes")]) / _MIB, label=role)
        files.plot(at_s, _sums(place, mine[:, COLUMNS.index("files")]), label=role)
        number.plot(at_s, np.bincount(place), label=role)
    for axes in panels:
        axes.set_xlabel("s")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=DPI)
    return path


def draw_simulated(path: Path, outcome: api.Outcome, memory: Floats) -> Path:
    """Latency, ready replicas and memory over the simulated run.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (latency, replicas, used) = canvas(1, 3, 14.0, 4.0)
    for pipeline in outcome.pipelines:
        edges_s = np.linspace(0, float(pipeline.arrived_s[-1]), 2 * BINS + 1)
        middle, tail = _binned(pipeline.arrived_s, 1e3 * pipeline.latency_s, edges_s)
        (drawn,) = latency.plot(edges_s[:-1], middle, label=f"{pipeline.pipeline} p50")
        latency.plot(edges_s[:-1], tail, linestyle="--", color=drawn.get_color())
        for stage in pipeline.stages[:1]:
            replicas.step(stage.series[:, 0], stage.series[:, 2], where="post", label=stage.function)
    latency.set(ylabel="ms", yscale="log", title="latency (p99 dashed)")
    replicas.set(ylabel="ready replicas", yscale="log", title="first stages")
    used.plot(memory[:, 0], memory[:, 1] / _MIB, label="this process")
    used.set(ylabel="MiB", title="resident memory of the simulator", ylim=(0, None))
    for axes in (latency, replicas, used):
        axes.set_xlabel("simulated s")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=DPI)
    return path


def _binned(at_s: Floats, values: Floats, edges_s: Floats) -> tuple[Floats, Floats]:
    """Median and 99th percentile in each span; NaN where there is none."""
    block = np.clip(np.searchsorted(edges_s, at_s, side="right") - 1, 0, len(edges_s) - 2)
    found = np.full((2, len(edges_s) - 1), np.nan)
    for k in range(len(edges_s) - 1):
        inside = values[(block == k) & np.isfinite(values)]
        if len(inside):
            found[:, k] = np.percentile(inside, (50, 99))
    return found[0], found[1]


def _sums(place: np.ndarray[tuple[int], np.dtype[np.intp]], values: Floats) -> Floats:
    return np.bincount(place, weights=values).astype(np.float64)
