"""Statistics of all routers, read in parallel with a short bound each.

Before it: function and replica records. After it: a platform's `observe`. A router that does not answer is
named with the reason, and only its pipeline is held. It keeps no connection: a router may be restarted
between two ticks.
"""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from keystage.controller.domain.platform import PlatformError
from keystage.controller.platforms.local_view import role_of
from keystage.controller.platforms.unix_http import exchange
from keystage.local.api import FunctionRecord, ReplicaRecord
from keystage.router.api import STATS_PATH, RouterStats
from keystage.wire.unreadable import UNREADABLE

MAX_PARALLEL = 8


class RouterReader:
    """Reads routers.

    Args:
        timeout_s: bound of one exchange, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="stats")

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def read(
        self, functions: Sequence[FunctionRecord], replicas: Sequence[ReplicaRecord]
    ) -> tuple[dict[str, list[RouterStats]], dict[str, str]]:
        """Statistics by router function, and why they are missing by router function."""
        routers = {f.deployment.service for f in functions if role_of(f) == "router"}
        ready = [r for r in replicas if r.function in routers and r.state == "ready"]
        stats: dict[str, list[RouterStats]] = {}
        unread: dict[str, str] = {}
        for replica, answer in zip(ready, self._pool.map(self._one, ready), strict=True):
            if isinstance(answer, RouterStats):
                stats.setdefault(replica.function, []).append(answer)
            else:
                unread[replica.function] = answer
        return stats, unread

    def _one(self, replica: ReplicaRecord) -> RouterStats | str:
        """Statistics of one router, or why there are none."""
        connection = http.client.HTTPConnection(replica.address, timeout=self._timeout_s)
        try:
            status, body = exchange(connection, "GET", STATS_PATH)
            if status != http.client.OK:
                return f"router {replica.replica} answered {status} to {STATS_PATH}"
            return msgspec.json.decode(body, type=RouterStats)
        except (PlatformError, *UNREADABLE) as error:
            return f"router {replica.replica}: {error}"
