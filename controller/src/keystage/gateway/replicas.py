"""Finds a replica for a request, and waits for one where there is none yet.

Between `gateway.proxy`, `gateway.websocket` and `gateway.queue_attempt` (one request each) and the
backend's view. A known function never answers 404:
at zero replicas its first request wakes it, and every request waits, bounded in time and number.
A request that goes away (its task is cancelled) frees its place; the wake it asked for stands.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from keystage.gateway.backend import Backend, Endpoint, FunctionState, GatewayError, UnknownFunction
from keystage.gateway.balance import Balancer

REFUSED_PAUSE_S = 0.05
"""Before a replica that refused a connection is tried again: its record changes within milliseconds."""
SUSPECT_S = 0.05
"""For which a replica that broke a connection gets no new request: one that dies still takes connections
for a moment, and what is sent then is lost."""
RECHECK_S = 1.0
"""A wake that failed, or that its function forgot, is repeated within this."""
RETRY_AFTER_S = 5
MAX_WAITING = 4096
"""Per function. A waiting request holds its connection and up to 64 KiB of its body: 256 MiB at most."""
_log = logging.getLogger(__name__)


class NoReplica(GatewayError):
    """A known function has no ready replica, and none came in time."""

    status = 503


class TooManyWaiting(GatewayError):
    """As many requests as may wait for a function's first replica do so already."""

    status = 429


class Replicas:
    """Ready replicas of every function, with the number of requests on each.

    Args:
        backend: whose replicas.
        wake_s: seconds a request waits for a replica.
        max_waiting: requests that may wait for one function at once.

    Attributes:
        let_go: called with the function when a replica that left the routing has no request any longer.
    """

    def __init__(self, backend: Backend, wake_s: float, max_waiting: int = MAX_WAITING) -> None:
        self._backend = backend
        self._wake_s = wake_s
        self._max_waiting = max_waiting
        self._balancer = Balancer()
        self._waiting: dict[str, int] = {}
        self._wakes: dict[str, asyncio.Task[None]] = {}
        self._suspects: dict[str, float] = {}
        """Replicas that broke a connection a moment ago, until when (monotonic seconds)."""
        self._at_work: dict[str, str] = {}
        """Function of every replica that has requests."""
        self._left: set[str] = set()
        """Those of them that left the routing."""
        self.let_go: Callable[[str], object] = lambda _: None

    def check(self, function: str) -> None:
        """Refuses a function that is not deployed.

        Raises:
            UnknownFunction: names it.
        """
        self._backend.get(function)

    def waiting(self, function: str) -> int:
        """Requests that wait for a replica of a function now."""
        return self._waiting.get(function, 0)

    def release(self, endpoint: Endpoint) -> None:
        """Gives back what `acquire` gave."""
        self._balancer.release(endpoint)
        if not self._balancer.in_flight(endpoint.replica):
            function = self._at_work.pop(endpoint.replica)
            if endpoint.replica in self._left:
                self._left.discard(endpoint.replica)
                self.let_go(function)

    def in_hand(self, function: str) -> dict[str, int]:
        """Requests on every replica that may get one, and on those that left the routing with some."""
        busy = [replica for replica, its in self._at_work.items() if its == function]
        return {replica: self._balancer.in_flight(replica) for replica in (*self.ready(function), *busy)}

    def busy(self) -> set[str]:
        """Functions that have requests on replicas."""
        return set(self._at_work.values())

    def ready(self, function: str) -> frozenset[str]:
        """Names of a function's ready replicas; none where it is not deployed."""
        try:
            return frozenset(endpoint.replica for endpoint in self._backend.get(function).ready)
        except UnknownFunction:
            return frozenset()

    def note_left(self) -> None:
        """The view changed: sees which replicas left the routing while they have requests."""
        ready = {function: self.ready(function) for function in set(self._at_work.values())}
        self._left = {replica for replica, its in self._at_work.items() if replica not in ready[its]}

    def suspect(self, endpoint: Endpoint) -> None:
        """Tells that a replica broke a connection before it had answered: it may be dying."""
        self._suspects[endpoint.replica] = time.monotonic() + SUSPECT_S

    async def acquire(self, function: str, waited_since_s: float, refused: AbstractSet[str]) -> Endpoint:
        """Picks a ready replica, waiting for one if need be.

        Args:
            function: name.
            waited_since_s: monotonic time at which the request came.
            refused: replicas that refused its connection; taken again only after a pause.

        Raises:
            UnknownFunction: it is not deployed, or was removed meanwhile.
            NoReplica: none was ready in time.
            TooManyWaiting: too many requests wait already.
        """
        endpoint = await self._find(function, waited_since_s, refused)
        self._at_work[endpoint.replica] = function
        return endpoint

    async def _find(self, function: str, waited_since_s: float, refused: AbstractSet[str]) -> Endpoint:
        endpoint = self._pick(self._backend.get(function), refused)
        if endpoint is not None:
            return endpoint
        waiting = self._waiting.get(function, 0)
        if waiting >= self._max_waiting:
            raise TooManyWaiting(
                f"function {function} has no ready replica and {waiting} requests wait for one, "
                f"at most {self._max_waiting} may"
            )
        self._waiting[function] = waiting + 1
        try:
            return await self._wait(function, waited_since_s, refused)
        finally:
            left = self._waiting.pop(function) - 1
            if left:
                self._waiting[function] = left

    def _pick(self, state: FunctionState, refused: AbstractSet[str]) -> Endpoint | None:
        if self._suspects:
            now_s = time.monotonic()
            self._suspects = {replica: until for replica, until in self._suspects.items() if until > now_s}
            refused = {*refused, *self._suspects}
        return self._balancer.acquire(state.ready, refused)

    async def _wait(self, function: str, waited_since_s: float, refused: AbstractSet[str]) -> Endpoint:
        while True:
            state = self._backend.get(function)
            endpoint = self._pick(state, refused)
            if endpoint is not None:
                return endpoint
            left_s = waited_since_s + self._wake_s - time.monotonic()
            if left_s <= 0:
                endpoint = self._balancer.acquire(state.ready, refused)  # a suspect is better than none
                if endpoint is not None:
                    return endpoint
                raise NoReplica(self._why(function, state))
            if state.replicas == 0 and not state.waking and function not in self._wakes:
                self._wakes[function] = asyncio.get_running_loop().create_task(self._wake(function))
            await self._backend.changed(min(left_s, REFUSED_PAUSE_S if state.ready else RECHECK_S))
            refused = frozenset()

    async def _wake(self, function: str) -> None:
        """Wakes for everybody who waits: one goes away, the others still need it."""
        try:
            await self._backend.wake(function)
            await self._backend.changed(REFUSED_PAUSE_S)
        except GatewayError as error:
            _log.warning("function %s could not be woken: %s", function, error)
            await asyncio.sleep(REFUSED_PAUSE_S)
        finally:
            del self._wakes[function]

    def _why(self, function: str, state: FunctionState) -> str:
        trouble = f" ({'; '.join(state.trouble)})" if state.trouble else ""
        waited = f"after {self._wake_s:g} s, {state.replicas} wanted{trouble}"
        return f"function {function} has no ready replica {waited}"
