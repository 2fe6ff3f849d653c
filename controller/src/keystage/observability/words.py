"""Numbers and decisions in words, as the decision log, the page and the command line say them. Pure.

`310 ms`, `2 -> 4`, `predicted wait 310 ms > 80 ms`. A number that was not measured, or is none, has no words:
the sentence is made without it. It must not know controller or platform.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

WAITS = "waits within"
BACKLOG = "backlog of"
OVERRIDE = "override: "
HOLD = "hold: "
"""How the policy's reasons begin (`controller.policy`)."""
AS_IT_IS = "as it is"
_LAST_S = 4e9
"""Later ends than those of the next century are none (a wish without an end)."""
_MOST_NAMED = 4
_WHOLE = 8
"""An order of no more stages is told whole."""


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """What a number of replicas was decided by; None where it was not known.

    Attributes:
        predicted_wait_s: mean wait that the queueing model predicts for the replicas that are ready.
        measured_wait_s: mean wait as measured.
        allowed_wait_s: what the stage's share of the objective leaves for waiting.
        arrival_rps: arrivals a second.
        utilisation_ratio: of the replicas that are ready; None in looping pipelines, where a stage that is
            busy all the time need not let anybody wait.
        ready: how many these are.
    """

    predicted_wait_s: float | None = None
    measured_wait_s: float | None = None
    allowed_wait_s: float | None = None
    arrival_rps: float | None = None
    utilisation_ratio: float | None = None
    ready: int = 0


def known(value: float | None) -> float | None:
    """The number; None for one that is missing, not a number, or infinite."""
    return value if value is not None and math.isfinite(value) else None


def short(value: float | None) -> float | None:
    """The number with four significant digits, as reports carry it; None as `known` has it."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def duration(seconds: float) -> str:
    """Three significant digits: `0.31 ms`, `310 ms`, `1.25 s`, `95 s`, `12 min`, `3.5 h`."""
    size = abs(seconds)
    if size < 0.9995:
        return f"{_plain(seconds * 1e3)} ms"
    if size < 120:
        return f"{_plain(seconds)} s"
    if size < 7200:
        return f"{_plain(seconds / 60)} min"
    return f"{_plain(seconds / 3600)} h"


def percent(ratio: float) -> str:
    """`85 %`."""
    return f"{ratio * 100:.0f} %"


def counted(number: float, thing: str) -> str:
    """`1 replica`, `2 replicas`, `1.5 cores`."""
    return f"{number:g} {thing}" if number == 1 else f"{number:g} {thing}s"


def change(name: str, before: float | None, after: float, thing: str, why: str) -> str:
    """`stage 3: 2 -> 4, why`; a first decision: `stage 3: 1 replica at first`.

    Args:
        name: of what changes.
        before: the number before, None where there was none.
        after: the number after.
        thing: what is counted, in the singular.
        why: the cause in words, or empty.
    """
    if before is None:
        text = f"{name}: {counted(after, thing)} at first"
    elif thing == "replica":
        text = f"{name}: {before:g} -> {after:g}"
    else:
        text = f"{name}: {before:g} -> {after:g} {thing}s"
    return f"{text}, {why}" if why else text


def because(reason: str, numbers: Numbers, *, is_more: bool) -> str:
    """The policy's reason with the numbers behind it.

    Args:
        reason: what the policy says: a cause, and after `; ` what bounded or delayed it.
        numbers: what it was decided by.
        is_more: whether the number grows.
    """
    first, *rest = reason.split("; ")
    return "; ".join(part for part in (_cause(first, numbers, is_more=is_more), *rest) if part)


def until(reason: str, end_s: float | None) -> str:
    """A person's number with when it ends: `override: 3, until 12:40:11 UTC; at most 2 by label`.

    Args:
        reason: the policy's.
        end_s: Unix seconds, None where it does not end.
    """
    if not reason.startswith(OVERRIDE) or end_s is None or not 0 <= end_s < _LAST_S:
        return reason
    first, *rest = reason.split("; ")
    second = int(end_s) % 86_400
    at = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02} UTC"
    return "; ".join([f"{first}, until {at}", *rest])


def places(nodes: Sequence[str]) -> str:
    """Where new replicas go: `on n1 and 2 on n2`; empty where nobody said."""
    if not nodes:
        return ""
    found = Counter(nodes).most_common()
    named = [node if count == 1 else f"{node} ({count})" for node, count in found[:_MOST_NAMED]]
    if len(found) > _MOST_NAMED:
        named.append(f"{len(found) - _MOST_NAMED} more")
    return "on " + ", ".join(named)


def stages(order: Sequence[int], most: int) -> str:
    """The first of an order of stages: `2, 0 and 1 more`; the order counts at most `most` of them."""
    named = ", ".join(str(stage) for stage in order[:most])
    return f"{named} and {len(order) - most} more" if len(order) > most else named


def order(now: Sequence[int], before: Sequence[int], most: int) -> str:
    """An order of key stages and the one before it, so that what changed is among what is named.

    Up to 8 stages are named all; of more the first, and the part that changed where it lies behind those.

    Args:
        now: all stages, the most critical first.
        before: the same as it was, empty where there was none.
        most: how many of a long order are named.
    """
    if max(len(now), len(before)) <= _WHOLE:
        most = _WHOLE
    text = f"key stages in order: {stages(now, most)}"
    if not before:
        return text
    differ = [k for k, (one, other) in enumerate(zip(now, before, strict=False)) if one != other]
    if differ and differ[0] >= most:
        part = slice(differ[0], differ[-1] + 1)
        text += f"; from place {differ[0] + 1} on {stages(now[part], most)}"
        return f"{text} (before: {stages(before[part], most)})"
    return f"{text} (before: {stages(before, most)})"


def _cause(first: str, numbers: Numbers, *, is_more: bool) -> str:
    if first == AS_IT_IS:
        return ""
    if first.startswith(OVERRIDE):
        return f"a person asked for {first[len(OVERRIDE) :]}"
    if first.startswith(BACKLOG):
        above = _above("predicted wait", numbers.predicted_wait_s, numbers.allowed_wait_s)
        return f"{first}, {above}" if above else first
    if not first.startswith(WAITS):
        return first
    allowed_s = known(numbers.allowed_wait_s)
    if not is_more:
        return first if allowed_s is None else f"fewer keep the wait within {duration(allowed_s)}"
    return _too_long(numbers) or _kept_within(first, numbers)


def _too_long(numbers: Numbers) -> str:
    """What exceeds its bound, empty where nothing does yet."""
    predicted = _above("predicted wait", numbers.predicted_wait_s, numbers.allowed_wait_s)
    if predicted:
        return predicted
    busy = known(numbers.utilisation_ratio)
    if busy is not None and busy >= 1:
        return f"{percent(busy)} of what {counted(numbers.ready, 'replica')} can do: waits grow without bound"
    return _above("measured wait", numbers.measured_wait_s, numbers.allowed_wait_s)


def _kept_within(first: str, numbers: Numbers) -> str:
    allowed_s, rate_rps = known(numbers.allowed_wait_s), known(numbers.arrival_rps)
    if allowed_s is None:
        return first
    within = f"to keep the wait within {duration(allowed_s)}"
    return within if rate_rps is None else f"{within} at {_plain(rate_rps)} arrivals/s"


def _above(what: str, value_s: float | None, bound_s: float | None) -> str:
    value_s, bound_s = known(value_s), known(bound_s)
    if value_s is None or bound_s is None or value_s <= bound_s:
        return ""
    return f"{what} {duration(value_s)} > {duration(bound_s)}"


def _plain(value: float) -> str:
    """Three significant digits without an exponent where that is readable."""
    if value == 0 or not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{float(f'{value:.3g}'):g}"
