"""Which ready replica takes the next request: the one with least in flight.

Pure bookkeeping for `gateway.replicas`. Ties go to the first in the list, so that idle replicas stay
idle and can be released. It must not wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from keystage.gateway.backend import Endpoint


class Balancer:
    """Requests in flight per replica."""

    def __init__(self) -> None:
        self._in_flight: dict[str, int] = {}

    def in_flight(self, replica: str) -> int:
        """Requests that run on a replica now."""
        return self._in_flight.get(replica, 0)

    def acquire(self, endpoints: Sequence[Endpoint], avoid: Collection[str] = ()) -> Endpoint | None:
        """Picks a replica and counts a request on it; None if there is none.

        Args:
            endpoints: ready replicas.
            avoid: names of replicas that refused this request already.
        """
        best = None
        least = 0
        for endpoint in endpoints:
            count = self._in_flight.get(endpoint.replica, 0)
            if endpoint.replica not in avoid and (best is None or count < least):
                best, least = endpoint, count
        if best is not None:
            self._in_flight[best.replica] = least + 1
        return best

    def release(self, endpoint: Endpoint) -> None:
        """Counts a request as done."""
        left = self._in_flight[endpoint.replica] - 1
        if left:
            self._in_flight[endpoint.replica] = left
        else:
            del self._in_flight[endpoint.replica]
