"""The tcp end of an inbox: one port, and behind it one PULL socket for each secret that is accepted.

Between `mailbox`, which owns it, and `gate`, which says who may send. A CURVE socket has one key, so while a
secret is being replaced there are two of them at the same port (SO_REUSEPORT): the system deals connections
to either, who comes to the wrong one fails its handshake and comes again 50 ms later (decision 030).
A socket whose secret is not accepted any more is closed with all its connections.

A sender that goes over to a new secret connects anew, and what it sent before may still be on its way. So
the last frame of the old connection says that it is the last, the first of the new one that there was an
older one, and what comes over the new one is kept until the old one has ended, or `HOLD_S` have passed.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator

import zmq

from keystage.wire.address import join_host
from keystage.wire.errors import WireError
from keystage.wire.gate import Gate
from keystage.wire.link import Keys, Link

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 30
"""Largest frame between nodes, four times the bytes that a router keeps waiting by default. A peer that
announces more is cut off before it has proved anything, so that it cannot fill our memory."""
HEARTBEAT_MS, SILENT_MS = 2000, 10_000
"""ZeroMQ's own pings between nodes, so that a vanished host's connection ends and is made anew."""
BACKLOG = 128
_MARK = b"\xc1"
LAST, FIRST = _MARK + b"<", _MARK + b">"
"""Bodies of the frames with which a sender goes over; MessagePack never begins with C1."""
HOLD_S = 10.0
"""A connection that breaks does not say that it has ended."""

_NOBLOCK = int(zmq.NOBLOCK)
_RCVMORE = int(zmq.RCVMORE)
Frame = tuple[bytes, memoryview, bytes | None]
"""Sender, body, payload."""


@dataclasses.dataclass(slots=True)
class _Door:
    keys: Keys
    listening: socket.socket
    socket: zmq.Socket[bytes]


@dataclasses.dataclass(slots=True)
class _Held:
    door: _Door
    until_s: float
    frames: list[Frame] = dataclasses.field(default_factory=list)


class TcpInbox:
    """Listens from the start. All methods belong to one thread.

    Args:
        context: ZeroMQ's.
        link: keys, and where to listen.
        port: 0: one of the system's choice.

    Attributes:
        port: that it listens on.

    Raises:
        WireError: the address cannot be listened on.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], link: Link, port: int) -> None:
        self._context = context
        self._link = link
        self._host = link.listen_host
        self._doors: list[_Door] = []
        self._over: deque[Frame] = deque()
        self._ended: set[bytes] = set()
        self._held: dict[bytes, _Held] = {}
        self.port = port
        self._gate = Gate(context, f"tcp://{join_host(self._host, port)}" if port else f"tcp://{self._host}")
        try:
            self.renew()
        except (WireError, zmq.ZMQError):
            self.close()
            raise

    @property
    def refused(self) -> int:
        """Peers that did not prove that they belong to the deployment."""
        return self._gate.refused

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """All sockets; others after `renew`."""
        return [door.socket for door in self._doors]

    def renew(self) -> None:
        """Opens a socket for each secret that is accepted now, closes those of the others.

        Raises:
            WireError: the address cannot be listened on.
        """
        accepted = self._link.keys
        self._gate.accept(keys.sender_keys[0] for keys in accepted)
        known = {door.keys for door in self._doors}
        for keys in accepted:
            if keys not in known:
                self._doors.append(self._opened(keys))
        for door in [door for door in self._doors if door.keys not in accepted]:
            self._over.extend(self._frames(door, 1 << 30))
            self._shut(door)

    def drain(self, limit: int) -> Iterator[Frame]:
        """What has arrived, at most `limit` frames of each socket."""
        while self._over:
            yield self._over.popleft()
        for door in self._doors:
            yield from self._frames(door, limit)
        if self._held:
            now_s = time.monotonic()
            for sender in [sender for sender, held in self._held.items() if held.until_s <= now_s]:
                log.warning(
                    "%s did not end its old connection within %g s", sender.decode(errors="replace"), HOLD_S
                )
                yield from self._held.pop(sender).frames

    def has_more(self) -> bool:
        """Whether frames wait after a `drain`."""
        return bool(self._over) or any(
            int(door.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for door in self._doors
        )

    def forget(self, sender: bytes) -> None:
        """A peer is dead."""
        self._ended.discard(sender)
        self._held.pop(sender, None)

    def close(self) -> None:
        """Closes everything."""
        for door in list(self._doors):
            self._shut(door)
        self._gate.close()

    def _frames(self, door: _Door, limit: int) -> Iterator[Frame]:
        inbox = door.socket
        for _ in range(limit):
            try:
                frame = inbox.recv(_NOBLOCK)
            except zmq.Again:
                return
            payload = None
            while inbox.get(_RCVMORE):
                payload = inbox.recv()
            end = frame.find(b"\0")
            if end < 0:
                continue
            sender, body = frame[:end], memoryview(frame)[end + 1 :]
            if frame.startswith(_MARK, end + 1):
                yield from self._gone_over(door, sender, body)
            elif self._held and (held := self._held.get(sender)) is not None and held.door is door:
                held.frames.append((sender, body, payload))
            else:
                yield sender, body, payload

    def _gone_over(self, door: _Door, sender: bytes, body: memoryview) -> Iterator[Frame]:
        if body == LAST:
            held = self._held.pop(sender, None)
            if held is None:
                self._ended.add(sender)
            else:
                yield from held.frames
        elif body == FIRST and sender not in self._ended:
            self._held[sender] = _Held(door, time.monotonic() + HOLD_S)
        else:
            self._ended.discard(sender)

    def _opened(self, keys: Keys) -> _Door:
        listening = self._listening()
        self.port = listening.getsockname()[1]
        name = f"tcp://{join_host(self._host, self.port)}"
        inbox = self._context.socket(zmq.PULL)
        inbox.setsockopt(zmq.RCVHWM, 0)
        inbox.setsockopt(zmq.LINGER, 0)
        inbox.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        inbox.setsockopt(zmq.IPV6, ":" in self._host)
        inbox.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        inbox.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        inbox.setsockopt(zmq.CURVE_SERVER, 1)
        inbox.setsockopt(zmq.CURVE_SECRETKEY, keys.inbox_keys[1])
        inbox.setsockopt(zmq.USE_FD, os.dup(listening.fileno()))
        self._gate.watch(inbox)
        inbox.bind(name)
        return _Door(keys, listening, inbox)

    def _listening(self) -> socket.socket:
        """A listening socket beside those that are there: only then may the port be shared."""
        made = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._doors:
                _share(made, *(door.listening for door in self._doors), is_shared=True)
            made.bind((self._host, self.port))
            made.listen(BACKLOG)
        except OSError as error:
            made.close()
            raise WireError(
                f"cannot bind tcp://{join_host(self._host, self.port)}: {error.strerror}"
            ) from error
        made.setblocking(False)
        return made

    def _shut(self, door: _Door) -> None:
        self._doors.remove(door)
        door.socket.close(linger=0)
        door.listening.close()
        if len(self._doors) == 1:
            _share(self._doors[0].listening, is_shared=False)


def _share(*listening: socket.socket, is_shared: bool) -> None:
    for one in listening:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
