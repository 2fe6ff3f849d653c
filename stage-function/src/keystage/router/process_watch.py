"""Notices the end of a worker process on this node at once, by its pidfd.

Beside `node`, which watches every worker of its own node and is told on the event loop. On another
node a death is noticed by its silence only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from keystage.router.endings import ending_of, given_up, memory_kills, process_of, wait_status
from keystage.router.fleet import Worker
from keystage.router.suspects import Ending

LOOK_S = 1.0
"""How often the kernel's count of memory kills is looked at: one that is older explains nothing."""


class ProcessWatch:
    """Processes that are watched, one for each address.

    Args:
        on_exit: told address and process id of one that ended, at most once for each `watch`.
    """

    def __init__(self, on_exit: Callable[[str, int], None]) -> None:
        self._on_exit = on_exit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pidfds: dict[str, tuple[int, int]] = {}
        self._looks: asyncio.TimerHandle | None = None
        # The kernel's count, now and a look ago: the worker's end may be seen just after a look.
        self._kills = [0, 0]

    def start(self) -> None:
        """Watches from now on, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._kills = [memory_kills()] * 2
        self._look()

    def watch(self, address: str, pid: int) -> bool:
        """Watches a process; nothing before `start` or if its address is watched already.

        Returns:
            False if the process is gone already.
        """
        if address in self._pidfds or self._loop is None:
            return True
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        self._pidfds[address] = fd, pid
        self._loop.add_reader(fd, self._on_exit, address, pid)
        return True

    def ending(self, address: str, worker: Worker, why: str) -> Ending:
        """How a worker that is given up has ended; looks away from it.

        Args:
            address: the worker.
            worker: the same.
            why: `exited`, another word of `endings`, or `LAST_WORDS` and those.
        """
        replica, slots = worker.hello.replica, worker.granted_slots
        process = process_of(worker.hello)
        is_shared = 0 < slots < worker.hello.slots
        if why in ("exited", "replaced") and address in self._pidfds:
            status = wait_status(*self._pidfds[address])
            is_memory_short = memory_kills() > self._kills[0]
            found = ending_of(status, replica, process, is_shared=is_shared, is_memory_short=is_memory_short)
        else:
            found = given_up(why, replica, process, is_shared=is_shared)
        self.forget(address)
        return found

    def forget(self, address: str) -> None:
        """Looks away; unknown addresses are ignored."""
        fd, _ = self._pidfds.pop(address, (-1, 0))
        if fd >= 0 and self._loop is not None:
            self._loop.remove_reader(fd)
            os.close(fd)

    def stop(self) -> None:
        """Looks away from all."""
        if self._looks is not None:
            self._looks.cancel()
        for address in list(self._pidfds):
            self.forget(address)

    def _look(self) -> None:
        assert self._loop is not None
        self._kills = [self._kills[1], memory_kills()]
        self._looks = self._loop.call_later(LOOK_S, self._look)
