"""The daemon's door: a UNIX socket of type SEQPACKET, its connections, and their answers in order.

Between `client` and `daemon`; a `door` says who may connect. A connection may send several requests
without waiting; answers come in the order of the requests. What is malformed or too large is refused,
never fatal. An open connection that was given a segment is the claim on it. This module must not know
what requests mean. (Over 300 lines: accepting, reading, answering and closing are one life.)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import itertools
import logging
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

from keystage.keysmanager.api import (
    Answer,
    Evict,
    Fork,
    Get,
    Invalidate,
    KeyStages,
    Progress,
    Refused,
    Standbys,
    StatusAsked,
)
from keystage.keysmanager.asked import Asked, close_all
from keystage.keysmanager.channel import Channel, ChannelError, PeerGone, Told
from keystage.keysmanager.door import OWN, Door, NotAdmitted

log = logging.getLogger("keystage.keysmanager")

MAX_PATH_BYTES = 107
MALFORMED_PAUSE_S = 0.01
"""After a message that is none, so that a flood of them does not take the loop."""
COMPLAINT_PAUSE_S = 0.2
"""Between two lines of the log about peers that were refused: they may come by the thousand."""
ACCEPT_PAUSE_S = 0.1
"""After a refused accept (no descriptors left): the next try may find one closed."""
_numbers = itertools.count(1)
"""One row for all doors: a request's number is unique in the process."""
_REQUESTS = (Fork, Get, KeyStages, Invalidate, Evict, Standbys, StatusAsked)


class SocketTaken(Exception):
    """The path cannot be listened on; says why."""


class Port(Protocol):
    """What the daemon does with what comes in."""

    def asked(self, asked: Asked) -> None:
        """A request came; it is answered by `asked.answer`, now or later."""

    def asker_gone(self, asked: Asked) -> None:
        """The connection closed before the answer."""

    def released(self, asked: Asked) -> None:
        """The connection closed that was the claim on a segment."""

    def progressed(self, asked: Asked, progress: Progress) -> None:
        """Who was given a segment says how far it is."""


@dataclasses.dataclass(slots=True)
class _Connection:
    channel: Channel
    origin: str
    order: deque[Asked] = dataclasses.field(default_factory=deque)
    claims: list[Asked] = dataclasses.field(default_factory=list)
    changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    sent: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    is_dead: bool = False


class Server:
    """Listens on one path; see the module.

    Args:
        path: where; a socket left by a dead daemon is replaced.
        port: what is done with requests.
        door: who may connect.
    """

    def __init__(self, path: Path, port: Port, door: Door = OWN) -> None:
        self._path = path
        self._port = port
        self._door = door
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: Counter[str] = Counter()
        self._listener: socket.socket | None = None
        self._lock_fd = -1
        self._next_complaint_s = 0.0

    def start(self) -> None:
        """Binds, and accepts from now on.

        Raises:
            SocketTaken: another daemon listens there, or the path cannot be used.
        """
        self._lock_fd = _lock(self._path)
        try:
            self._listener = _bind(self._path, self._door.mode)
        except OSError as error:
            os.close(self._lock_fd)
            raise SocketTaken(f"{self._path} cannot be listened on: {error}") from error
        self._go(self._accept(self._listener))

    async def stop(self) -> None:
        """Closes every connection and removes the socket."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("cannot accept on %s: %s", self._path, error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            sock.setblocking(False)
            channel = Channel(sock)
            try:
                origin = self._admit(sock)
            except NotAdmitted as error:
                self._complain(str(error))
                with contextlib.suppress(ChannelError):
                    channel.send(Refused(str(error), error.status))
                channel.close()
            else:
                self._connections[origin] += 1
                self._go(self._serve(_Connection(channel, origin)))
            await asyncio.sleep(0)  # an accept that need not wait would leave the loop to one flood

    def _complain(self, reason: str) -> None:
        """Logs a refusal, not every one of a flood."""
        now_s = time.monotonic()
        if now_s >= self._next_complaint_s:
            self._next_complaint_s = now_s + COMPLAINT_PAUSE_S
            log.warning("%s", reason)

    def _admit(self, sock: socket.socket) -> str:
        """Origin of a peer that may come in."""
        door, count = self._door, self._connections.total()
        origin = door.admit(sock)
        if count >= door.connections:
            raise NotAdmitted(f"{count} connections are open, {door.connections} are allowed", 503)
        own = self._connections[origin]
        if own >= door.connections_of_one:
            who = f"pod {origin}" if origin else "the node's own user"
            raise NotAdmitted(
                f"{own} connections of {who} are open, {door.connections_of_one} are allowed", 503
            )
        return origin

    async def _serve(self, connection: _Connection) -> None:
        writer = self._go(self._write(connection))
        try:
            await self._read(connection)
        finally:
            writer.cancel()
            # It must have let go of the descriptor before its number can be another connection's.
            await asyncio.gather(writer, return_exceptions=True)
            self._connections -= Counter((connection.origin,))  # and forgets who has none
            self._close(connection)

    async def _read(self, connection: _Connection) -> None:
        while not connection.is_dead:
            if len(connection.order) >= 2 * self._door.waiting:
                # It does not read its answers: nothing more is taken from it until it does.
                connection.sent.clear()
                await connection.sent.wait()
                continue
            try:
                received = await self._receive(connection)
            except (PeerGone, TimeoutError):
                return
            except ChannelError as error:
                self._refuse(connection, str(error), 400)
                await asyncio.sleep(MALFORMED_PAUSE_S)
                continue
            if received is None:
                return
            self._take(connection, *received)
            await asyncio.sleep(0)  # a receive that need not wait would leave the loop to one flood

    async def _receive(self, connection: _Connection) -> tuple[Told, list[int]] | None:
        """The next message; TimeoutError once a peer that holds and awaits nothing was silent too long."""
        while True:
            try:
                async with asyncio.timeout(self._door.silent_s):
                    return await connection.channel.areceive()
            except TimeoutError:
                if not connection.claims and not connection.order:
                    raise

    def _take(self, connection: _Connection, message: Told, fds: Sequence[int]) -> None:
        if isinstance(message, Progress):
            close_all(fds)
            if connection.claims:
                self._port.progressed(connection.claims[-1], message)
        elif not isinstance(message, _REQUESTS):
            close_all(fds)
            self._refuse(connection, f"{type(message).__name__} is no request", 400)
        elif len(connection.order) >= self._door.waiting:
            close_all(fds)
            self._refuse(connection, f"{self._door.waiting} requests of this connection wait already", 429)
        elif len(connection.claims) >= self._door.claims:
            close_all(fds)
            self._refuse(connection, f"{self._door.claims} segments are this connection's already", 429)
        else:
            asked = Asked(next(_numbers), message, fds, connection.changed.set, connection.origin)
            connection.order.append(asked)
            self._port.asked(asked)

    def _refuse(self, connection: _Connection, reason: str, status: int) -> None:
        asked = Asked(next(_numbers), StatusAsked(), (), connection.changed.set)
        connection.order.append(asked)
        asked.answer(Refused(reason, status))

    async def _write(self, connection: _Connection) -> None:
        """Sends answers in the order of the requests."""
        while True:
            while connection.order and (answer := connection.order[0].ready()) is not None:
                asked = connection.order.popleft()
                if asked.is_claim:
                    connection.claims.append(asked)
                message, fds = answer
                try:
                    await _send(connection.channel, message, fds)
                except ChannelError:
                    connection.is_dead = True  # the asker is gone: the reader sees it too
                    return
                finally:
                    close_all(fds)
                    connection.sent.set()
            connection.changed.clear()
            await connection.changed.wait()

    def _close(self, connection: _Connection) -> None:
        connection.channel.close()
        for asked in [*connection.claims, *connection.order]:
            answer = asked.ready()
            if answer is not None:
                close_all(answer[1])
            asked.drop_fds()
            if asked.is_claim:
                self._port.released(asked)
            elif asked.is_open:
                asked.is_open = False
                self._port.asker_gone(asked)

    def _go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _send(channel: Channel, message: Answer, fds: Sequence[int]) -> None:
    try:
        await channel.asend(message, fds)
    except PeerGone:
        raise
    except ChannelError as error:
        # An answer that does not fit a message (a status of thousands of holders) is refused as well.
        await channel.asend(Refused(f"the answer cannot be sent: {error}", 500), ())


def _lock(path: Path) -> int:
    """Takes the path for this process; the lock ends with it, however it ends."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise SocketTaken(f"{path} has {len(os.fsencode(path))} bytes, a socket's path {MAX_PATH_BYTES}")
    lock = path.with_name(path.name + ".lock")
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SocketTaken(f"{lock} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise SocketTaken(f"{path} is served by another KeysManager, process {holder}") from None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def _bind(path: Path, mode: int) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Nobody can connect before the mode is set: `listen` comes after it.
        listener.bind(str(path))
        path.chmod(mode)
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
