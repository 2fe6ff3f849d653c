"""Holders: each started on a loaded segment, watched, asked to fork, and ended.

Below `daemon`, beside `daemon_forkserver`. Every holder that is told ready is told gone exactly once,
whether it was asked to end or not; a start that fails is told gone as well. This module must not
decide which holder lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from keystage.keysmanager import packed_segment
from keystage.keysmanager.api import Held, Hold, Message, Spawned
from keystage.keysmanager.asked import close_all
from keystage.keysmanager.channel import Told, pair
from keystage.keysmanager.claims import inode
from keystage.keysmanager.daemon_forker import Forker, ForkerError, Life, end_strays
from keystage.keysmanager.daemon_forkserver import ForkServer
from keystage.keysmanager.events import Event, HolderGone, HolderReady
from keystage.keysmanager.pod_api import PackedForm

log = logging.getLogger("keystage.keysmanager")

T = TypeVar("T", bound=Message)

TRIES = 3


class _Holder:
    def __init__(self, forker: Forker) -> None:
        self.forker = forker
        self.life: Life | None = None
        self.is_ending = False
        self.packed: tuple[int, PackedForm] | None = None


class Holders:
    """All holders of this daemon by identity.

    Args:
        forkserver: forks them.
        tell: takes the outcomes.
        go: runs a task that must not be lost.
    """

    def __init__(
        self,
        forkserver: ForkServer,
        tell: Callable[[Event], None],
        go: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._forkserver = forkserver
        self._tell = tell
        self._go = go
        self._holders: dict[str, _Holder] = {}
        self.starting = 0

    def pids(self) -> dict[int, str]:
        """Process ids of ready holders, and their identities."""
        return {h.life.pid: identity for identity, h in self._holders.items() if h.life is not None}

    def has(self, identity: str) -> bool:
        """Whether there is one, or one is being started."""
        return identity in self._holders

    def packed(self, identity: str) -> tuple[int, PackedForm] | None:
        """The packed form of a holder that others may map, until it is told gone; None: it has none."""
        holder = self._holders.get(identity)
        return holder.packed if holder is not None else None

    async def start(self, hold: Hold, raw_fd: int) -> None:
        """Forks a holder and waits until it has built what it prepares.

        Tells `HolderReady` or `HolderGone`. The descriptor stays the caller's.
        """
        identity = hold.parameters.identity
        self.starting += 1
        try:
            holder, held = await self._start(hold, raw_fd)
        except ForkerError as error:
            self._holders.pop(identity, None)
            self._tell(HolderGone(identity, str(error)))
            return
        finally:
            self.starting -= 1
        holder.life = Life(held.pid)
        if holder.is_ending:
            holder.forker.close()
        else:
            self._tell(HolderReady(identity, held.pid, held.packed_bytes))
        self._go(self._watch(identity, holder, holder.life))

    async def _start(self, hold: Hold, raw_fd: int) -> tuple[_Holder, Held]:
        """A fork server that dies under a start costs time alone: the next one is asked."""
        identity = hold.parameters.identity
        for left in reversed(range(TRIES)):
            ours, theirs = pair()
            number = inode(theirs)
            holder = self._holders[identity] = _Holder(Forker(ours, f"holder of {identity[:12]}"))
            is_forked = False
            try:
                try:
                    await self._forkserver.ask(hold, (theirs.fileno(), raw_fd), Spawned)
                    is_forked = True
                finally:
                    theirs.close()
                held, fds = await holder.forker.hear_with(Held)
                if held.packed is not None and len(fds) == 1:
                    holder.packed = (fds[0], held.packed)
                else:
                    close_all(fds)
                return holder, held
            except ForkerError as error:
                holder.forker.close()
                if error.is_unsure:
                    await end_strays(number)
                if is_forked or not error.is_unsure or not left:
                    raise
        raise AssertionError("the last try returns or raises")

    async def ask(self, identity: str, message: Told, fds: Sequence[int], kind: type[T]) -> T:
        """Asks a holder to fork.

        Raises:
            ForkerError: refused, or it has ended.
        """
        holder = self._holders.get(identity)
        if holder is None or holder.is_ending:
            raise ForkerError(f"holder of {identity[:12]} has ended")
        try:
            return await holder.forker.ask(message, fds, kind)
        except ForkerError as error:
            if error.is_over and holder.life is not None:
                # The ledger hears of the death (`_watch` waits longer) before it hears of the failed
                # start: else it would ask the same holder again, and give up.
                holder.life.kill()
                await holder.life.ended.wait()
            raise

    async def end(self, identity: str) -> None:
        """Ends one; its `HolderGone` is told by who watches it, or here when there is none."""
        holder = self._holders.get(identity)
        if holder is None:
            self._tell(HolderGone(identity, "ended"))
            return
        holder.is_ending = True
        holder.forker.close()
        if holder.life is not None:
            await holder.life.end()

    async def close(self) -> None:
        """Ends all, within a bound."""
        holders = list(self._holders.values())
        for holder in holders:
            holder.is_ending = True
            holder.forker.close()
        await asyncio.gather(*(holder.life.end() for holder in holders if holder.life is not None))

    async def _watch(self, identity: str, holder: _Holder, life: Life) -> None:
        await life.ended.wait()
        holder.forker.close()
        del self._holders[identity]
        packed_segment.closed(holder.packed)
        if not holder.is_ending:
            log.warning("holder of %s (process %d) ended unasked", identity[:12], life.pid)
        self._tell(HolderGone(identity, "ended" if holder.is_ending else f"holder {life.pid} died"))
