"""Standby workers: started through the fork server, told ready when idle, filled, ended.

Below `daemon`; `standby` is the program, which speaks on its claim: `Progress("ready")` when idle, and
it takes `Fill` there. Who wanted standbys owns them: when its lifeline ends, none are wanted any longer.
Every standby that was to be started is told gone once, unless it became a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Mapping, Sequence

from keystage.keysmanager import api
from keystage.keysmanager.api import Fill, Progress, Spawned
from keystage.keysmanager.channel import pair
from keystage.keysmanager.claims import inode
from keystage.keysmanager.daemon_forker import Forker, ForkerError, Life, end_strays
from keystage.keysmanager.daemon_forkserver import ForkServer
from keystage.keysmanager.events import Event, StandbyGone, StandbyReady, StandbysWanted

MODULE = "keystage.keysmanager.standby"
STANDARD_ERROR = 2
"""The daemon's own log takes what an idle standby writes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """Standbys of one shape class.

    Attributes:
        env: their environment.
        lifeline_fd: read end of their owner's pipe, ours.
        is_own: the daemon wants them for its key stages.
    """

    env: Mapping[str, str]
    lifeline_fd: int
    is_own: bool = False

    @property
    def device(self) -> str:
        """Where they run."""
        return self.env.get("KEYSTAGE_DEVICE", "") or "cpu"


class Standby:
    """One standby process.

    Attributes:
        shape: its class.
        turn: held by whoever speaks with it.
        ahead: bytes that it has registered, by identity; 0 from the first message on.
        refused: why it could not register an identity.
        cleared: nothing is mapped any more by one that was filled.
    """

    def __init__(self, shape: str, forker: Forker, life: Life) -> None:
        self.shape = shape
        self.forker = forker
        self.life = life
        self.turn = asyncio.Lock()
        self.is_ready = False
        self.is_filled = False
        self.is_ending = False
        self.ahead: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.cleared = asyncio.Event()
        self.clearing: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it can be told something, or filled."""
        return self.is_ready and not self.is_filled and not self.is_ending

    async def clear(self) -> None:
        """Waits until a filled one closes its end, which it does when nothing is mapped."""
        with contextlib.suppress(ForkerError):  # that end is what is waited for
            await self.forker.hear(Spawned)
        self.forker.close()
        self.ahead.clear()
        self.cleared.set()


class Standbys:
    """All standbys of this daemon, and who wants them.

    Args:
        forkserver: forks them.
        tell: takes the outcomes.
    """

    def __init__(self, forkserver: ForkServer, tell: Callable[[Event], None]) -> None:
        self._forkserver = forkserver
        self._tell = tell
        self._wishes: dict[str, Wish] = {}
        self._standbys: dict[int, Standby] = {}
        self.starting = 0

    def pids(self) -> dict[int, int]:
        """Process ids and numbers."""
        return {standby.life.pid: number for number, standby in self._standbys.items()}

    def all(self) -> list[Standby]:
        """All of them, those filled and alive included."""
        return list(self._standbys.values())

    def wish(self, shape: str) -> Wish | None:
        """What was asked for of a shape class, None: nobody wants it any longer."""
        return self._wishes.get(shape)

    def is_wanted(self) -> bool:
        """Whether any shape class has standbys."""
        return bool(self._wishes)

    def device(self, shape: str) -> str:
        """Device of a shape class, empty: nobody wants it any longer."""
        wish = self._wishes.get(shape)
        return wish.device if wish is not None else ""

    def want(
        self, shape: str, env: Mapping[str, str], lifeline_fd: int, count: int, *, is_own: bool = False
    ) -> None:
        """Takes over a wish and its lifeline."""
        self._forget(shape)
        if count > 0:
            self._wishes[shape] = Wish(env, lifeline_fd, is_own)
            asyncio.get_running_loop().add_reader(lifeline_fd, self._owner, shape)
        else:
            os.close(lifeline_fd)
        self._tell(StandbysWanted(shape, count))

    async def start(self, number: int, shape: str) -> None:
        """Starts one; tells `StandbyReady` when it is idle, `StandbyGone` when it has ended."""
        wish = self._wishes.get(shape)
        if wish is None:
            self._tell(StandbyGone(number, f"nobody wants standbys of {shape} any longer"))
            return
        lifeline_fd = os.dup(wish.lifeline_fd)  # the wish may be replaced while this waits for its turn
        ours, theirs = pair()
        stray = inode(theirs)
        forker = Forker(ours, f"standby {number}")
        message = api.Spawn(replica=f"standby-{number}", module=MODULE, env=dict(wish.env))
        self.starting += 1
        try:
            try:
                spawned = await self._spawn(message, lifeline_fd, theirs.fileno())
            finally:
                os.close(lifeline_fd)
                theirs.close()
                self.starting -= 1
        except ForkerError as error:
            forker.close()
            if error.is_unsure:
                await end_strays(stray)
            self._tell(StandbyGone(number, str(error)))
            return
        standby = self._standbys[number] = Standby(shape, forker, Life(spawned.pid))
        try:
            while (said := await forker.hear(Progress)).phase != "ready":
                pass
            if said.note != shape:
                raise ForkerError(
                    f"it was made for {said.note!r}, {shape!r} is wanted: its bundle has changed"
                )
            standby.is_ready = True
            self._tell(StandbyReady(number, spawned.pid))
        except ForkerError as error:
            # It ended, or said what no standby says: either way it is of no use.
            forker.close()
            await standby.life.end()
            del self._standbys[number]
            self._tell(StandbyGone(number, str(error)))
            return
        await standby.life.ended.wait()
        forker.close()
        if self._standbys.pop(number, None) is not None and not standby.is_filled:
            self._tell(StandbyGone(number, "ended" if standby.is_ending else "it died"))

    async def fill(self, number: int, fill: Fill, fds: Sequence[int]) -> int:
        """Makes one a replica; gives its process id.

        Raises:
            ForkerError: it has ended, or refused; it is gone then.
        """
        standby = self._standbys.get(number)
        if standby is None:
            raise ForkerError(f"standby {number} has ended")
        standby.is_filled = True
        try:
            async with standby.turn:
                answer = await standby.forker.ask(fill, fds, Spawned)
        except ForkerError:
            standby.forker.close()
            standby.life.kill()
            raise
        standby.clearing = asyncio.get_running_loop().create_task(standby.clear())
        return answer.pid

    def end(self, number: int) -> None:
        """Ends an idle one; told by who watches it."""
        standby = self._standbys.get(number)
        if standby is not None:
            standby.is_ending = True
            standby.forker.close()

    async def close(self) -> None:
        """Ends all that are no replicas yet, within a bound."""
        for shape in list(self._wishes):
            self._forget(shape)
        idle = [s for s in self._standbys.values() if not s.is_filled]
        for standby in idle:
            standby.is_ending = True
            standby.forker.close()
        await asyncio.gather(*(standby.life.end() for standby in idle))

    async def _spawn(self, message: api.Spawn, lifeline_fd: int, claim_fd: int) -> Spawned:
        """Its HTTP socket comes when it is filled; until then it holds one that nobody connects to."""
        unused = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            fds = (lifeline_fd, STANDARD_ERROR, unused.fileno(), claim_fd)
            return await self._forkserver.ask(message, fds, Spawned)
        finally:
            unused.close()

    def _owner(self, shape: str) -> None:
        wish = self._wishes[shape]
        try:
            is_over = not os.read(wish.lifeline_fd, 1)
        except OSError:
            is_over = True
        if is_over:
            self._forget(shape)
            self._tell(StandbysWanted(shape, 0))

    def _forget(self, shape: str) -> None:
        wish = self._wishes.pop(shape, None)
        if wish is not None:
            asyncio.get_running_loop().remove_reader(wish.lifeline_fd)
            os.close(wish.lifeline_fd)
