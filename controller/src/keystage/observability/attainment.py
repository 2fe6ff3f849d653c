"""Which part of the last minute's requests met their objective, from the routers' counters. Pure.

Before it: snapshots. After it: `reporting`. A single-pass stage counts items that were due there
(`due`), those of them that left it late (`late`), and those that were given up (`dropped`). A request
has missed its deadline when it left the last stage late, or was given up anywhere:

    asked  = due of the last stage + dropped of those before it
    missed = late of the last stage + dropped of all

Of looping pipelines and of stream programs the router counts whole requests: those `due`, and those of them
that were `in_time`.
"""

from __future__ import annotations

import math
from collections import deque

from keystage.controller.domain.snapshot import PipelineView
from keystage.controller.maths.estimator import is_number
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.shares import ttft_s

WINDOW_S = 60.0
_Count = tuple[float, float]


class Attainment:
    """Counts one pipeline's requests; a router seen for the first time tells where its counters stand."""

    def __init__(self) -> None:
        self._totals: dict[str, _Count] = {}
        self._window: deque[tuple[float, float, float]] = deque()
        """(seconds, asked, missed) of each look."""

    def note(self, view: PipelineView, at_s: float) -> float | None:
        """Takes in a look.

        Args:
            view: the pipeline as it is now.
            at_s: when that was (Unix seconds that do not step back).

        Returns:
            0 to 1; None where nobody counts, or no request was due in the window.
        """
        totals = _totals(view)
        if totals is None:
            return None
        asked = missed = 0.0
        for router, (now, missed_now) in totals.items():
            before, missed_before = self._totals.get(router, (now, missed_now))
            if now > before and missed_now >= missed_before:
                asked += now - before
                missed += min(now - before, missed_now - missed_before)
        self._totals = totals
        if asked > 0:
            self._window.append((at_s, asked, missed))
        while self._window and at_s - self._window[0][0] > WINDOW_S:
            self._window.popleft()
        whole = sum(entry[1] for entry in self._window)
        return 1.0 - sum(entry[2] for entry in self._window) / whole if whole > 0 else None


def token_objective_s(settings: PolicySettings, view: PipelineView) -> tuple[float | None, float | None]:
    """Bounds of TTFT and of the time per token that a looping pipeline is held to.

    The default TTFT is for one that states no objective at all, as its router counts.
    """
    if view.execution != "looping":
        return None, None
    slo = view.slo
    tpot_s = slo.tpot_s if is_number(slo.tpot_s) and slo.tpot_s > 0 else None
    is_other = tpot_s is not None or (is_number(slo.deadline_s) and slo.deadline_s > 0)
    if is_other and slo.ttft_s is None:
        return None, tpot_s
    return ttft_s(settings, slo), tpot_s


def _totals(view: PipelineView) -> dict[str, _Count] | None:
    """(asked, missed) since its start by router incarnation, None where they are not told."""
    totals: dict[str, _Count] = {}
    if view.execution != "single-pass":
        for one in view.answered:
            if not (is_number(one.due) and is_number(one.in_time)):
                return None
            totals[one.incarnation] = (one.due, one.due - one.in_time)
        return totals or None
    if not view.stages:
        return None
    last = len(view.stages) - 1
    for k, stage in enumerate(view.stages):
        for router in stage.routers:
            due, late, dropped = router.counters.due, router.counters.late, router.counters.dropped
            if due is None or late is None or dropped is None or not math.isfinite(due + late + dropped):
                return None
            asked, missed = totals.get(router.incarnation, (0.0, 0.0))
            asked += due if k == last else dropped
            missed += late + dropped if k == last else dropped
            totals[router.incarnation] = (asked, missed)
    return totals or None
