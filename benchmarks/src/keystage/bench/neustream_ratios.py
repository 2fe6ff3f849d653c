"""Scores of `bench neustream` as rows and figures: paired ratios with intervals, beside the paper's.

Between `neustream_cells` (scores) and `neustream` (what is shown). Ratios are ours over the rival's goodput
at the same arrivals, seed by seed; a system that served nobody counts as having served one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from keystage.bench.frame import Figure
from keystage.bench.neustream_cells import (
    CLOCKWORK,
    OURS,
    PADDED,
    PREFILL_FIRST,
    TITLES,
    UNTUNED,
    Cell,
    Score,
    base,
)
from keystage.bench.neustream_models import DIFFUSION
from keystage.bench.paper_ratios import interval

PRINTED_REQUESTS = 500
_MOST_SPREAD_RATIO = 3.0
"""Ratios over a rival that serves next to nobody spread widely; what they say is their size."""


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """A cell.

    Attributes:
        cell: which.
        ours: scores by seed.
        theirs: scores by seed of each rival.
    """

    cell: Cell
    ours: Sequence[Score]
    theirs: Mapping[str, Sequence[Score]]

    def samples(self, rival: str) -> list[float]:
        """Ratio of each seed."""
        pairs = zip(self.ours, self.theirs[rival], strict=True)
        return [max(1.0, a.good) / max(1.0, b.good) for a, b in pairs]

    def ratio(self, rival: str) -> tuple[float, float, float]:
        """Geometric mean and its 95 % interval over seeds."""
        mean, half = interval([math.log(sample) for sample in self.samples(rival)])
        return math.exp(mean), math.exp(mean - half), math.exp(mean + half)

    def share(self, system: str) -> float:
        """Good over offered."""
        scores = self.ours if system == OURS else self.theirs[system]
        return sum(s.good for s in scores) / sum(s.offered for s in scores)

    def batch(self, system: str) -> float:
        """Mean batch."""
        scores = self.ours if system == OURS else self.theirs[system]
        return sum(s.batch for s in scores) / len(scores)


def compare(scores: Sequence[Score]) -> list[Compared]:
    """Scores by cell, in the order in which cells first appear."""
    by_cell: dict[Cell, dict[str, list[Score]]] = {}
    for score in scores:
        by_cell.setdefault(score.run.cell, {}).setdefault(score.run.system, []).append(score)
    return [
        Compared(
            cell,
            sorted(systems[OURS], key=lambda s: s.run.seed),
            {name: sorted(mine, key=lambda s: s.run.seed) for name, mine in systems.items() if name != OURS},
        )
        for cell, systems in by_cell.items()
    ]


_PAPER = {
    ("opt", "rate", 2.0): "1.53",
    ("opt", "rate", 4.0): "37.21",
    ("opt", "cv", 4.0): "2.25",
    ("opt", "scale", 1.2): "7.98",
    ("own", "rate", 1.0): "13.46",
    ("own", "cv", 4.0): "1.54",
    ("own", "scale", 1.4): "2.93",
    ("s2", "rate", 4.0): "5.26",
} | {
    (part, what, value): text
    for part in ("sd", "xl", "s2")
    for what, value, text in (("cv", 4.0, "1.37 to 4.04"), ("scale", 1.2, "up to 3.13"))
}
"""Ratios that sections 6.2 to 6.4 print, by part and by what is changed from the base."""


def paper_ratio(cell: Cell) -> str:
    """What the paper prints for this cell, empty for nothing."""
    usual = base(cell.part)
    changed = [
        (name, value)
        for name, value, other in (
            ("rate", cell.rate_rps, usual.rate_rps),
            ("cv", cell.cv, usual.cv),
            ("scale", cell.scale, usual.scale),
        )
        if value != other
    ]
    if cell.is_fixed or len(changed) > 1:
        return ""
    what, value = changed[0] if changed else ("rate", cell.rate_rps)
    return _PAPER.get((cell.part, what, value), "")


def printed_share(cell: Cell) -> float | None:
    """What Clockwork served of 500 requests at this load by its published log, as a share."""
    by_part = dict(zip(("sd", "xl", "s2"), DIFFUSION, strict=True))
    model = by_part.get(cell.part)
    if model is None or cell.is_fixed:
        return None
    usual = base(cell.part)
    if (cell.cv, cell.scale) == (usual.cv, usual.scale):
        good = model.printed.get(("rate", cell.rate_rps))
    elif (cell.rate_rps, cell.scale) == (usual.rate_rps, usual.scale):
        good = model.printed.get(("cv", cell.cv))
    elif (cell.rate_rps, cell.cv) == (usual.rate_rps, usual.cv):
        good = model.printed.get(("scale", cell.scale))
    else:
        good = None
    return None if good is None else good / PRINTED_REQUESTS


def row(one: Compared) -> dict[str, Any]:
    """A row of the table."""
    cell = one.cell
    rival = CLOCKWORK if CLOCKWORK in one.theirs else PREFILL_FIRST
    ratio, low, high = one.ratio(rival)
    printed = printed_share(cell)
    shown = {
        "program": TITLES[cell.part] + (", equal steps" if cell.is_fixed else ""),
        "req/s": cell.rate_rps,
        "CV": cell.cv,
        "SLO x": cell.scale,
        "ours": f"{one.share(OURS):.1%}",
        rival: f"{one.share(rival):.1%}",
    }
    other = PADDED if PADDED in one.theirs else UNTUNED
    if printed is not None:
        shown["log of the paper"] = f"{printed:.1%}"
    shown[other] = f"{one.share(other):.1%}"
    if rival == PREFILL_FIRST:
        shown["first tokens too"] = f"{_strict(one.ours)} / {_strict(one.theirs[rival])}"
    if len(one.ours[0].each) > 1:
        shown["ours, each agent"] = _each(one.ours)
        shown["theirs, each"] = _each(one.theirs[rival])
    shown["ratio"] = f"{ratio:.3g} ({low:.3g} .. {high:.3g})"
    shown["paper's"] = paper_ratio(cell)
    ratio, low, high = one.ratio(other)
    shown[f"to {other}"] = f"{ratio:.3g} ({low:.3g} .. {high:.3g})"
    shown["batch"] = f"{one.batch(OURS):.1f}"
    shown["theirs"] = f"{one.batch(rival):.1f}"
    return shown


def _strict(scores: Sequence[Score]) -> str:
    """Share whose first tokens were in time as well."""
    return f"{sum(score.strict for score in scores) / sum(score.offered for score in scores):.1%}"


def _each(scores: Sequence[Score]) -> str:
    """Shares of the agents, means over seeds."""
    columns = zip(*(score.each for score in scores), strict=True)
    return " / ".join(f"{sum(column) / len(scores):.1%}" for column in columns)


def figures(compared: Sequence[Compared]) -> dict[str, Figure]:
    """The figures, by name."""
    found: dict[str, Figure] = {}
    for one in compared:
        name = _name(one.cell)
        rival = CLOCKWORK if CLOCKWORK in one.theirs else PREFILL_FIRST
        printed = paper_ratio(one.cell)
        if name:
            found[name] = Figure(
                one.samples(rival),
                f"goodput of ours over {rival}, {TITLES[one.cell.part]}, {_words(one.cell)}",
                f"the paper's {printed}" if printed else "",
                _MOST_SPREAD_RATIO,
            )
    for part in dict.fromkeys(one.cell.part for one in compared):
        mine = [one for one in compared if one.cell.part == part]
        rival = CLOCKWORK if CLOCKWORK in mine[0].theirs else PREFILL_FIRST
        best = max(mine, key=lambda one: one.ratio(rival)[0])
        found[f"{part}_most_ratio"] = Figure(
            best.samples(rival),
            f"the same where it is highest, {TITLES[part]}, {_words(best.cell)}",
            {"s2": "the paper's up to 5.26"}.get(part, ""),
            _MOST_SPREAD_RATIO,
        )
        least = min(mine, key=lambda one: one.ratio(rival)[0])
        found[f"{part}_least_ratio"] = Figure(
            least.samples(rival),
            f"the same where it is lowest, {TITLES[part]}, {_words(least.cell)}",
            "",
            _MOST_SPREAD_RATIO,
        )
    return found


def _words(cell: Cell) -> str:
    return f"{cell.rate_rps:g} req/s, CV {cell.cv:g}, {cell.scale:g} x"


def _name(cell: Cell) -> str:
    """Name of a cell's own figure, empty for none."""
    usual = base(cell.part)
    if cell.is_fixed:
        return ""
    if cell.cv == 4.0 and cell.scale == 1.2:
        return f"{cell.part}_cv4_slo12_ratio"
    if cell.cv == 4.0 and usual.cv != 4.0:
        return f"{cell.part}_cv4_ratio"
    if cell.scale != usual.scale and paper_ratio(cell):
        return f"{cell.part}_slo{cell.scale * 10:.0f}_ratio"
    if cell.cv == usual.cv and cell.scale == usual.scale and paper_ratio(cell):
        return f"{cell.part}_rate{cell.rate_rps:g}_ratio"
    return ""


def losses(compared: Sequence[Compared]) -> list[str]:
    """Every cell in which a rival serves more, with its interval."""
    found = []
    for one in compared:
        for rival in one.theirs:
            ratio, low, high = one.ratio(rival)
            if ratio < 0.995:
                sure = "" if high < 1 else ", not told apart"
                found.append(
                    f"{TITLES[one.cell.part]}, {_words(one.cell)}: {ratio:.3f} of {rival} "
                    f"({low:.3f} .. {high:.3f}{sure})"
                )
    return found
