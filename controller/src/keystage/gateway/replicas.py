"""Finds a replica for a request, and waits for one where there is none yet.

Between `gateway.proxy` (one request) and the backend's view. A known function never answers 404:
at zero replicas its first request wakes it, and every request waits, bounded.
"""

from __future__ import annotations

import time
from collections.abc import Set as AbstractSet

from keystage.gateway.backend import Backend, Endpoint, FunctionState, GatewayError
from keystage.gateway.balance import Balancer

REFUSED_PAUSE_S = 0.05
"""Before a replica that refused a connection is tried again: its record changes within milliseconds."""
RETRY_AFTER_S = 5


class NoReplica(GatewayError):
    """A known function has no ready replica, and none came in time."""

    status = 503


class Replicas:
    """Ready replicas of every function, with the number of requests on each."""

    def __init__(self, backend: Backend, wake_s: float) -> None:
        self._backend = backend
        self._wake_s = wake_s
        self._balancer = Balancer()
        self._waking: set[str] = set()

    def check(self, function: str) -> None:
        """Refuses a function that is not deployed.

        Raises:
            UnknownFunction: names it.
        """
        self._backend.get(function)

    def release(self, endpoint: Endpoint) -> None:
        """Gives back what `acquire` gave."""
        self._balancer.release(endpoint)

    async def acquire(self, function: str, waited_since_s: float, refused: AbstractSet[str]) -> Endpoint:
        """Picks a ready replica, waiting for one if need be.

        Args:
            function: name.
            waited_since_s: monotonic time at which the request came.
            refused: replicas that refused its connection; taken again only after a pause.

        Raises:
            UnknownFunction: it is not deployed.
            NoReplica: none was ready in time.
        """
        while True:
            state = self._backend.get(function)
            endpoint = self._balancer.acquire(state.ready, refused)
            if endpoint is not None:
                return endpoint
            left_s = waited_since_s + self._wake_s - time.monotonic()
            if left_s <= 0:
                raise NoReplica(self._why(function, state))
            if state.replicas == 0 and not state.waking and function not in self._waking:
                await self._wake(function)
                continue
            if not state.ready:
                refused = frozenset()
                await self._backend.changed(left_s)
            else:
                await self._backend.changed(min(left_s, REFUSED_PAUSE_S))
                refused = frozenset()

    async def _wake(self, function: str) -> None:
        self._waking.add(function)
        try:
            await self._backend.wake(function)
            await self._backend.changed(REFUSED_PAUSE_S)
        finally:
            self._waking.discard(function)

    def _why(self, function: str, state: FunctionState) -> str:
        trouble = f" ({'; '.join(state.trouble)})" if state.trouble else ""
        waited = f"after {self._wake_s:g} s, {state.replicas} wanted{trouble}"
        return f"function {function} has no ready replica {waited}"
