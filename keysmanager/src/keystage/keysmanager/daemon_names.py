"""From stages by name to parameters by identity, and which identities a name no longer stands for.

Between `daemon` and `catalog`. A bundle may be replaced where it lies: its stages then resolve to
other identities, and the old ones are invalid, unless another name still stands for them. Files are
read in one thread, so that what was read later is also told later; homes over HTTP hold up nobody else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from keystage.bundle.errors import BundleError
from keystage.keysmanager.api import Parameters, StageName
from keystage.keysmanager.daemon_needs import is_remote

RESOLVE_S = 30.0
"""Longest look at a bundle: a hung network file system must not hold up who asks."""

log = logging.getLogger("keystage.keysmanager")

REMOTE_RECHECK_S = 30.0
"""A home over HTTP is asked less often than a file is looked at."""
REMOTE_READS = 4
KEPT_REPLACED = 64


class Resolver(Protocol):
    """What is needed of `catalog.Catalog`."""

    def resolve(self, name: StageName) -> tuple[Parameters, bytes]:
        """Parameters and content of `pipeline.json`; raises BundleError."""


@dataclasses.dataclass(slots=True)
class _Seen:
    parameters: Parameters
    pipeline: bytes
    checked_s: float


class Names:
    """What every name in use stands for.

    Args:
        catalog: reads bundles.
        replaced: an identity is no longer what any name stands for.
    """

    def __init__(self, catalog: Resolver, replaced: Callable[[str], None]) -> None:
        self._catalog = catalog
        self._replaced = replaced
        self._seen: dict[StageName, _Seen] = {}
        self._replaced_lately: dict[str, _Seen] = {}
        self._complaints: dict[StageName, str] = {}
        self._near = ThreadPoolExecutor(1, thread_name_prefix="catalog")
        self._far = ThreadPoolExecutor(REMOTE_READS, thread_name_prefix="catalog-http")

    async def resolve(self, name: StageName) -> tuple[Parameters, bytes]:
        """Parameters of a stage and its bundle's `pipeline.json`.

        Raises:
            BundleError: no such bundle or stage, or it cannot be used.
        """
        loop = asyncio.get_running_loop()
        pool = self._far if is_remote(name.bundle) else self._near
        try:
            work = loop.run_in_executor(pool, self._catalog.resolve, name)
            parameters, pipeline = await asyncio.wait_for(work, RESOLVE_S)
        except TimeoutError as error:
            raise BundleError(f"bundle {name.bundle}: not read within {RESOLVE_S:g} s") from error
        except (OSError, ValueError) as error:  # an address that is none, a folder that may not be read
            raise BundleError(f"bundle {name.bundle!r} cannot be read: {error}") from error
        before = self._seen.get(name)
        self._seen[name] = _Seen(parameters, pipeline, time.monotonic())
        if before is not None and before.parameters.identity != parameters.identity:
            self._forget(before)
        return parameters, pipeline

    async def resolve_known(self, names: Iterable[StageName]) -> tuple[Parameters, ...]:
        """Those of `names` that can be resolved, in order; the others are logged."""
        # All at once: a home that does not answer holds up nobody's stage but its own.
        found = await asyncio.gather(*map(self._known, dict.fromkeys(names)))
        return tuple(parameters for parameters in found if parameters is not None)

    async def _known(self, name: StageName) -> Parameters | None:
        try:
            parameters, _ = await self.resolve(name)
        except BundleError as error:
            if self._complaints.get(name) != str(error):  # the list is resolved again and again
                log.warning("stage %d of %s cannot be kept: %s", name.stage, name.bundle, error)
            self._complaints[name] = str(error)
            return None
        self._complaints.pop(name, None)
        return parameters

    async def recheck(self) -> None:
        """Looks at every bundle again; one that cannot be read just now changes nothing."""
        now_s = time.monotonic()
        for name, seen in list(self._seen.items()):
            if is_remote(name.bundle) and now_s - seen.checked_s < REMOTE_RECHECK_S:
                continue
            seen.checked_s = now_s
            try:
                await self.resolve(name)
            except BundleError as error:
                log.debug("stage %d of %s: %s", name.stage, name.bundle, error)

    def pipeline(self, identity: str, name: StageName | None = None) -> bytes:
        """`pipeline.json` of the bundle that holds these parameters, also of one replaced a moment ago.

        Several bundles may hold equal parameters; that of `name` is preferred.

        Raises:
            BundleError: no name stands for them.
        """
        seen = self._seen.get(name) if name is not None else None
        if seen is None or seen.parameters.identity != identity:
            seen = self._of(identity) or self._replaced_lately.get(identity)
        if seen is None:
            raise BundleError(f"parameters {identity} belong to no bundle known here")
        return seen.pipeline

    def parameters(self, identity: str) -> Parameters | None:
        """Parameters of this identity, None: no name stands for it."""
        seen = self._of(identity)
        return seen.parameters if seen is not None else None

    def close(self) -> None:
        """Ends the threads."""
        for pool in (self._near, self._far):
            pool.shutdown(wait=False, cancel_futures=True)

    def _of(self, identity: str) -> _Seen | None:
        return next((s for s in self._seen.values() if s.parameters.identity == identity), None)

    def _forget(self, seen: _Seen) -> None:
        identity = seen.parameters.identity
        if self._of(identity) is None:
            # A holder of it may be starting: what it is built from is kept a while.
            self._replaced_lately[identity] = seen
            while len(self._replaced_lately) > KEPT_REPLACED:
                del self._replaced_lately[next(iter(self._replaced_lately))]
            self._replaced(identity)
