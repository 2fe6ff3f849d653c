"""Pictures of `keystage bench flat-top`: goodput and utilisation over load, goodput over network delay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keystage.bench.flat_top_network import Tail

COLOURS = {
    "deferred": "#0b6e4f",
    "algorithm-1": "#6cc3a0",
    "eager": "#c44900",
    "shepherd": "#7a4fbf",
    "nexus": "#1f77b4",
    "clockwork": "#9a9a9a",
}


def draw_top(rows: Sequence[Mapping[str, Any]], peak_rps: float, path: Path) -> None:
    """Figure 2: left goodput, right the busy part of the GPUs, both over the offered load."""
    figure, (left, right) = canvas(1, 2, 10.0, 4.0)
    most = max(row["offered_rps"] for row in rows)
    left.plot([0, peak_rps, most], [0, peak_rps, peak_rps], "k:", linewidth=1, label="flat top")
    right.plot([0, peak_rps, most], [0, 1, 1], "k:", linewidth=1, label="in proportion")
    for name in dict.fromkeys(row["system"] for row in rows):
        mine = [row for row in rows if row["system"] == name and row["seed"] == 0]
        offered = [row["offered_rps"] for row in mine]
        style = {"color": COLOURS.get(name), "label": name, "linewidth": 2 if name == "deferred" else 1.2}
        left.plot(offered, [row["goodput_rps"] for row in mine], **style)
        right.plot(offered, [1 - row["idle_ratio"] for row in mine], **style)
    left.set(xlabel="offered requests/s", ylabel="good requests/s")
    right.set(xlabel="offered requests/s", ylabel="busy part of 24 GPUs")
    left.legend(frameon=False)
    _save(figure, path)


def draw_bends(rows: Sequence[Mapping[str, Any]], tail: Tail, path: Path) -> None:
    """Figure 14: goodput over that without delay, by objective; a mark at our own hand-off."""
    figure, (panel,) = canvas(1, 1, 6.0, 4.0)
    for slo in sorted({row["slo_ms"] for row in rows}):
        mine = sorted((row for row in rows if row["slo_ms"] == slo), key=lambda row: row["delay_ms"])
        panel.plot(
            [row["delay_ms"] for row in mine], [row["of_none"] for row in mine], label=f"SLO {slo:g} ms"
        )
    panel.axvline(1e3 * tail.seconds, color="k", linestyle=":", linewidth=1, label="our hand-off, p99")
    panel.set_xscale("symlog", linthresh=0.02)
    panel.set_xlim(left=0.0)
    panel.set(
        xlabel="network delay reckoned with, ms", ylabel="goodput over that without delay", ylim=(0, 1.05)
    )
    panel.legend(frameon=False)
    _save(figure, path)


def canvas(rows: int, columns: int, width_in: float, height_in: float) -> tuple[Any, list[Any]]:
    """A figure and its panels, without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.grid(visible=True, color="0.9", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
