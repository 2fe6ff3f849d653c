"""Numbers and names of a report as people read them in a terminal. Pure.

Used by `report_tables`, `explaining` and `top_view`. Texts that a server sent pass `clean`: whoever answers
must not steer the reader's terminal.
"""

from __future__ import annotations

import unicodedata

from keystage.observability import words
from keystage.observability.api import PipelineReport

NOTHING = "-"
"""Stands for what was not measured."""
LEAST = 1e-3
"""Estimates decay and never end: a smaller rate, queue or score says nothing."""
GIB = 1 << 30
MIB = 1 << 20
MOST_RATIO = 10.0
"""Beyond it a ratio is read as times, not in percent."""


def clean(text: str, most: int = 400) -> str:
    """Text without control and format characters, which are shown as U+FFFD; cut where it is long."""
    cut = text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return "".join(
        " " if c in "\n\t" else "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c)[0] == "C" else c
        for c in cut
    )


def duration(seconds: float | None) -> str:
    """A time with the unit that fits, `-` for None."""
    return NOTHING if seconds is None else words.duration(seconds)


def objective(pipeline: PipelineReport) -> str:
    """What its requests are held to: `2 s`, `TTFT 2 s, TPOT 100 ms`; `-` for nothing."""
    bounds = (("", pipeline.deadline_s), ("TTFT ", pipeline.ttft_s), ("TPOT ", pipeline.tpot_s))
    stated = [f"{name}{duration(bound_s)}" for name, bound_s in bounds if bound_s is not None]
    return ", ".join(stated) or NOTHING


def rate(rps: float | None) -> str:
    """Something a second, `-` for None."""
    return NOTHING if rps is None else f"{number(rps)}/s"


def percent(ratio: float | None) -> str:
    """A ratio, `-` for None."""
    return NOTHING if ratio is None else words.percent(ratio)


def number(value: float | None) -> str:
    """Three digits that count, all of a whole number, `-` for None; what is next to nothing is 0."""
    if value is None:
        return NOTHING
    if abs(value) < LEAST:
        return "0"
    if abs(value) >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}"


def size(nbytes: float) -> str:
    """Bytes with the unit that fits."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"


def named(name: str, value: float) -> str:
    """One input of a decision in words: its name without the unit, its value with it.

    >>> named("wait_s", 0.31), named("utilisation_ratio", 0.9), named("arrival_cv", 3.0)
    ('wait 310 ms', 'utilisation 90 %', 'arrival CV 3')
    """
    ratio = percent if abs(value) <= MOST_RATIO else _times
    for suffix, shown in (("_s", duration), ("_rps", rate), ("_ratio", ratio), ("_bytes", size)):
        if name.endswith(suffix) and len(name) > len(suffix):
            return f"{_plain(name.removesuffix(suffix))} {shown(value)}"
    return f"{_plain(name)} {number(value)}"


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times"


def _plain(name: str) -> str:
    parts = clean(name).replace("-", "_").split("_")
    return " ".join("CV" if word == "cv" else word for word in parts if word)
