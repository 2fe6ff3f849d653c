"""The producer's end of tensor connections: hands out slots of its ring to consumers of other nodes.

A tensor lies in the ring as for a neighbour, and its slot is the consumer's until its `Ack`: so a full
ring is back-pressure over the network too, and nothing is queued here. What is asked for is checked
against the ring's ledger; a slot that was freed meanwhile (its consumer was given up) is refused.

One thread accepts, one serves each connection; they touch the ledger by one lookup and the ring by
reading. They must not change either: that is the engine's.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time

from keystage.wire.address import join_host
from keystage.wire.errors import PeerError, WireError
from keystage.wire.link import Keys, Link
from keystage.wire.ring import Ring, RingError
from keystage.wire.tensor_stream import (
    MAX_REASON_BYTES,
    OK,
    REFUSED,
    REPLY,
    REQUEST,
    explain,
    receive,
    welcome,
)

log = logging.getLogger(__name__)

ACCEPT_AGAIN_S = 0.1
"""Until another connection is taken when one could not be (no descriptor left, say)."""

MAX_CONNECTIONS = 256
"""Consumers of one producer; what connects beyond them is closed at once."""
MAX_STRANGERS = 32
"""Connections that have not proved the secret yet. One more ends the oldest of them, not the newest: a
handshake takes milliseconds, so that a consumer gets through while strangers wait for their time-out."""
LOG_EVERY_S = 10.0
"""One line about refused peers in a while is enough: their number is in it."""
CORK_BYTES = 64 * 1024
"""Up to this size head and tensor leave as one piece: copying is cheaper than a second packet."""


class TensorServer:
    """Serves one ring. Listens from the start; `close` ends it.

    Args:
        ring: the ring.
        link: keys, and where to listen.

    Attributes:
        address: `host:port` for other nodes.
        refused: connections refused so far.

    Raises:
        WireError: the address cannot be listened on.
    """

    def __init__(self, ring: Ring, link: Link) -> None:
        self.refused = 0
        self._ring = ring
        self._link = link
        host = link.listen_host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise WireError(
                f"cannot listen for tensors on {host!r} (KEYSTAGE_WIRE_BIND or KEYSTAGE_WIRE_HOST): {error}"
            ) from error
        self.address = join_host(link.host, self._listening.getsockname()[1])
        self._open: set[socket.socket] = set()
        # With a descriptor of ours each: the handshake of TLS takes the accepted one over.
        self._strangers: dict[socket.socket, socket.socket] = {}
        self._told_s = -LOG_EVERY_S
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="tensors", daemon=True).start()

    def close(self) -> None:
        """Stops listening and cuts every connection."""
        with self._lock:
            self._is_closed = True
            for sock in (*self._open, *self._strangers.values()):
                _cut(sock)
        # A blocked accept does not notice a close, but does notice this.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, (host, port, *_) = self._listening.accept()
                handle = _handle_of(sock)
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("no tensor connection could be taken: %s", error)
                time.sleep(ACCEPT_AGAIN_S)
                continue
            peer = join_host(host, port)
            with self._lock:
                is_welcome = len(self._open) < MAX_CONNECTIONS and not self._is_closed
                if is_welcome:
                    while len(self._strangers) >= MAX_STRANGERS:
                        oldest = self._strangers.pop(next(iter(self._strangers)))
                        _cut(oldest)  # its thread sees the end, and refuses it
                        oldest.close()
                    self._strangers[sock] = handle
            if not is_welcome:
                self._refuse(peer, f"there are {MAX_CONNECTIONS} tensor connections already")
                handle.close()
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock, peer), name="tensors-to", daemon=True).start()

    def _serve(self, accepted: socket.socket, peer: str) -> None:
        sock = accepted
        try:
            try:
                sock, keys = welcome(accepted, self._link, peer)
                if not self._is_taken(accepted, sock):
                    raise PeerError(f"{peer} came too late: others took its place")
            except (PeerError, OSError) as error:
                self._refuse(peer, explain(error))
                return
            self._answer_all(sock, keys)
        except (PeerError, OSError) as error:
            log.debug("tensor connection to %s ended: %s", peer, error)
        finally:
            with self._lock:
                if (handle := self._strangers.pop(accepted, None)) is not None:
                    handle.close()
                self._open.discard(sock)
            sock.close()
            accepted.close()

    def _is_taken(self, accepted: socket.socket, sock: socket.socket) -> bool:
        """Makes a stranger that has proved the secret a consumer, where it has its place still."""
        with self._lock:
            handle = self._strangers.pop(accepted, None)
            if handle is None or len(self._open) >= MAX_CONNECTIONS or self._is_closed:
                if handle is not None:
                    handle.close()
                return False
            handle.close()
            self._open.add(sock)
            return True

    def _answer_all(self, sock: socket.socket, keys: Keys) -> None:
        """Serves a consumer for as long as the secret that it has shown is accepted."""
        while True:
            try:
                request = receive(sock, REQUEST.size)
            except TimeoutError:
                request = b""  # nothing is wanted at present
            if keys not in self._link.keys:
                raise PeerError(f"the secret {keys.fingerprint} is not accepted any more")
            if not request:
                continue
            slot, offset, nbytes = REQUEST.unpack(request)
            try:
                window = self._ring.window(slot, offset, nbytes)
            except RingError as error:
                reason = str(error).encode()[:MAX_REASON_BYTES]
                sock.sendall(REPLY.pack(REFUSED, len(reason)) + reason)
                continue
            head = REPLY.pack(OK, nbytes)
            if nbytes <= CORK_BYTES:
                sock.sendall(head + window)
                continue
            # Not `sendfile`: over loopback the copy it saves costs less than its page by page sending.
            sock.sendall(head, 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_MORE)
            sock.sendall(window)

    def _refuse(self, peer: str, why: str) -> None:
        with self._lock:
            self.refused += 1
            now_s = time.monotonic()
            is_told = now_s - self._told_s >= LOG_EVERY_S
            if is_told:
                self._told_s = now_s
        if is_told:
            log.warning(
                "refused a tensor connection from %s: %s (%d refused so far)", peer, why, self.refused
            )


def _handle_of(sock: socket.socket) -> socket.socket:
    """Another descriptor of a connection; the connection is closed where there is none left."""
    try:
        return sock.dup()
    except OSError:
        sock.close()
        raise


def _cut(sock: socket.socket) -> None:
    """Ends a connection under the thread that serves it."""
    with contextlib.suppress(OSError):
        # Not `SSLSocket.shutdown`: it would let its thread go on without TLS.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
