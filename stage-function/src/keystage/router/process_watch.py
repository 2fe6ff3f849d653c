"""Notices the end of a worker process on this node at once, by its pidfd.

Beside `node`, which watches every worker of its own node and is told on the event loop. On another
node a death is noticed by its silence only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class ProcessWatch:
    """Processes that are watched, one for each address.

    Args:
        on_exit: told address and process id of one that ended, at most once for each `watch`.
    """

    def __init__(self, on_exit: Callable[[str, int], None]) -> None:
        self._on_exit = on_exit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pidfds: dict[str, int] = {}

    def start(self) -> None:
        """Watches from now on, on the running event loop."""
        self._loop = asyncio.get_running_loop()

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
        self._pidfds[address] = fd
        self._loop.add_reader(fd, self._on_exit, address, pid)
        return True

    def forget(self, address: str) -> None:
        """Looks away; unknown addresses are ignored."""
        fd = self._pidfds.pop(address, None)
        if fd is not None and self._loop is not None:
            self._loop.remove_reader(fd)
            os.close(fd)

    def stop(self) -> None:
        """Looks away from all."""
        for address in list(self._pidfds):
            self.forget(address)
