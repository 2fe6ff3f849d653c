"""Which part of their time the workers of a looping stage computed lately, from their busy seconds. Pure.

Before it: snapshots. After it: `reporting`. The policy's own estimate is over a minute, so it says little of
a load that began ten seconds ago. Workers tell their busy seconds once a second: a shorter window would
flicker.
"""

from __future__ import annotations

from collections import deque

from keystage.controller.domain.snapshot import StageView
from keystage.controller.maths.estimator import is_number

WINDOW_S = 10.0
LEAST_S = 2.0
"""Differences over less say more of when workers told than of what they did."""


class Busy:
    """Remembers the busy seconds of one stage's workers."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[str, float]]] = deque()
        """(seconds, busy seconds by worker) of each look."""

    def note(self, stage: StageView, at_s: float) -> float | None:
        """Takes in a look.

        Args:
            stage: as it is now.
            at_s: when that was (Unix seconds that do not step back).

        Returns:
            0 to 1, over the time that each worker was seen in the window; None where that is too short.
        """
        now = {worker.replica: worker.busy_s for worker in stage.workers if is_number(worker.busy_s)}
        while len(self._looks) > 1 and at_s - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()
        busy_s = seen_s = 0.0
        found: set[str] = set()
        for then_s, before in self._looks:
            for replica in now.keys() & before.keys() - found:
                found.add(replica)
                if now[replica] >= before[replica]:
                    busy_s += now[replica] - before[replica]
                    seen_s += at_s - then_s
        if not self._looks or at_s > self._looks[-1][0]:
            self._looks.append((at_s, now))
        return min(1.0, busy_s / seen_s) if seen_s >= LEAST_S else None
