"""What pods may ask, and which of them may have what: between the pods' socket and the daemon.

The controller tells which pods of this node host which stages (`PUT /v1/grants`); a pod is told by its
controller to ask at about the same time, so a question waits a moment for a grant that is on its way. A pod
gets parameters of stages that were granted to it and nothing else: not the list of what is here, not a
replica, no eviction. What it holds already it keeps when its grant goes: its end gives that back.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from keystage.keysmanager.api import Get, Progress, Refused
from keystage.keysmanager.asked import Asked
from keystage.keysmanager.daemon_needs import home_of
from keystage.keysmanager.pod_api import Grant
from keystage.keysmanager.server import Port

GRANT_WAIT_S = 1.0
"""The controller sends grant and activation one right after the other."""


class Grants:
    """The newest list. Belongs to the event loop."""

    def __init__(self) -> None:
        self._granted: frozenset[tuple[str, str, int]] = frozenset()
        self._changed = asyncio.Event()

    def replace(self, grants: Sequence[Grant]) -> None:
        """Takes a new list in the place of the last one."""
        self._granted = frozenset(
            (grant.pod_uid, home_of(grant.bundle), stage) for grant in grants for stage in grant.stages
        )
        self._changed.set()
        self._changed = asyncio.Event()

    def has(self, pod_uid: str, bundle: str, stage: int) -> bool:
        """Whether this stage of this bundle (`file://` or `http(s)://`) is granted to a pod now."""
        return (pod_uid, bundle, stage) in self._granted

    async def wait(self, pod_uid: str, bundle: str, stage: int, wait_s: float = GRANT_WAIT_S) -> bool:
        """As `has`, and waits for a grant that is on its way."""
        try:
            async with asyncio.timeout(wait_s):
                while not self.has(pod_uid, bundle, stage):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


class PodPort:
    """`server.Port` of the pods' socket: lets through what a pod may have.

    Args:
        port: the daemon's.
        grants: who may have what.
        go: runs a task that must not be lost.
    """

    def __init__(self, port: Port, grants: Grants, go: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._port = port
        self._grants = grants
        self._go = go
        self._let_through: weakref.WeakSet[Asked] = weakref.WeakSet()

    def asked(self, asked: Asked) -> None:
        """A request came."""
        message = asked.message
        if not isinstance(message, Get):
            kind = type(message).__name__
            asked.answer(Refused(f"{kind} is not for pods: pod {asked.origin} may ask Get alone", 403))
            return
        self._go(self._get(asked, message))

    async def _get(self, asked: Asked, get: Get) -> None:
        bundle, stage = home_of(get.name.bundle), get.name.stage
        if not await self._grants.wait(asked.origin, bundle, stage):
            asked.answer(Refused(f"stage {stage} of {bundle} is not granted to pod {asked.origin}", 403))
        elif asked.is_open:
            self._let_through.add(asked)
            self._port.asked(asked)

    def asker_gone(self, asked: Asked) -> None:
        """The connection closed before the answer."""
        if asked in self._let_through:
            self._port.asker_gone(asked)

    def released(self, asked: Asked) -> None:
        """The connection closed that was the claim on a segment."""
        self._port.released(asked)

    def progressed(self, asked: Asked, progress: Progress) -> None:
        """Who was given a segment says how far it is."""
        self._port.progressed(asked, progress)
