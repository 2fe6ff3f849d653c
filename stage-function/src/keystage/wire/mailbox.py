"""ZeroMQ mailboxes: every process binds one inbox (PULL) and connects an outbox (PUSH) per peer.

A message is one frame, the sender's inbox address and a zero byte before the body, with a second
for a tensor that does not travel through a ring. Order is kept per (sender, receiver). Nothing here
blocks on a dead peer: an outbox drops when its high-water mark is reached, and the caller learns of it.

`Mailbox` is used by the worker's synchronous loop (`receive` with a time-out) and by the router's
event loop (`fd` in an `add_reader`, then `drain`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import zmq

from keystage.wire.api import Message, encode

# Plain numbers: combining zmq's flag enumerations costs more than the call.
_NOBLOCK = int(zmq.NOBLOCK)
_RCVMORE = int(zmq.RCVMORE)

SEND_HIGH_WATER = 20_000
"""Messages queued for one peer before it counts as gone: about 40 waves a second for 500 s."""


def node_identity() -> str:
    """Identity of this host and pid namespace: equal identities share memory and process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


class Mailbox:
    """One inbox and the outboxes of a process.

    Args:
        address: endpoint to bind (`ipc://...`, at most 107 bytes of path).
        context: shared ZeroMQ context, or None for a new one.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.address = address
        self._own = address.encode() + b"\0"
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.setsockopt(zmq.LINGER, 0)
        try:
            self._inbox.bind(address)
        except zmq.ZMQError:
            self._inbox.close(linger=0)
            if self._owns_context:
                self._context.term()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._senders: dict[bytes, str] = {}
        self.dropped = 0

    @property
    def fd(self) -> int:
        """Descriptor that becomes readable when the inbox may have messages (edge-triggered)."""
        return int(self._inbox.getsockopt(zmq.FD))

    def send(self, to: str, message: Message, payload: memoryview | None = None) -> bool:
        """Sends without blocking; False (and counted) when the peer's queue is full."""
        outbox = self._outboxes.get(to)
        if outbox is None:
            outbox = self._connect(to)
        body = self._own + encode(message)
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
        """Closes the outbox of a dead peer and drops what was queued for it."""
        outbox = self._outboxes.pop(peer, None)
        if outbox is not None:
            outbox.close(linger=0)

    def wait(self, timeout_s: float) -> bool:
        """Blocks until a message may be there or the time is over."""
        return bool(self._poller.poll(max(0, round(timeout_s * 1000))))

    def drain(self, limit: int = 1000) -> Iterator[tuple[str, memoryview, bytes | None]]:
        """Yields (sender, body, payload) for what has arrived, at most `limit` of them."""
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
            if sender is None:
                sender = self._senders[name] = name.decode(errors="replace")
            yield sender, memoryview(frame)[end + 1 :], payload

    def has_more(self) -> bool:
        """Whether messages wait after a `drain` that hit its limit (the descriptor will not tell)."""
        return bool(int(self._inbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self, linger_s: float = 0.0) -> None:
        """Closes all sockets, waiting at most `linger_s` for queued messages to leave."""
        for outbox in self._outboxes.values():
            outbox.close(linger=round(linger_s * 1000))
        self._outboxes.clear()
        self._inbox.close(linger=0)
        if self._owns_context:
            self._context.term()
        if self.address.startswith("ipc://"):
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _connect(self, to: str) -> zmq.Socket[bytes]:
        outbox = self._context.socket(zmq.PUSH)
        outbox.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        outbox.setsockopt(zmq.LINGER, 0)
        outbox.setsockopt(zmq.RECONNECT_IVL, 50)
        outbox.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        outbox.connect(to)
        self._outboxes[to] = outbox
        return outbox
