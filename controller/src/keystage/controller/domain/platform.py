"""The port between the controller and the world it steers.

Local processes, Kubernetes and the simulator each implement it and pass one contract suite. The
policy never sees it; the loop calls nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from keystage.controller.domain.decision import Action
from keystage.controller.domain.snapshot import Snapshot


class PlatformError(Exception):
    """The world could not be seen or changed now; the loop holds its last decision and backs off."""


class Platform(Protocol):
    """A world of functions and replicas."""

    def observe(self) -> Snapshot:
        """Looks at the world.

        Statistics of a pipeline that cannot be read are marked `missing` in the snapshot.

        Raises:
            PlatformError: the functions themselves cannot be read.
        """
        ...

    def apply(self, actions: Sequence[Action]) -> None:
        """States desired values. Idempotent; an action on a function that is gone is nothing.

        Raises:
            PlatformError: an action could not be stated; doing all of them again does no harm.
        """
        ...
