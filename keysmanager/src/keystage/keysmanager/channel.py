"""Messages with descriptors beside them, over UNIX sockets of type SEQPACKET.

Joins client, daemon, fork server, holders and replicas (`api` holds the messages). The kernel keeps
the borders of messages, so one receive is one message; a message fits the socket buffer or is refused
before it is sent. Received descriptors are closed on exec, and belong to the receiver from then on.

The blocking calls serve the single-threaded processes, the coroutines the daemon. Both may be used
on one channel, one receiver at a time. Nothing here interprets a message.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from keystage.keysmanager.api import MAX_MESSAGE_BYTES, Answer, ForkServerMessage, Request
from keystage.wire.unreadable import UNREADABLE

Told = Request | Answer | ForkServerMessage
"""Whatever may come over a channel."""

MAX_DESCRIPTORS = 16
"""Beside one message; four is the most that is sent today, the kernel takes 253."""

_INT_BYTES = array.array("i").itemsize
_CONTROL_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT_BYTES)
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


class ChannelError(Exception):
    """A message that cannot be sent or understood; names the bound and the actual value."""


class PeerGone(ChannelError):
    """The other end is closed."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, both closed on exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected, as the kernel recorded them (SO_PEERCRED)."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class Channel:
    """One end.

    Args:
        sock: connected SEQPACKET socket; the channel owns it from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @property
    def sock(self) -> socket.socket:
        """The socket below, for `peer` and for passing it on."""
        return self._sock

    def fileno(self) -> int:
        """Descriptor, for selectors; -1 once closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """Closes this end; the other one reads end of file. May be called twice."""
        self._sock.close()

    def send(self, message: Told, fds: Sequence[int] = ()) -> None:
        """Sends, and waits while the other end's buffer is full. The descriptors stay open here.

        Raises:
            PeerGone: the other end is closed.
            ChannelError: too large, too many descriptors, or refused by the kernel.
        """
        self._send(_encoded(message, fds), fds, 0)

    def try_send(self, message: Told) -> bool:
        """Sends if that needs no waiting; False: buffer full, other end closed, or not sendable."""
        try:
            self._send(_encoded(message, ()), (), socket.MSG_DONTWAIT)
        except (BlockingIOError, ChannelError):
            return False
        return True

    def receive(self) -> tuple[Told, list[int]] | None:
        """Waits for a message and its descriptors; None: the other end is closed.

        Raises:
            ChannelError: malformed, too large, or descriptors were lost (all are closed then).
        """
        self._sock.setblocking(True)
        return self._receive(0)

    async def asend(self, message: Told, fds: Sequence[int] = ()) -> None:
        """As `send`, on the running loop."""
        body = _encoded(message, fds)
        while True:
            try:
                self._send(body, fds, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await _wait(asyncio.get_running_loop().add_writer, self._remove_writer, self.fileno())
            else:
                return

    async def areceive(self) -> tuple[Told, list[int]] | None:
        """As `receive`, on the running loop."""
        while True:
            try:
                return self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                await _wait(asyncio.get_running_loop().add_reader, self._remove_reader, self.fileno())

    @staticmethod
    def _remove_reader(fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)

    @staticmethod
    def _remove_writer(fd: int) -> None:
        asyncio.get_running_loop().remove_writer(fd)

    def _send(self, body: bytes, fds: Sequence[int], flags: int) -> None:
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([body], control, flags | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno in _GONE:
                raise PeerGone(f"the other end is closed: {error.strerror}") from error
            raise ChannelError(
                f"message of {len(body)} bytes with {len(fds)} descriptors: {error.strerror}"
            ) from error

    def _taken(self, flags: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        """One `recvmsg`; a reset is told before what the other end said last, and is told once."""
        try:
            return self._sock.recvmsg(MAX_MESSAGE_BYTES, _CONTROL_BYTES, flags)
        except ConnectionResetError:
            return self._sock.recvmsg(MAX_MESSAGE_BYTES, _CONTROL_BYTES, flags)

    def _receive(self, flags: int) -> tuple[Told, list[int]] | None:
        try:
            body, control, state, _ = self._taken(flags | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise ChannelError(f"receiving: {error.strerror}") from error
        fds = _descriptors(control)
        try:
            message = _decoded(body, state)
        except ChannelError:
            for fd in fds:
                os.close(fd)
            raise
        if message is None:
            for fd in fds:
                os.close(fd)
            return None
        return message, fds


def _encoded(message: Told, fds: Sequence[int]) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ChannelError(
            f"{type(message).__name__} of {len(body)} bytes: a message holds at most {MAX_MESSAGE_BYTES}"
        )
    if len(fds) > MAX_DESCRIPTORS:
        raise ChannelError(
            f"{type(message).__name__} with {len(fds)} descriptors: at most {MAX_DESCRIPTORS} go beside one"
        )
    return body


def _decoded(body: bytes, state: int) -> Told | None:
    """The message; None for end of file."""
    if state & socket.MSG_TRUNC:
        raise ChannelError(f"message of more than {MAX_MESSAGE_BYTES} bytes received")
    if state & socket.MSG_CTRUNC:
        raise ChannelError(
            f"descriptors were lost: more than {MAX_DESCRIPTORS} beside one message, or no room for them here"
        )
    if not body:
        return None
    try:
        return _decoder.decode(body)
    except UNREADABLE as error:
        raise ChannelError(f"malformed message of {len(body)} bytes: {error}") from error


def _descriptors(control: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _INT_BYTES])
    return list(fds)


async def _wait(
    add: Callable[[int, Callable[[], None]], object], remove: Callable[[int], None], fd: int
) -> None:
    """Waits until `fd` is ready; leaves no watcher behind, also when cancelled."""
    if fd < 0:
        raise PeerGone("this end is closed")
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add(fd, wake)
    try:
        await ready
    finally:
        remove(fd)
