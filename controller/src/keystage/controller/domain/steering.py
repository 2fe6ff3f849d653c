"""The port of everything that can steer a world: Keystage's policy, and its rivals.

Before it: a world was observed. After it: the actions are applied. A steering may remember things
between calls (time comes with the snapshot); it must not read a clock, a file or unseeded numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from keystage.controller.domain.decision import Action
from keystage.controller.domain.snapshot import Snapshot


class Steering(Protocol):
    """Decides for one world."""

    def steer(self, snapshot: Snapshot) -> Sequence[Action]:
        """Answers what shall change now; total: missing data means no change, never an exception."""
        ...
