"""What gateways say they have in hand for each function; the newest word of each, for a while.

Written by gateways over the control socket, read by the controller, and by the ledger: a replica that has
requests is neither told to stop nor held to be hung. Kept in memory only: a supervisor that restarts has
restarted every replica with it. Pure bookkeeping, time comes in; it must not act.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from keystage.local.api import Load
from keystage.local.checks import check_load
from keystage.local.errors import BadDeployment

KEPT_S = 60.0
"""A gateway that lives repeats itself several times within this while it has anything in flight."""
ANSWER_S = 5.0
"""A gateway that has told of a function tells again at once when a replica leaves the routing, within
milliseconds; one that is silent for so long is gone, and only what it said last is waited for."""
MAX_GATEWAYS = 64


class Loads:
    """The newest report of each gateway, by function."""

    def __init__(self) -> None:
        self._loads: dict[str, dict[str, Load]] = {}

    def hear(self, function: str, load: Load, at_s: float) -> None:
        """Takes a report; what that gateway said before is replaced, also by an older one that was late.

        Raises:
            BadDeployment: its name or numbers are out of bounds.
        """
        try:
            check_load(function, load)
        except ValueError as error:
            raise BadDeployment(str(error)) from None
        mine = self._loads.setdefault(function, {})
        mine.pop(load.gateway, None)
        mine[load.gateway] = msgspec.structs.replace(load, at_s=at_s)
        if len(mine) > MAX_GATEWAYS:
            del mine[next(iter(mine))]  # silent for longest

    def of(self, function: str, at_s: float) -> tuple[Load, ...]:
        """Reports on a function that are not too old, the oldest first."""
        mine = self._loads.get(function, {})
        return tuple(load for load in mine.values() if at_s - load.at_s <= KEPT_S)

    def is_at_work(self, function: str, replica: str, at_s: float) -> bool:
        """Whether gateways say that a replica has requests of theirs."""
        return any(load.replicas.get(replica) for load in self.of(function, at_s))

    def may_have_work(self, function: str, replica: str, left_s: float, at_s: float) -> bool:
        """Whether a replica that left the routing may still have requests, or get one.

        It has none when every gateway has said since that it neither gives it any nor waits for any.

        Args:
            function: its function.
            replica: its name.
            left_s: when it left the routing.
            at_s: now.
        """
        is_awaited = at_s - left_s < ANSWER_S
        return any(
            load.replicas.get(replica) or (is_awaited and (load.at_s <= left_s or replica in load.replicas))
            for load in self.of(function, at_s)
        )

    def keep_only(self, functions: Callable[[str], bool]) -> None:
        """Forgets functions that are gone.

        Args:
            functions: says whether there is one of that name.
        """
        for gone in [name for name in self._loads if not functions(name)]:
            del self._loads[gone]
