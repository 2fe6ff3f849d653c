"""Functions behind a stock OpenFaaS gateway as a `Platform`, over its REST API alone.

Before and after it: `loop`. One observation lists the functions and asks every router, through the
gateway, for its statistics; `openfaas_view` makes the snapshot of it. Of the actions only replica numbers can
be carried out there: it has no intents, no cores to set, no KeysManager and no places to choose. A gateway
of Keystage's own is refused: its controller steers it, and a second one would write people's wishes. It
holds no policy.
"""

from __future__ import annotations

import http.client
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import assert_never

import msgspec

from keystage.controller.domain.decision import (
    Action,
    ClearWake,
    LiftOverride,
    PublishKeyStages,
    SetCpu,
    SetReplicas,
)
from keystage.controller.domain.platform import PlatformError
from keystage.controller.domain.snapshot import Snapshot
from keystage.controller.platforms.local_view import role_of
from keystage.controller.platforms.openfaas_memory import Memory, see, state
from keystage.controller.platforms.openfaas_view import gateway_snapshot, record_of
from keystage.openfaas.client import Client
from keystage.openfaas.errors import NotFound, OpenFaasError
from keystage.openfaas.provider import Limits, kind_of, limits
from keystage.openfaas.types import FunctionStatus
from keystage.router.api import STATS_PATH, RouterStats
from keystage.wire.unreadable import UNREADABLE

MAX_PARALLEL = 8
TRIES = 6
"""Requests per router replica: the gateway picks one by chance, and all are needed. With two replicas one is
missed once in two thousand times; then the pipeline holds its numbers for a tick."""

logger = logging.getLogger(__name__)


class NotForThisGateway(PlatformError):
    """The gateway has a controller of its own."""


class OpenFaasPlatform:
    """Functions behind one gateway.

    Args:
        client: the gateway.
        stats_timeout_s: bound of one answer of a router, in seconds.
        budget_replicas: R_total, None for no bound.
    """

    def __init__(
        self, client: Client, *, stats_timeout_s: float = 0.5, budget_replicas: int | None = None
    ) -> None:
        self._client = client
        self._stats_timeout_s = stats_timeout_s
        self._budget = budget_replicas
        self._offset_s = time.time() - time.monotonic()  # Unix seconds that never step
        self._limits: Limits | None = None
        self._memory = Memory()
        self._said: set[str] = set()
        self._pool = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="stats")

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def recognise(self) -> Limits:
        """What the gateway takes; asked once, and again after it failed (it may be another one then).

        Raises:
            NotForThisGateway: it is one of Keystage's own.
            PlatformError: it does not answer.
        """
        if self._limits is None:
            with self._named():
                found = limits(kind_of(self._client.info()))
            if found.is_steered:
                raise NotForThisGateway(
                    f"{self._client.wire.url} is a Keystage gateway, whose own controller sets replica "
                    "numbers: run no second one (beside a supervisor: set KEYSTAGE_CONTROL instead)"
                )
            logger.info("the gateway %s is %s", self._client.wire.url, found.name)
            self._limits = found
        return self._limits

    def observe(self) -> Snapshot:
        """See `Platform.observe`."""
        taken = self.recognise()
        with self._named():
            statuses = sorted(self._client.functions(), key=lambda status: status.name)
        at_s = self._now_s()
        self._memory, changes = see(self._memory, statuses, at_s)
        for change in changes:
            self._say_once(change)
        stats, unread = self._statistics(statuses)
        return gateway_snapshot(
            at_s,
            statuses,
            self._memory,
            taken,
            stats=stats,
            unread=unread,
            budget_replicas=self._budget,
        )

    def apply(self, actions: Sequence[Action]) -> None:
        """See `Platform.apply`; what a stock gateway has no place for is said once in the log."""
        for action in actions:
            match action:
                case SetReplicas(function, replicas):
                    self._scale(function, replicas)
                case SetCpu():
                    self._say_once("CPU cores are not set: a stock gateway cannot change a running replica")
                case LiftOverride() | ClearWake():
                    self._say_once("overrides and wakes are not known to a stock gateway")
                case PublishKeyStages():
                    self._say_once(
                        "key stages are told to nobody: there is no KeysManager behind this gateway"
                    )
                case _:
                    assert_never(action)

    def _scale(self, function: str, replicas: int) -> None:
        taken = self.recognise()
        number = taken.bounded(replicas)
        if number != replicas:
            self._say_once(
                f"function {function}: {number} replicas stated for {replicas}: {taken.name}'s bound"
            )
        with self._named():
            try:
                self._client.scale(function, number)
            except NotFound:
                return  # gone: nothing to do
        self._memory = state(self._memory, function, number, self._now_s())

    def _statistics(
        self, statuses: Sequence[FunctionStatus]
    ) -> tuple[dict[str, list[RouterStats]], dict[str, str]]:
        routers = [
            s for s in statuses if role_of(record_of(s, s.replicas)) == "router" and s.availableReplicas
        ]
        stats: dict[str, list[RouterStats]] = {}
        unread: dict[str, str] = {}
        for router, answer in zip(routers, self._pool.map(self._read_routers, routers), strict=True):
            if isinstance(answer, str):
                unread[router.name] = answer
            else:
                stats[router.name] = answer
        return stats, unread

    def _read_routers(self, router: FunctionStatus) -> list[RouterStats] | str:
        """Statistics of every replica of a router function, or why there are none."""
        found: dict[str, RouterStats] = {}
        for _ in range(1 if router.availableReplicas == 1 else TRIES * router.availableReplicas):
            answer = self._read_router(router.name)
            if isinstance(answer, str):
                return answer
            found[answer.incarnation] = answer
            if len(found) >= router.availableReplicas:
                return list(found.values())
        return (
            f"router {router.name}: {len(found)} of {router.availableReplicas} replicas answered: "
            "the gateway chooses which; one router replica is enough for the statistics"
        )

    def _read_router(self, name: str) -> RouterStats | str:
        try:
            status, body = self._client.get(name, STATS_PATH, self._stats_timeout_s)
            if status != http.client.OK:
                return f"router {name} answered {status} to {STATS_PATH}"
            return msgspec.json.decode(body, type=RouterStats)
        except (OpenFaasError, *UNREADABLE) as error:
            return f"router {name}: {error}"

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Makes the client's errors the loop's; the next one asks anew who the gateway is."""
        try:
            yield
        except OpenFaasError as error:
            self._limits = None
            raise PlatformError(str(error)) from error

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)

    def _now_s(self) -> float:
        return time.monotonic() + self._offset_s
