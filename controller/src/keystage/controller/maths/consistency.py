"""Samples that cannot belong to those before them: counters that fell, a router that stands still.

Before it: a router's counters as a vector. After it: `estimator` holds what it knew. A router that restarts
has another incarnation, so neither can be one's ordinary life; a garbled answer, a cache in between or
two that mix up their names can make them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from keystage.controller.domain.state import EstimatorState

FLOWS = 7
"""Cumulative counters in a router's vector; queue and in-flight items come after them."""

Vectors = Mapping[str, tuple[float, ...]]
"""Counters by router incarnation."""


def moves(state: EstimatorState, clocks: Mapping[str, float], at_s: float) -> dict[str, float]:
    """When each router's clock was seen to have moved last, in snapshot seconds, at most `at_s`."""
    before, seen = state.moved, state.clocks
    return {
        name: min(at_s, before.get(name, at_s)) if seen.get(name) == clock else at_s
        for name, clock in clocks.items()
    }


def contradiction(
    stale_s: float, state: EstimatorState, now: Vectors, moved: Mapping[str, float], at_s: float
) -> str:
    """Why a sample cannot be believed, empty where it can.

    Counters that fell are believed once they stay so for `stale_s`: then the sample before was the wrong one,
    and the time between is counted for nothing.

    Args:
        stale_s: seconds of patience.
        state: memory of the samples before.
        now: counters of this one.
        moved: see `moves`.
        at_s: time of this sample in seconds.
    """
    if state.at_s is None or at_s < state.at_s:
        return ""
    if (name := fallen(state, now)) and at_s - state.at_s <= stale_s:
        return f"counters of router {name} went back"
    for name in now if len(now) > 1 else ():
        if at_s - moved[name] > stale_s:
            return f"statistics of router {name} stand still for {at_s - moved[name]:.1f} s"
    return ""


def fallen(state: EstimatorState, now: Vectors) -> str:
    """The first router of which a counter is less than it was, empty where there is none."""
    for name, values in now.items():
        if _is_less(values, state.routers.get(name, ())):
            return name
    return ""


def peaks(state: EstimatorState, now: Vectors) -> tuple[dict[str, tuple[float, ...]], bool]:
    """What routers' counters were before they fell, and whether one is there again.

    Counters that come back to what they were in one step did not count that step, whichever of the two was
    garbled. Where they grow there by themselves nothing is lost but this sample's growth.

    Args:
        state: memory of the samples before.
        now: counters of this one.
    """
    kept: dict[str, tuple[float, ...]] = {}
    is_back = False
    for name, values in now.items():
        peak, old = state.peaks.get(name), state.routers.get(name, ())
        if _is_less(values, old) and (peak is None or not _is_less(old, peak)):
            kept[name] = old
        elif peak is not None and _is_less(values, peak):
            kept[name] = peak
        elif peak is not None:
            is_back = True
    return kept, is_back


def _is_less(values: tuple[float, ...], before: tuple[float, ...]) -> bool:
    return any(now < then for now, then in zip(values[:FLOWS], before, strict=False))
