"""Keystage's policy as a `Steering`: `decide` with its state carried from call to call.

Before it: the simulator. After it: the same actions the real loop would apply. It adds nothing to
`decide`; `decisions` keeps the last decision for those who want the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystage.controller.domain.decision import Action, Decision
from keystage.controller.domain.snapshot import Snapshot
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings


class Keystage:
    """The policy at work in a simulated world.

    Args:
        settings: the policy's settings.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._state = PolicyState()
        self.last: Decision | None = None

    def steer(self, snapshot: Snapshot) -> Sequence[Action]:
        """See `Steering.steer`."""
        self.last = decide(self._settings, snapshot, self._state)
        self._state = self.last.state
        return self.last.actions
