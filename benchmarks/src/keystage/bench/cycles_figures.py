"""Draws what `cycles` read: one panel a measure, a curve a part, over the cycles. It computes nothing.

Before it: readings by name. Matplotlib is imported inside, without pyplot (`paper_figures.canvas`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from keystage.bench.paper_figures import canvas
from keystage.bench.soak_trend import Trend

DPI = 110
PANELS = ("files", "threads", "anonymous MiB", "PSS MiB")
REST = "everything else"


def draw(
    path: Path,
    cycles: Sequence[int],
    readings: Mapping[str, Sequence[float]],
    trends: Mapping[str, Trend],
    warm_ratio: float,
) -> Path:
    """One panel for each measure of parts, and two for all that is of no part.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, panels = canvas(2, 3, 15.0, 8.0)
    for name, values in readings.items():
        part, _, measure = name.partition(": ")
        place = PANELS.index(measure) if measure in PANELS else 4 if "MiB" in name else 5
        label = part if measure in PANELS else name
        (drawn,) = panels[place].plot(cycles, values, label=label, linewidth=1.1)
        one = trends[name]
        ends = [cycles[-1] * warm_ratio, cycles[-1]]
        middle = sum(ends) / 2
        line = [one.level + one.slope * (x - middle) for x in ends]
        panels[place].plot(ends, line, color=drawn.get_color(), linestyle=":", linewidth=1.0)
    for axes, title in zip(panels, (*PANELS, "MiB of the whole", "numbers of the whole"), strict=True):
        axes.set(title=title, xlabel="replicas started and ended", yscale="symlog")
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=DPI)
    return path
