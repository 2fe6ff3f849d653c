"""From stages by name to parameters by identity, and which identities a name no longer stands for.

Between `daemon` and `catalog`. A bundle may be replaced where it lies: its stages then resolve to
other identities, and the old ones are invalid, unless another name still stands for them. A home is
read by one thread at a time, so that what was read later is also told later; one that hangs (a network
file system, a server) holds up nobody but those who want its own stages.
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
PATIENCE_S = 1.0
"""A list of stages waits so long for a home; what it said last, or nothing, holds until it answers."""
READS = 16
"""Homes read at once: as many may hang."""
KEPT_REPLACED = 64
_TURNS_LIMIT = 1024


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
        self._turns: dict[str, asyncio.Lock] = {}
        self._looks: dict[StageName, asyncio.Task[Parameters | None]] = {}
        self._near = ThreadPoolExecutor(READS, thread_name_prefix="catalog")
        self._far = ThreadPoolExecutor(READS, thread_name_prefix="catalog-http")

    async def resolve(self, name: StageName) -> tuple[Parameters, bytes]:
        """Parameters of a stage and its bundle's `pipeline.json`.

        Raises:
            BundleError: no such bundle or stage, or it cannot be used.
        """
        try:
            parameters, pipeline = await asyncio.wait_for(self._read(name), RESOLVE_S)
        except TimeoutError as error:
            raise BundleError(f"bundle {name.bundle}: not read within {RESOLVE_S:g} s") from error
        except (OSError, ValueError) as error:  # an address that is none, a folder that may not be read
            raise BundleError(f"bundle {name.bundle!r} cannot be read: {error}") from error
        before = self._seen.get(name)
        self._seen[name] = _Seen(parameters, pipeline, time.monotonic())
        if before is not None and before.parameters.identity != parameters.identity:
            self._forget(before)
        return parameters, pipeline

    async def _read(self, name: StageName) -> tuple[Parameters, bytes]:
        """Reads in a thread, which keeps the home's turn to its end, also when nobody waits any longer."""
        turn = self._turn(name.bundle)
        await turn.acquire()
        pool = self._far if is_remote(name.bundle) else self._near
        try:
            work = asyncio.get_running_loop().run_in_executor(pool, self._catalog.resolve, name)
        except BaseException:
            turn.release()
            raise

        def ended(done: asyncio.Future[tuple[Parameters, bytes]]) -> None:
            turn.release()
            if not done.cancelled():
                done.exception()  # nobody may be there to take it

        work.add_done_callback(ended)
        return await asyncio.shield(work)

    def _turn(self, home: str) -> asyncio.Lock:
        if len(self._turns) >= _TURNS_LIMIT:
            self._turns = {key: lock for key, lock in self._turns.items() if lock.locked()}
        return self._turns.setdefault(home, asyncio.Lock())

    async def resolve_known(self, names: Iterable[StageName]) -> tuple[Parameters, ...]:
        """Those of `names` that can be resolved, in order; the others are logged.

        A home that does not answer in `PATIENCE_S` is asked on, and taken at its last word for now.
        """
        looks = {name: self._look(name) for name in names}
        if looks:
            await asyncio.wait(looks.values(), timeout=PATIENCE_S)
        found = (look.result() if look.done() else self._last(name) for name, look in looks.items())
        return tuple(parameters for parameters in found if parameters is not None)

    def _last(self, name: StageName) -> Parameters | None:
        seen = self._seen.get(name)
        return None if seen is None else seen.parameters

    def _look(self, name: StageName) -> asyncio.Task[Parameters | None]:
        """The look at a stage that is under way, or a new one."""
        look = self._looks.get(name)
        if look is None:
            look = self._looks[name] = asyncio.get_running_loop().create_task(self._known(name))
            look.add_done_callback(lambda _: self._looks.pop(name, None))
        return look

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
        due = []
        for name, seen in self._seen.items():
            if is_remote(name.bundle) and now_s - seen.checked_s < REMOTE_RECHECK_S:
                continue
            seen.checked_s = now_s
            due.append(name)
        await self.resolve_known(due)

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
        for look in self._looks.values():
            look.cancel()
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
