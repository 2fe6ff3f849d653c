"""Carries faults out on the live system.

Before it: `schedule` drew them. After it: `Hit`s, which `proof` and `report` look at. A fault waits until
somebody is at work (a worker: until its router says that it holds sessions), at most `WAIT_S`. What lasts
(stopped processes, cut links) goes on beside the faults that follow. It must not look at answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Sequence

import aiohttp
import psutil

from chaos.network import Cut
from chaos.proof import Hit
from chaos.schedule import Fault, by_name
from chaos.world import Member, World

WAIT_S = 30.0
LOOK_S = 0.05
WIDEN_S = 0.25
"""While a link is cut, workers that start get their ports cut as often."""


class Faults:
    """Does what a schedule says.

    Args:
        world: the live system.
        is_busy: whether requests are in flight.
        is_over: whether the load has ended: then no further fault is of use.

    Attributes:
        hits: what was done.
        missed: faults that found no victim, with the reason.
    """

    def __init__(self, world: World, is_busy: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        self.hits: list[Hit] = []
        self.missed: list[str] = []
        self._world = world
        self._is_busy = is_busy
        self._is_over = is_over
        self._lasting: set[asyncio.Task[None]] = set()
        self._cut = Cut()
        self._cutting = asyncio.Lock()
        self._redis = asyncio.Lock()
        self._last_s = 0.0

    async def run(self, faults: Sequence[Fault]) -> None:
        """Carries faults out, in order; returns when the effect of the last one is over."""
        try:
            for fault in faults:
                await asyncio.sleep(max(0.0, self._last_s + fault.gap_s - time.time()))
                if self._is_over():
                    break
                await self._do(fault)
                self._last_s = time.time()
            await asyncio.gather(*self._lasting)
        finally:
            for task in self._lasting:
                task.cancel()
            await asyncio.gather(*self._lasting, return_exceptions=True)

    async def _do(self, fault: Fault) -> None:
        kind = by_name(fault.kind)
        if kind.deed == "cut":
            self._last(self._cut_links(fault, kind.part))
            return
        victim = await self._victim(fault, kind.part)
        if victim is None:
            return
        if kind.part == "redis":
            self._last(self._redis_fault(fault, kind.deed))
            return
        at_s = time.time()
        number = signal.SIGKILL if kind.deed == "kill" else signal.SIGSTOP
        try:
            victim.process.send_signal(number)
        except psutil.Error as error:
            self.missed.append(f"{fault.kind}: {error}")
            return
        if kind.deed == "kill":
            self._note(Hit(fault.kind, kind.part, (victim.name,), at_s, at_s))
        else:
            self._last(self._go_on(fault, kind.part, victim, at_s))

    async def _victim(self, fault: Fault, part: str) -> Member | None:
        end_s = time.time() + WAIT_S
        while time.time() < end_s and not self._is_over():
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, psutil.Error):
                members = [m for m in await self._world.members(part) if _runs(m.process)]
                is_holding = part.endswith("worker") or part == "router"
                at_work = [m for m in members if m.held] if is_holding else members
                if at_work and self._is_busy():
                    return at_work[int(fault.pick * len(at_work))]
            await asyncio.sleep(LOOK_S)
        self.missed.append(f"{fault.kind}: no {part} at work within {WAIT_S:g} s")
        return None

    async def _go_on(self, fault: Fault, part: str, victim: Member, at_s: float) -> None:
        """SIGCONT after a while, to the very process."""
        try:
            await asyncio.sleep(fault.hold_s)
        finally:
            note = ""
            try:
                if victim.process.is_running():
                    victim.process.send_signal(signal.SIGCONT)
                else:
                    note = "it was ended meanwhile"
            except psutil.Error:
                note = "it was ended meanwhile"
            self._note(Hit(fault.kind, part, (victim.name,), at_s, time.time(), note))

    async def _redis_fault(self, fault: Fault, deed: str) -> None:
        redis = self._world.redis
        if redis is None:
            self.missed.append(f"{fault.kind}: there is no Redis")
            return
        async with self._redis:  # the one that is down cannot be stopped
            at_s = time.time()
            if deed == "kill":
                await asyncio.to_thread(redis.kill)
                await asyncio.sleep(fault.hold_s)
                await asyncio.to_thread(redis.start)
            else:
                redis.signal(signal.SIGSTOP)
                try:
                    await asyncio.sleep(fault.hold_s)
                finally:
                    redis.signal(signal.SIGCONT)
            self._note(Hit(fault.kind, "redis", ("redis",), at_s, time.time()))

    async def _cut_links(self, fault: Fault, links: str) -> None:
        async with self._cutting:  # one cut at a time: its packets are counted
            if await self._victim(fault, "far worker") is None:
                return
            names = tuple(m.name for m in await self._world.members("far worker"))
            at_s = time.time()
            try:
                while True:
                    ports = await self._world.wire_ports(links)
                    await asyncio.to_thread(self._cut.widen, ports)
                    left_s = at_s + fault.hold_s - time.time()
                    if left_s <= 0:
                        break
                    await asyncio.sleep(min(WIDEN_S, left_s))
                dropped = await asyncio.to_thread(lambda: self._cut.dropped)
            finally:
                await asyncio.to_thread(self._cut.mend)
            self._note(Hit(fault.kind, links, names, at_s, time.time(), f"{dropped} packets dropped"))

    def _last(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._lasting.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._lasting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.missed.append(f"{type(error).__name__}: {error}")

    def _note(self, hit: Hit) -> None:
        self.hits.append(hit)
        victims = " ".join(hit.victims)
        lasted = f" for {hit.until_s - hit.at_s:.1f} s" if hit.until_s > hit.at_s else ""
        sys.stderr.write(f"chaos: {hit.kind} {victims}{lasted} {hit.note}\n")


def _runs(process: psutil.Process) -> bool:
    """Whether it is there and not stopped already."""
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False
