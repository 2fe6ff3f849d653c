"""ZeroMQ mailboxes: every process binds one inbox (PULL) and connects an outbox (PUSH) per peer.

The inbox listens on `ipc://` and, where other nodes are to reach it, on `tcp://` with CURVE as well
(`tcp_inbox`). A peer is connected over ipc when its address says that it is on this node, else over tcp; both
ways carry the same bytes. When the deployment's secret is replaced, outboxes over tcp are connected anew.

A message is one frame, the sender's inbox address and a zero byte before the body, with a second
for a tensor that does not travel through a ring. Order is kept per (sender, receiver). Nothing here
blocks on a dead peer: an outbox drops when its high-water mark is reached, and the caller learns of it.

`Mailbox` is used by the worker's synchronous loop (`receive` with a time-out) and by the router's
event loop (`fd` in an `add_reader`, then `drain`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from keystage.wire.address import Address, join_host, parse, split_host
from keystage.wire.api import Message, encode
from keystage.wire.errors import WireError
from keystage.wire.link import Keys, Link
from keystage.wire.link_watch import LinkWatch
from keystage.wire.tcp_inbox import FIRST, HEARTBEAT_MS, LAST, MAX_FRAME_BYTES, SILENT_MS, TcpInbox

log = logging.getLogger(__name__)

# Plain numbers: combining zmq's flag enumerations costs more than the call.
_NOBLOCK = int(zmq.NOBLOCK)
_RCVMORE = int(zmq.RCVMORE)

SEND_HIGH_WATER = 20_000
"""Messages queued for one peer before it counts as gone: about 40 waves a second for 500 s."""


CONNECT_MS, HANDSHAKE_MS = 2000, 5000
"""Then another try. Behind a Service's address a try stays with the pod it first went to: begun while that
one ends it waits for nobody, by the system's own bound for two minutes."""
RETIRE_S = 30.0
"""For what an outbox with an old key still has to send."""
MOST_SENDERS = 1024
"""Names that are kept decoded. A peer's last word may come after it was forgotten, so they are bounded."""


class Mailbox:
    """One inbox and the outboxes of a process.

    Args:
        address: name of this process and endpoint to bind: `ipc://PATH` (at most 107 bytes of path),
            `tcp://HOST:PORT`, or both, see `wire.address`.
        context: shared ZeroMQ context, or None for a new one.
        link: keys and own node; needed for everything beyond `ipc://`. With a host in it an
            `ipc://` address gets a tcp port of the system's choice beside it.
        tensors: `host:port` where other nodes fetch this process's tensors, to be told in its address.
        is_named: others know this process by `address` as it stands: nothing is added to it.

    Attributes:
        address: the name that other processes know; complete only after binding.

    Raises:
        zmq.ZMQError: the address cannot be bound.
        WireError: the address has another form, or needs a secret that is not there.
    """

    def __init__(
        self,
        address: str,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        link: Link | None = None,
        tensors: str = "",
        *,
        is_named: bool = False,
    ) -> None:
        self._link = link or Link()
        self._parts = parse(address)
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._inbox: zmq.Socket[bytes] | None = None
        self._tcp: TcpInbox | None = None
        try:
            self._bind(tensors, is_named=is_named)
        except (zmq.ZMQError, WireError):
            self._close_inbox()
            raise
        self.address = self._parts.text
        self._own = self.address.encode() + b"\0"
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._outbox_keys: dict[str, Keys] = {}
        self._links = LinkWatch()
        self._retired: list[tuple[float, Keys, zmq.Socket[bytes]]] = []
        self._senders: dict[bytes, str] = {}
        self._near: dict[str, bool] = {}
        self.dropped = 0
        self._keyring = self._link.keyring
        self._version = 0 if self._keyring is None else self._keyring.version
        self._changed = None if self._keyring is None else self._keyring.watch()
        self._watched: set[int] = set() if self._changed is None else {self._changed}
        self._epoll: select.epoll | None = None
        self._look_out()

    @property
    def refused(self) -> int:
        """Peers that tried to connect over tcp without proving that they belong to the deployment."""
        return 0 if self._tcp is None else self._tcp.refused

    @property
    def fd(self) -> int:
        """Descriptor that becomes readable when the inbox may have messages."""
        if self._tcp is None and self._changed is None:
            assert self._inbox is not None
            return int(self._inbox.getsockopt(zmq.FD))  # edge-triggered
        if self._epoll is None:
            self._epoll = select.epoll()
            self._look_out()
        return self._epoll.fileno()

    def send(self, to: str, message: Message, payload: memoryview | None = None) -> bool:
        """Sends without blocking; False (and counted) when the peer's queue is full or cannot be reached."""
        outbox = self._outboxes.get(to)
        if outbox is None:
            reason = self.unreachable(to)
            if reason is not None:
                log.error("cannot send to %s: %s", to, reason)
                self.dropped += 1
                return False
            outbox = self._connect(to)
        body = self._own + encode(message)
        if len(body) > MAX_FRAME_BYTES and not self.is_near(to):
            log.error(
                "a message of %d bytes is too long for %s; the bound is %d", len(body), to, MAX_FRAME_BYTES
            )
            self.dropped += 1
            return False
        try:
            if payload is None:
                outbox.send(body, _NOBLOCK)
            else:
                outbox.send_multipart([body, payload], _NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            return False
        return True

    def forget(self, peer: str) -> None:
        """Closes the outbox of a dead peer, drops what was queued for it, and forgets its name."""
        self._near.pop(peer, None)
        self._senders.pop(peer.encode(), None)
        self._links.drop(peer)
        outbox = self._outboxes.pop(peer, None)
        if outbox is not None:
            outbox.close(linger=0)
        self._outbox_keys.pop(peer, None)
        if self._tcp is not None:
            self._tcp.forget(peer.encode())

    def broken(self) -> list[str]:
        """Peers to whom a connection broke since the last call: what was sent to them last may be lost."""
        return self._links.broken()

    def unreachable(self, peer: str) -> str | None:
        """Why a peer can never be reached from here, None when it can."""
        try:
            parts = parse(peer)
        except WireError as error:
            return str(error)
        if self.is_near(peer):
            return None
        if not parts.tcp:
            return "it is on another node and has no tcp inbox (its KEYSTAGE_WIRE_HOST is not set)"
        if self._link.secret is None:
            return "it is reached over tcp only, and KEYSTAGE_WIRE_KEY_FILE is not set here"
        return None

    def is_near(self, peer: str) -> bool:
        """Whether a peer is reached over ipc; asked for every tensor, so answers are kept."""
        try:
            return self._near[peer]
        except KeyError:
            pass
        try:
            parts = parse(peer)
        except WireError:
            return False  # nor over tcp: `send` says so
        found = self._near[peer] = bool(parts.ipc) and parts.is_on(self._link.node)
        return found

    def watch(self, fd: int) -> None:
        """`wait` ends as well when this descriptor is readable."""
        self._watched.add(fd)
        self._look_out()

    def wait(self, timeout_s: float) -> bool:
        """Blocks until a message may be there or the time is over."""
        return bool(self._poller.poll(max(0, round(timeout_s * 1000))))

    def drain(self, limit: int = 1000) -> Iterator[tuple[str, memoryview, bytes | None]]:
        """Yields (sender, body, payload) for what has arrived, at most `limit` of them from each socket."""
        if self._keyring is not None and (self._keyring.version != self._version or self._retired):
            self._renew()
        if self._tcp is not None:
            for name, body, payload in self._tcp.drain(limit):
                yield self._sender(name), body, payload
        if self._inbox is None:
            return
        for _ in range(limit):
            try:
                frame = self._inbox.recv(_NOBLOCK)
            except zmq.Again:
                return
            payload = None
            while self._inbox.get(_RCVMORE):
                payload = self._inbox.recv()
            end = frame.find(b"\0")
            if end < 0:
                continue
            name = frame[:end]
            sender = self._senders.get(name)
            yield sender or self._sender(name), memoryview(frame)[end + 1 :], payload

    def has_more(self) -> bool:
        """Whether messages wait after a `drain` that hit its limit (the descriptor will not tell)."""
        if self._tcp is not None and self._tcp.has_more():
            return True
        return self._inbox is not None and bool(int(self._inbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self, linger_s: float = 0.0) -> None:
        """Closes all sockets, waiting at most `linger_s` for queued messages to leave."""
        self._links.close()
        for outbox in (*self._outboxes.values(), *(retired for *_, retired in self._retired)):
            outbox.close(linger=round(linger_s * 1000))
        self._outboxes.clear()
        self._retired.clear()
        if self._keyring is not None and self._changed is not None:
            self._keyring.unwatch(self._changed)
        if self._epoll is not None:
            self._epoll.close()
        self._close_inbox()
        if self._parts.ipc:
            Path(self._parts.ipc).unlink(missing_ok=True)

    # ------------------------------------------------------------ secrets that change

    def _renew(self) -> None:
        """Takes over what changed in the key file; ends outboxes that had their time."""
        assert self._keyring is not None
        now_s = time.monotonic()
        accepted = self._link.keys
        for retired in [old for old in self._retired if old[0] <= now_s or old[1] not in accepted]:
            self._retired.remove(retired)
            retired[2].close(linger=0)
        if self._keyring.version == self._version:
            return
        self._version = self._keyring.version
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._changed or 0)
        if self._tcp is not None:
            try:
                self._tcp.renew()
            except (WireError, zmq.ZMQError) as error:
                log.error("peers with the new secret cannot connect: %s", error)
            self._look_out()
        used = accepted[0]
        for peer in [peer for peer, keys in self._outbox_keys.items() if keys != used]:
            old = self._outboxes.pop(peer)
            self._links.drop(peer)
            self._retired.append((now_s + RETIRE_S, self._outbox_keys[peer], old))
            with contextlib.suppress(zmq.Again):
                old.send(self._own + LAST, _NOBLOCK)
            self._connect(peer).send(self._own + FIRST, _NOBLOCK)

    def _look_out(self) -> None:
        """Has `wait` and `fd` look at the sockets and descriptors that there are now."""
        sockets = [] if self._tcp is None else self._tcp.sockets
        if self._inbox is not None:
            sockets.append(self._inbox)
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)
        for fd in self._watched:
            self._poller.register(fd, zmq.POLLIN)
        if self._epoll is not None:
            wanted = {int(socket.getsockopt(zmq.FD)) for socket in sockets} | {self._changed or 0} - {0}
            for fd in wanted:  # who is closed has left by itself
                with contextlib.suppress(FileExistsError):
                    self._epoll.register(fd, select.EPOLLIN)

    # ------------------------------------------------------------ sockets

    def _bind(self, tensors: str, *, is_named: bool) -> None:
        if self._parts.ipc:
            self._inbox = self._context.socket(zmq.PULL)
            self._inbox.setsockopt(zmq.RCVHWM, 0)
            self._inbox.setsockopt(zmq.LINGER, 0)
            self._inbox.bind(f"ipc://{self._parts.ipc}")
        if self._parts.tcp:
            self._bind_tcp(*split_host(self._parts.tcp))
        elif self._link.host and not is_named:
            self._parts = self._complete(self._bind_tcp(self._link.host, 0), tensors)
        elif self._link.node and not is_named:
            self._parts = dataclasses.replace(self._parts, node=self._link.node)

    def _bind_tcp(self, host: str, port: int) -> int:
        """Opens the inbox's tcp end; returns the port."""
        if self._link.secret is None:
            raise WireError(f"an inbox at tcp://{join_host(host, port)} needs KEYSTAGE_WIRE_KEY_FILE")
        link = dataclasses.replace(self._link, host=self._link.host or host)
        self._tcp = TcpInbox(self._context, link, port)
        return self._tcp.port

    def _close_inbox(self) -> None:
        if self._inbox is not None:
            self._inbox.close(linger=0)
        if self._tcp is not None:
            self._tcp.close()
        if self._owns_context:
            self._context.term()

    def _sender(self, name: bytes) -> str:
        found = self._senders.get(name)
        if found is None:
            if len(self._senders) >= MOST_SENDERS:
                self._senders.clear()
            found = self._senders[name] = name.decode(errors="replace")
        return found

    def _complete(self, port: int, tensors: str) -> Address:
        """The address that tells neighbours and other nodes alike."""
        tcp = join_host(self._link.host, port)
        return Address(self._parts.ipc, tcp, tensors, self._link.node)

    def _connect(self, to: str) -> zmq.Socket[bytes]:
        parts = parse(to)
        outbox = self._context.socket(zmq.PUSH)
        outbox.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        outbox.setsockopt(zmq.LINGER, 0)
        outbox.setsockopt(zmq.RECONNECT_IVL, 50)
        outbox.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if self.is_near(to):
            outbox.connect(f"ipc://{parts.ipc}")
        else:
            outbox.setsockopt(zmq.IPV6, 1)
            outbox.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            outbox.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
            outbox.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            outbox.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            self._outbox_keys[to] = keys = self._link.keys[0]
            outbox.setsockopt(zmq.CURVE_SERVERKEY, keys.inbox_keys[0])
            outbox.setsockopt(zmq.CURVE_PUBLICKEY, keys.sender_keys[0])
            outbox.setsockopt(zmq.CURVE_SECRETKEY, keys.sender_keys[1])
            self._links.add(to, outbox)
            outbox.connect(f"tcp://{parts.tcp}")
        self._outboxes[to] = outbox
        return outbox
