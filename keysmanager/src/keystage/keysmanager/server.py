"""The daemon's door: a UNIX socket of type SEQPACKET, its connections, and their answers in order.

Between `client` and `daemon`. A connection may send several requests without waiting; answers come
in the order of the requests. What is malformed or too large is refused, never fatal. An open
connection that was given a segment is the claim on it. This module must not know what requests mean.
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
from collections import deque
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
    Message,
    Progress,
    Refused,
    Standbys,
    StatusAsked,
)
from keystage.keysmanager.asked import Asked, close_all
from keystage.keysmanager.channel import Channel, ChannelError, PeerGone, peer

log = logging.getLogger("keystage.keysmanager")

MAX_CONNECTIONS = 1024
MAX_WAITING = 256
"""Requests of one connection that are not answered yet; more are refused at once."""
MAX_PATH_BYTES = 107
MALFORMED_PAUSE_S = 0.01
"""After a message that is none, so that a flood of them does not take the loop."""
ACCEPT_PAUSE_S = 0.1
"""After a refused accept (no descriptors left): the next try may find one closed."""
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


def is_allowed(uid: int, own_uid: int) -> bool:
    """Whether a process of user `uid` may ask: our own user, or root."""
    return uid in (own_uid, 0)


@dataclasses.dataclass(slots=True)
class _Connection:
    channel: Channel
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
    """

    def __init__(self, path: Path, port: Port) -> None:
        self._path = path
        self._port = port
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0
        self._listener: socket.socket | None = None
        self._lock_fd = -1

    def start(self) -> None:
        """Binds, and accepts from now on.

        Raises:
            SocketTaken: another daemon listens there, or the path cannot be used.
        """
        self._lock_fd = _lock(self._path)
        try:
            self._listener = _bind(self._path)
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
            reason, status = self._refusal(sock)
            if reason:
                log.warning("%s", reason)
                channel = Channel(sock)
                with contextlib.suppress(ChannelError):
                    channel.send(Refused(reason, status))
                channel.close()
                continue
            self._connections += 1
            self._go(self._serve(Channel(sock)))

    def _refusal(self, sock: socket.socket) -> tuple[str, int]:
        pid, uid = peer(sock)
        if not is_allowed(uid, os.geteuid()):
            return f"process {pid} of user {uid} may not ask the KeysManager of user {os.geteuid()}", 403
        if self._connections >= MAX_CONNECTIONS:
            return f"{self._connections} connections are open, {MAX_CONNECTIONS} are allowed", 503
        return "", 0

    async def _serve(self, channel: Channel) -> None:
        connection = _Connection(channel)
        writer = self._go(self._write(connection))
        try:
            await self._read(connection)
        finally:
            writer.cancel()
            # It must have let go of the descriptor before its number can be another connection's.
            await asyncio.gather(writer, return_exceptions=True)
            self._connections -= 1
            self._close(connection)

    async def _read(self, connection: _Connection) -> None:
        while not connection.is_dead:
            if len(connection.order) >= 2 * MAX_WAITING:
                # It does not read its answers: nothing more is taken from it until it does.
                connection.sent.clear()
                await connection.sent.wait()
                continue
            try:
                received = await connection.channel.areceive()
            except PeerGone:
                return
            except ChannelError as error:
                self._refuse(connection, str(error), 400)
                await asyncio.sleep(MALFORMED_PAUSE_S)
                continue
            if received is None:
                return
            self._take(connection, *received)
            await asyncio.sleep(0)  # a receive that need not wait would leave the loop to one flood

    def _take(self, connection: _Connection, message: Message, fds: Sequence[int]) -> None:
        if isinstance(message, Progress):
            close_all(fds)
            if connection.claims:
                self._port.progressed(connection.claims[-1], message)
        elif not isinstance(message, _REQUESTS):
            close_all(fds)
            self._refuse(connection, f"{type(message).__name__} is no request", 400)
        elif len(connection.order) >= MAX_WAITING:
            close_all(fds)
            self._refuse(connection, f"{MAX_WAITING} requests of this connection wait already", 429)
        else:
            asked = Asked(next(self._numbers), message, fds, connection.changed.set)
            connection.order.append(asked)
            self._port.asked(asked)

    def _refuse(self, connection: _Connection, reason: str, status: int) -> None:
        asked = Asked(next(self._numbers), StatusAsked(), (), connection.changed.set)
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


def _bind(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Nobody can connect before the mode is set: `listen` comes after it.
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
