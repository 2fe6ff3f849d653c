"""The daemon's ends of the claims that replicas hold: who maps a segment, and how far its start is.

Made by `daemon_spawns` for every replica, read here as the loop finds them readable. A replica's
`Progress` and the end of its claim become ledger events. A claim says nothing about the life of
its replica beyond that: this module must not end anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from keystage.keysmanager.api import Progress
from keystage.keysmanager.asked import close_all
from keystage.keysmanager.channel import Channel, ChannelError, PeerGone, Told

log = logging.getLogger("keystage.keysmanager")

MALFORMED_PAUSE_S = 0.1
"""After a message that is none: a replica gone mad must not take the loop."""


class Claims:
    """All open claims by request number.

    Args:
        progressed: a replica reported a phase.
        released: a claim was closed.
    """

    def __init__(self, progressed: Callable[[int, Progress], None], released: Callable[[int], None]) -> None:
        self._progressed = progressed
        self._released = released
        self._readers: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def add(self, request: int, sock: socket.socket) -> None:
        """Watches a claim from now on; what was said on it before is heard, too."""
        sock.setblocking(False)
        self._readers[request] = asyncio.create_task(self._read(request, Channel(sock)))

    async def close(self) -> None:
        """Stops watching; the replicas go on."""
        readers = list(self._readers.values())
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, request: int, channel: Channel) -> None:
        try:
            while (received := await _receive(channel, request)) is not None:
                message, fds = received
                close_all(fds)
                if isinstance(message, Progress):
                    self._progressed(request, message)
        finally:
            channel.close()
            del self._readers[request]
        self._released(request)


async def _receive(channel: Channel, request: int) -> tuple[Told, list[int]] | None:
    while True:
        try:
            return await channel.areceive()
        except PeerGone:
            return None
        except ChannelError as error:
            log.warning("claim of request %d: %s", request, error)
            await asyncio.sleep(MALFORMED_PAUSE_S)


def inode(sock: socket.socket) -> int:
    """Number by which a socket is found among the descriptors of processes."""
    return os.fstat(sock.fileno()).st_ino


def holders_of(number: int) -> list[int]:
    """Process ids, other than ours, that have a socket open; scans /proc, for rare use."""
    wanted = f"socket:[{number}]"
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        # Processes end, and those of other users are closed to us, while we look.
        with contextlib.suppress(OSError):
            if any(_target(fd) == wanted for fd in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""
