"""What gateways say they have in hand for each function; the newest word of each, for a while.

Written by gateways over the control socket, read by the controller. Kept in memory only: a supervisor that
restarts has restarted every replica with it. Pure bookkeeping, time comes in; it must not judge.
"""

from __future__ import annotations

import msgspec

from keystage.local.api import Load
from keystage.local.errors import BadDeployment

KEPT_S = 60.0
"""A gateway that lives repeats itself several times within this while it has anything in flight."""
MAX_GATEWAYS = 64
MAX_NAME = 128


class Loads:
    """The newest report of each gateway, by function."""

    def __init__(self) -> None:
        self._loads: dict[str, dict[str, Load]] = {}

    def hear(self, function: str, load: Load, at_s: float) -> None:
        """Takes a report; what that gateway said before is replaced, also by an older one that was late.

        Raises:
            BadDeployment: its name or numbers are out of bounds.
        """
        if not 1 <= len(load.gateway) <= MAX_NAME:
            raise BadDeployment(
                f"function {function}: gateway must have 1..{MAX_NAME} characters, not {len(load.gateway)}"
            )
        for name, value in (("in_flight", load.in_flight), ("started", load.started)):
            if value < 0:
                raise BadDeployment(f"function {function}: {name} must be at least 0, not {value}")
        mine = self._loads.setdefault(function, {})
        mine.pop(load.gateway, None)
        mine[load.gateway] = msgspec.structs.replace(load, at_s=at_s)
        if len(mine) > MAX_GATEWAYS:
            del mine[next(iter(mine))]  # silent for longest

    def of(self, function: str, at_s: float) -> tuple[Load, ...]:
        """Reports on a function that are not too old, the oldest first."""
        mine = self._loads.get(function, {})
        return tuple(load for load in mine.values() if at_s - load.at_s <= KEPT_S)

    def in_flight(self, function: str, at_s: float) -> int:
        """Requests that gateways have in hand for a function."""
        return sum(load.in_flight for load in self.of(function, at_s))

    def forget(self, function: str) -> None:
        """The function is removed."""
        self._loads.pop(function, None)
