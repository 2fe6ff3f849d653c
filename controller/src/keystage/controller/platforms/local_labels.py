"""A function's scale labels as the policy's bounds.

Before it: `keystage.local.labels` read them, and refused at deploy what is not honoured. Here nothing is
refused: a world that let something else through (a stock gateway) is steered by the defaults of OpenFaaS,
with the bounds that can be read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from keystage.controller.domain.snapshot import Target
from keystage.local import labels
from keystage.local.labels import ScaleLabels


@dataclasses.dataclass(frozen=True, slots=True)
class Scaling:
    """What labels ask for, in the snapshot's terms (`FunctionView`)."""

    min_replicas: int
    max_replicas: int
    zero_after_s: float | None
    target: Target | None


def scaling_of(given: Mapping[str, str], role: str) -> Scaling:
    """Reads the labels of a function; total."""
    try:
        asked = labels.parse(_effective(given), role)
    except ValueError:
        asked = _lenient(given)
    return Scaling(
        min_replicas=asked.min,
        max_replicas=asked.max,
        zero_after_s=asked.zero_duration_s if asked.zero else None,
        target=_target(asked),
    )


def _effective(given: Mapping[str, str]) -> dict[str, str]:
    """Without what has no effect on a stock gateway either, as long as another label is missing."""
    lone = {labels.ZERO_DURATION} if given.get(labels.ZERO, "false") == "false" else set()
    if not any(name in given for name in (labels.TARGET, labels.TARGET_PROPORTION, labels.TYPE)):
        lone.add(labels.FACTOR)
    return {name: value for name, value in given.items() if name not in lone}


def _target(asked: ScaleLabels) -> Target | None:
    if asked.target is None or asked.factor == 0:
        return None
    step = None if asked.factor is None else math.ceil(asked.max * asked.factor / 100)
    return Target(asked.type, asked.target * asked.target_proportion, step)


def _lenient(given: Mapping[str, str]) -> ScaleLabels:
    least = _number(given, labels.MIN, labels.DEFAULT_MIN)
    return ScaleLabels(min=least, max=_number(given, labels.MAX, labels.DEFAULT_MAX))


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default
