"""One search for the parameters of every policy: same budget, same worlds, same rules.

Before it: a policy declares ranges (`baselines.tunable`) and somebody scores settings. After it: the values
that scored best. Deterministic by seed. It knows no policy and no simulator.

The first trial is the policy's defaults, so that tuning never makes anything worse on the tuning worlds. Half
of the budget is a Latin hypercube (each parameter's range is covered evenly), the rest are steps from the
best so far: one to three parameters move, by less and less.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

from keystage.baselines.tunable import Choice, Range, Ranges

Value = str | bool | float
Values = dict[str, Value]

_LEAST_STEP = 0.05
_FIRST_STEP = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """Values tried, and what came of them (less is better; infinite: unusable)."""

    values: Values
    score: float


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Outcome of a search.

    Attributes:
        best: the trial with the lowest score, the earliest of equals.
        trials: all, in order; the first is the defaults.
    """

    best: Trial
    trials: tuple[Trial, ...]


def search(score: Callable[[Values], float], ranges: Ranges, budget: int, seed: int) -> Found:
    """Looks for values with a low score.

    Args:
        score: what values are worth (none: the defaults); less is better, NaN counts as infinite.
        ranges: what may be changed.
        budget: how often `score` is called, at least 1; once where there is nothing to change.
        seed: of the search.

    Raises:
        ValueError: budget below 1.
    """
    if budget < 1:
        raise ValueError(f"a search needs a budget of at least 1 trial, got {budget}")
    draw = random.Random(seed)
    names = sorted(ranges)
    trials: list[Trial] = []

    def attempt(values: Values) -> None:
        got = score(values)
        trials.append(Trial(values, math.inf if math.isnan(got) else got))

    attempt({})
    wide = budget // 2 if names else 0
    for point in _hypercube(len(names), min(wide, budget - 1), draw):
        attempt({name: value_at(ranges[name], place) for name, place in zip(names, point, strict=True)})
    rest = budget - len(trials) if names else 0
    for k in range(rest):
        width = _FIRST_STEP * (_LEAST_STEP / _FIRST_STEP) ** (k / max(1, rest - 1))
        values = dict(_best(trials).values)
        for name in draw.sample(names, min(len(names), draw.choice((1, 1, 2, 3)))):
            values[name] = _moved(ranges[name], values.get(name), width, draw)
        attempt(values)
    return Found(_best(trials), tuple(trials))


def value_at(span: Range | Choice, place: float) -> Value:
    """The value at a place in 0..1 of a range."""
    if isinstance(span, Choice):
        return span.values[min(len(span.values) - 1, int(place * len(span.values)))]
    if span.is_log:
        value = math.exp(math.log(span.low) + place * (math.log(span.high) - math.log(span.low)))
    else:
        value = span.low + place * (span.high - span.low)
    value = min(span.high, max(span.low, value))
    return round(value) if span.is_whole else value


def place_of(span: Range, value: float) -> float:
    """The inverse of `value_at`; a value outside the range goes to its nearer end."""
    if span.high == span.low:
        return 0.0
    value = min(span.high, max(span.low, value))
    if span.is_log:
        return (math.log(value) - math.log(span.low)) / (math.log(span.high) - math.log(span.low))
    return (value - span.low) / (span.high - span.low)


def _best(trials: list[Trial]) -> Trial:
    return min(trials, key=lambda trial: trial.score)


def _moved(span: Range | Choice, value: Value | None, width: float, draw: random.Random) -> Value:
    """A value near one; anywhere where it is not known (a default) or has no order."""
    if isinstance(span, Choice) or value is None or isinstance(value, str):
        return value_at(span, draw.random())
    place = place_of(span, float(value)) + draw.gauss(0.0, width)
    return value_at(span, min(1.0, max(0.0, place)))


def _hypercube(dimensions: int, count: int, draw: random.Random) -> list[tuple[float, ...]]:
    columns = []
    for _ in range(dimensions):
        column = [(i + draw.random()) / count for i in range(count)]
        draw.shuffle(column)
        columns.append(column)
    return list(zip(*columns, strict=True)) if columns else []
