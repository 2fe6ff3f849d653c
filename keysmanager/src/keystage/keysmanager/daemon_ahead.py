"""Which segments idle standbys register ahead, and that they let go of one whose memory is wanted.

Beside `daemon`, run by `app`: looks again and again at what is held and who is idle, and tells each standby
one step at a time, so that a start never waits for more than a step. What to register follows from ledger
and key-stage list; the ledger does not know of it, since a holder is not told gone, nor its memory counted
as free, before `release` has had its answer. This module must not decide what is held.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Sequence

import msgspec

from keystage.bundle.errors import BundleError
from keystage.keysmanager import daemon_needs
from keystage.keysmanager.api import Ok, Register, Registered, Unregister
from keystage.keysmanager.daemon_forker import ForkerError
from keystage.keysmanager.daemon_loads import Loads, Raw
from keystage.keysmanager.daemon_names import Names
from keystage.keysmanager.daemon_standbys import Standby, Standbys
from keystage.keysmanager.ledger import Ledger

log = logging.getLogger("keystage.keysmanager")

LOOK_S = 0.1
LATELY_S = 600.0
"""A stage off the key-stage list is worth registering for so long after its last use."""
RELEASE_S = 2.0
"""From `Unregister` to its answer: 5 GiB take 0.1 s; a standby that needs longer is ended."""
STEP_S = 10.0
"""From `Register` to its answer: a step takes 15 ms."""
_END_S = 0.2
_SHAPES_LIMIT = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A segment that could be registered ahead.

    Attributes:
        identity: of its parameters.
        nbytes: of the file.
        rank: in the key-stage list, None: it is not there.
        used_at_s: its last use.
    """

    identity: str
    nbytes: int
    rank: int | None
    used_at_s: float


def chosen(candidates: Sequence[Candidate], limit_bytes: int) -> list[str]:
    """Identities to register, key stages by rank and then the last used, as many as the limit allows."""
    left_bytes = limit_bytes
    found = []
    for each in sorted(candidates, key=lambda c: (c.rank is None, c.rank or 0, -c.used_at_s, c.identity)):
        if each.nbytes <= left_bytes:
            left_bytes -= each.nbytes
            found.append(each.identity)
    return found


class Ahead:
    """Registrations of all standbys of a daemon.

    Args:
        ledger, names, loads, standbys: of the daemon.
        limit_bytes: most that one standby registers, unless its environment says otherwise; 0: nothing.
    """

    def __init__(
        self, ledger: Ledger, names: Names, loads: Loads, standbys: Standbys, limit_bytes: int
    ) -> None:
        self._ledger = ledger
        self._names = names
        self._loads = loads
        self._standbys = standbys
        self._limit_bytes = limit_bytes
        self._shapes: dict[tuple[str, str, str], str] = {}

    async def run(self) -> None:
        """Looks for ever; one standby after the other, so that starts have the cores."""
        while True:
            for standby in self._standbys.all():
                while standby.is_idle and await self._step(standby):
                    pass
            await asyncio.sleep(LOOK_S)

    def registered(self, pid: int) -> tuple[tuple[str, ...], str]:
        """Identities that a standby has registered as a whole, and why another one is not."""
        for standby in self._standbys.all():
            if standby.life.pid == pid:
                whole = [i for i, nbytes in standby.ahead.items() if self._is_whole(i, nbytes)]
                return tuple(whole), next(reversed(standby.refused.values()), "")
        return (), ""

    def _is_whole(self, identity: str, nbytes: int) -> bool:
        raw = self._loads.raw(identity)
        return raw is not None and nbytes >= raw.parameters.nbytes

    async def _step(self, standby: Standby) -> bool:
        """Lets go of one segment that is not to be registered (any longer), or registers a part of one."""
        wanted = self._wanted(standby)
        for identity in standby.ahead:
            if identity not in wanted:
                await _released(standby, identity)
                return True
        for identity in wanted:
            raw = self._loads.raw(identity)
            if raw is not None and standby.ahead.get(identity, 0) < raw.parameters.nbytes:
                await self._register(standby, identity, raw)
                return True
        return False

    async def _register(self, standby: Standby, identity: str, raw: Raw) -> None:
        async with standby.turn:
            if not standby.is_idle or self._loads.raw(identity) is not raw:
                return  # filled, or the segment dropped, while it was another's turn
            standby.ahead.setdefault(identity, 0)
            message = Register(msgspec.structs.replace(raw.parameters, chunks=()))
            fd = os.dup(raw.fd)
            try:
                async with asyncio.timeout(STEP_S):
                    answer = await standby.forker.ask(message, (fd,), Registered)
            except ForkerError as error:
                standby.ahead.pop(identity, None)
                if standby.is_ending:
                    return
                standby.refused[identity] = str(error)
                log.warning("%s of %s: %s", raw.parameters.file, raw.parameters.pipeline, error)
            except TimeoutError:
                log.warning("standby %d registers for %.0f s: it is ended", standby.life.pid, STEP_S)
                await _end(standby)
            else:
                standby.ahead[identity] = answer.nbytes
            finally:
                os.close(fd)

    def _wanted(self, standby: Standby) -> list[str]:
        wish = self._standbys.wish(standby.shape)
        if wish is None:
            return []
        needs = daemon_needs.of(wish.env)
        limit_bytes = self._limit_bytes if needs.register_bytes is None else needs.register_bytes
        return chosen(self._candidates(standby, needs), limit_bytes) if limit_bytes else []

    def _candidates(self, standby: Standby, needs: daemon_needs.Needs) -> list[Candidate]:
        """Segments here that are wanted or were lately, of the standby's class, and not on their way out."""
        state, now_s = self._ledger.state, time.monotonic()
        found = []
        for identity, entry in state.entries.items():
            raw = self._loads.raw(identity)
            if raw is None or entry.raw is None or entry.is_leaving or entry.is_doomed:
                continue
            if entry.prepare == "cpu" and entry.holder != "none":
                continue  # its packed form takes the place of this one
            rank = state.ranks.get(identity)
            is_late = not entry.uses or now_s - entry.used_at_s > LATELY_S
            if (rank is None and is_late) or identity in standby.refused:
                continue
            if self._shape(raw, needs) == standby.shape:
                found.append(Candidate(identity, raw.parameters.nbytes, rank, entry.used_at_s))
        return found

    def _shape(self, raw: Raw, needs: daemon_needs.Needs) -> str:
        """Shape class of a segment on a standby's device, empty: no bundle stands for it any longer."""
        identity = raw.parameters.identity
        key = (identity, needs.device, needs.dtype)
        if key not in self._shapes:
            try:
                shape = needs.shape(raw.parameters, self._names.pipeline(identity))
            except BundleError:
                return ""
            while len(self._shapes) >= _SHAPES_LIMIT:
                del self._shapes[next(iter(self._shapes))]
            self._shapes[key] = shape
        return self._shapes[key]


async def release(standbys: Standbys, identity: str) -> None:
    """Returns when no standby maps a segment any more, at most about `RELEASE_S` later.

    An idle one that does not answer is ended. One that was filled lets go by itself; if it does not in
    time it is a replica that works, and is left alone.
    """
    mapping = [standby for standby in standbys.all() if identity in standby.ahead]
    await asyncio.gather(*(_released(standby, identity) for standby in mapping))


async def _released(standby: Standby, identity: str) -> None:
    try:
        async with asyncio.timeout(RELEASE_S):
            async with standby.turn:
                if not standby.is_filled:
                    await standby.forker.ask(Unregister(identity), (), Ok)
                    standby.ahead.pop(identity, None)
                    return
            await standby.cleared.wait()
    except (TimeoutError, ForkerError) as error:
        what = f"standby {standby.life.pid} does not let go of {identity[:12]}"
        if standby.is_filled:
            log.warning("%s, which it was started beside: %s", what, error)
            return
        log.warning("%s, it is ended: %s", what, error or f"no answer in {RELEASE_S:.0f} s")
        await _end(standby)


async def _end(standby: Standby) -> None:
    """Ends one that is idle; `Standbys.start`, which watches it, tells."""
    standby.is_ending = True
    standby.ahead.clear()
    standby.forker.close()
    await standby.life.end(_END_S)
