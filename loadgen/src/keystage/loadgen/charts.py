"""Line and bar charts as SVG text, for a page without scripts, in light and dark.

Comes after `curves`; `html` puts the charts into a page and gives colours by the classes `s0`..`s7`.
A chart is 480 units wide with letters of 15: on a narrow screen of 360 pixels they are still 10 high.
Series are told apart by dashes and names beside colours. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from html import escape

from keystage.loadgen.curves import ticks

WIDTH, HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 52
_DASHES = ("", "7 4", "2 3", "10 3 2 3", "4 2", "1 2", "12 4", "6 2 2 2")
_LEGEND_LINE = 21

Scale = Callable[[float], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One series.

    Attributes:
        name: in the legend.
        points: x and y; None as y breaks the line.
        steps: a value holds until the next, instead of a straight line between them.
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    steps: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn.

    Attributes:
        title: shown above the chart.
        says: the same in words, for whoever cannot see it.
        x_label: with unit.
        y_label: with unit.
        lines: series.
        bars: from, to, height.
        bounds: horizontal lines with a name.
        marks: x at which something failed, drawn as crosses at the top.
        mark_name: what they are.
        x_ticks: places and texts, derived if None.
        y_least: the axis goes up to this at least.
    """

    title: str
    says: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    bars: Sequence[tuple[float, float, float]] = ()
    bounds: Sequence[tuple[float, str]] = ()
    marks: Sequence[float] = ()
    mark_name: str = "failed"
    x_ticks: Sequence[tuple[float, str]] | None = None
    y_least: float = 0.0


def svg(chart: Chart, name: str) -> str:
    """The chart as an `svg` element.

    Args:
        chart: what is drawn.
        name: unique in the page, of letters and digits.
    """
    legend = _legend(chart)
    x_marks, y_marks = _marks(chart)
    x = _scale(x_marks[0][0], x_marks[-1][0], _LEFT, WIDTH - _RIGHT)
    y = _scale(0.0, y_marks[-1], HEIGHT - _BOTTOM, _TOP)
    high = HEIGHT + _LEGEND_LINE * len(legend)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {high}" role="img" aria-labelledby="{name}-t {name}-d">',
        f'<title id="{name}-t">{escape(chart.title)}</title><desc id="{name}-d">{escape(chart.says)}</desc>',
        *_axes(chart, x, y, x_marks, y_marks),
        *_bars(chart, x, y),
        *(_bound(k, value, y, len(chart.lines)) for k, (value, _) in enumerate(chart.bounds)),
        *(_line(line, k, x, y) for k, line in enumerate(chart.lines)),
        *(_cross(x(at)) for at in chart.marks),
        *legend,
        "</svg>",
    ]
    return "".join(parts)


def _marks(chart: Chart) -> tuple[list[tuple[float, str]], list[float]]:
    points = [point for line in chart.lines for point in line.points]
    highest = max(
        [
            *(v for _, v in points if v is not None),
            *(v for v, _ in chart.bounds),
            *(bar[2] for bar in chart.bars),
            chart.y_least,
            1e-9,
        ]
    )
    if chart.x_ticks is not None:
        return list(chart.x_ticks), ticks(highest)
    end = max([*(at for at, _ in points), *(bar[1] for bar in chart.bars), 1e-9])
    kept = [at for at in ticks(end) if at <= end * (1 + 1e-9)]
    return [(at, _number(at)) for at in kept] + ([(end, "")] if kept[-1] < end else []), ticks(highest)


def _scale(low: float, high: float, begin: float, end: float) -> Scale:
    return lambda value: begin + (value - low) / (high - low) * (end - begin)


def _axes(
    chart: Chart, x: Scale, y: Scale, x_marks: Sequence[tuple[float, str]], y_marks: Sequence[float]
) -> list[str]:
    parts = []
    for value in y_marks:
        at = f"{y(value):.1f}"
        parts.append(f'<path class="grid" d="M{_LEFT} {at}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{at}" dy=".35em" class="end">{_number(value)}</text>')
    for place, text in x_marks:
        at = f"{x(place):.1f}"
        last = "end" if x(place) > WIDTH - _RIGHT - 12 else "mid"
        parts.append(f'<path class="axis" d="M{at} {HEIGHT - _BOTTOM}v5"/>')
        if text:
            parts.append(f'<text x="{at}" y="{HEIGHT - _BOTTOM + 20}" class="{last}">{escape(text)}</text>')
    middle_x, middle_y = (_LEFT + WIDTH - _RIGHT) / 2, (_TOP + HEIGHT - _BOTTOM) / 2
    parts.append(f'<path class="axis" d="M{_LEFT} {HEIGHT - _BOTTOM}H{WIDTH - _RIGHT}"/>')
    parts.append(f'<text x="{middle_x}" y="{HEIGHT - 10}" class="mid">{escape(chart.x_label)}</text>')
    parts.append(
        f'<text transform="translate(15 {middle_y})rotate(-90)" class="mid">{escape(chart.y_label)}</text>'
    )
    return parts


def _bars(chart: Chart, x: Scale, y: Scale) -> list[str]:
    base = y(0.0)
    return [
        f'<rect class="bar" x="{x(low):.1f}" y="{y(height):.1f}" '
        f'width="{max(x(high) - x(low) - 0.6, 0.6):.1f}" height="{base - y(height):.1f}"/>'
        for low, high, height in chart.bars
        if height > 0
    ]


def _line(line: Line, place: int, x: Scale, y: Scale) -> str:
    words, before = [], None
    for at, value in line.points:
        if value is None or not math.isfinite(value):
            before = None
            continue
        if before is None:
            words.append(f"M{x(at):.1f} {y(value):.1f}")
        elif line.steps:
            words.append(f"H{x(at):.1f}V{y(value):.1f}")
        else:
            words.append(f"L{x(at):.1f} {y(value):.1f}")
        before = value
    return f'<path class="line s{place % 8}"{_dash(place)} d="{"".join(words)}"/>'


def _dash(place: int) -> str:
    dash = _DASHES[place % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _bound(place: int, value: float, y: Scale, lines: int) -> str:
    at, place = f"{y(value):.1f}", lines + place
    return f'<path class="line s{place % 8}"{_dash(place)} d="M{_LEFT} {at}H{WIDTH - _RIGHT}"/>'


def _cross(at: float) -> str:
    return f'<path class="fail" d="M{at - 4:.1f} {_TOP}l8 8m0 -8l-8 8"/>'


def _legend(chart: Chart) -> list[str]:
    named = [(line.name, k) for k, line in enumerate(chart.lines)]
    named += [(name, len(chart.lines) + k) for k, (_, name) in enumerate(chart.bounds)]
    parts = []
    if len(named) > 1 or chart.bounds:
        for row, (name, place) in enumerate(named):
            at = HEIGHT + 6 + _LEGEND_LINE * row
            parts.append(
                f'<g><path class="line s{place % 8}"{_dash(place)} d="M{_LEFT} {at}h40"/>'
                f'<text x="{_LEFT + 50}" y="{at}" dy=".35em">{escape(name)}</text></g>'
            )
    if chart.marks:
        at = HEIGHT + 6 + _LEGEND_LINE * len(parts)
        parts.append(
            f'<g><path class="fail" d="M{_LEFT + 16} {at - 4}l8 8m0 -8l-8 8"/>'
            f'<text x="{_LEFT + 50}" y="{at}" dy=".35em">{escape(chart.mark_name)}</text></g>'
        )
    return parts


def _number(value: float) -> str:
    return f"{value:.4g}"
