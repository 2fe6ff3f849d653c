"""What the daemon does unasked: look at memory, at bundles, at GPUs and at its own children.

Beside `daemon_requests`; started by `app`. Each look becomes an event or a line of the status. A round
that is late is late, never doubled. This module must not end anything but processes nobody knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable

import msgspec

from keystage.keysmanager import events, inventory, memory, metrics, proc_children
from keystage.keysmanager.api import MAX_MESSAGE_BYTES, PROTOCOL, Gpu, Memory, NodeStatus, StandbyEntry
from keystage.keysmanager.daemon import Daemon
from keystage.keysmanager.reconcile import Believed, Memo, reconcile
from keystage.wire.upkeep import Upkeep

log = logging.getLogger("keystage.keysmanager")

MEMORY_S = 0.5
BUNDLES_S = 2.0
CHILDREN_S = 5.0
HISTORY_S = 1.0
GPUS_S = 5.0


class Rounds:
    """Regular looks of one daemon.

    Args:
        daemon: gets the events.
        node: its name.
        memory_bytes: configured limit, None: the machine's.
        registered: what the standby of a process id has registered ahead, and why not more.
    """

    def __init__(
        self,
        daemon: Daemon,
        node: str,
        memory_bytes: int | None,
        registered: Callable[[int], tuple[tuple[str, ...], str]],
    ) -> None:
        self._daemon = daemon
        self._node = node
        self._memory_bytes = memory_bytes
        self._registered = registered
        self._started_at_s = time.time()
        self._gpus: tuple[Gpu, ...] = ()
        self._gpu_reason = "not looked yet"
        self._memo = Memo()
        self._seen: Memory | None = None

    def see_memory(self) -> None:
        """Tells the ledger what the host says."""
        seen = self._memory()
        self._daemon.tell(events.MemorySeen(seen.used_bytes, seen.budget_bytes, seen.huge_free_bytes))

    def is_short(self) -> bool:
        """Whether more host memory was in use than the budget allows when it was last looked at."""
        return self._seen is not None and self._seen.used_bytes > self._seen.budget_bytes

    def status(self) -> NodeStatus:
        """What is where on this node, now; with as much history as a message holds."""
        status = self._status()
        while status.history and len(msgspec.msgpack.encode(status)) > MAX_MESSAGE_BYTES:
            status = msgspec.structs.replace(status, history=status.history[: len(status.history) // 2])
        return status

    def _status(self) -> NodeStatus:
        daemon = self._daemon
        offset_s = daemon.unix_offset_s
        return NodeStatus(
            node=self._node,
            protocol=PROTOCOL,
            started_at_s=self._started_at_s,
            holders=tuple(daemon.ledger.entries(offset_s)),
            standbys=tuple(self._standby(entry) for entry in daemon.ledger.standbys(offset_s)),
            memory=self._memory(),
            gpus=self._gpus,
            history=tuple(daemon.history.entries()),
            gpu_reason=self._gpu_reason,
        )

    def _standby(self, entry: StandbyEntry) -> StandbyEntry:
        registered, note = self._registered(entry.pid)
        device = self._daemon.standbys.device(entry.shape)
        return msgspec.structs.replace(entry, device=device, registered=registered, note=note)

    def _memory(self) -> Memory:
        try:
            self._seen = memory.read(self._memory_bytes, segment_bytes=self._daemon.ledger.segment_bytes)
        except memory.MemoryUnreadable as error:  # no descriptor left, say: the last reading holds
            if self._seen is None:
                raise
            log.warning("%s", error)
        return self._seen

    def metrics(self) -> bytes:
        """Prometheus text."""
        return metrics.text(self.status(), self._daemon.counts, self._daemon.forkserver.restarts)

    def begin(self, renew_list: Callable[[], Awaitable[None]]) -> None:
        """Starts all rounds; `renew_list` resolves the key-stage list again."""
        upkeep = Upkeep()

        async def see_memory() -> None:
            upkeep.now_and_then()
            self.see_memory()
            self._daemon.tell(events.Ticked())

        async def see_bundles() -> None:
            await self._daemon.names.recheck()
            await renew_list()

        for every_s, look in (
            (MEMORY_S, see_memory),
            (BUNDLES_S, see_bundles),
            (CHILDREN_S, self._see_children),
            (GPUS_S, self._see_gpus),
            (HISTORY_S, self._save_history),
        ):
            self._daemon.go(_every(every_s, look))

    async def _see_gpus(self) -> None:
        self._gpus, self._gpu_reason = await asyncio.to_thread(inventory.gpus)

    async def _save_history(self) -> None:
        await asyncio.to_thread(self._daemon.history.save)

    async def _see_children(self) -> None:
        """Ends descendants nobody knows: holders whose start was lost with an answer.

        Deaths are told by pidfds, at once; what the comparison says of them comes later.
        """
        daemon = self._daemon
        believed = [Believed("holder", key, pid) for pid, key in daemon.holders.pids().items()]
        believed += [Believed("standby", str(key), pid) for pid, key in daemon.standbys.pids().items()]
        if daemon.forkserver.pid:
            believed.append(Believed("fork-server", "", daemon.forkserver.pid))
        forking = daemon.holders.starting + daemon.spawns.starting + daemon.standbys.starting
        actual = await asyncio.to_thread(proc_children.read, os.getpid(), [each.pid for each in believed])
        found = reconcile(tuple(believed), actual, self._memo, forking)
        self._memo = found.memo
        for pid in found.kill:
            log.warning("process %d descends from this daemon, is known to nobody, and is ended", pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def _every(seconds: float, look: Callable[[], Awaitable[None]]) -> None:
    while True:
        await look()
        await asyncio.sleep(seconds)
