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
from keystage.wire.link import Link
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
"""Consumers of one producer; what connects beyond them is closed at once, so strangers cost little."""
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
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="tensors", daemon=True).start()

    def close(self) -> None:
        """Stops listening and cuts every connection."""
        with self._lock:
            self._is_closed = True
            for sock in self._open:
                with contextlib.suppress(OSError):
                    # Not `SSLSocket.shutdown`: it would let its thread go on without TLS.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
        # A blocked accept does not notice a close, but does notice this.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, (host, port, *_) = self._listening.accept()
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
                    self._open.add(sock)
            if not is_welcome:
                self._refuse(peer, f"there are {MAX_CONNECTIONS} tensor connections already")
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock, peer), name="tensors-to", daemon=True).start()

    def _serve(self, accepted: socket.socket, peer: str) -> None:
        sock = accepted
        try:
            try:
                sock = welcome(accepted, self._link, peer)
                with self._lock:
                    self._open.discard(accepted)  # TLS has taken its descriptor over
                    self._open.add(sock)
            except (PeerError, OSError) as error:
                self._refuse(peer, explain(error))
                return
            self._answer_all(sock)
        except (PeerError, OSError) as error:
            log.debug("tensor connection to %s ended: %s", peer, error)
        finally:
            with self._lock:
                self._open -= {accepted, sock}
            sock.close()
            accepted.close()

    def _answer_all(self, sock: socket.socket) -> None:
        while True:
            try:
                request = receive(sock, REQUEST.size)
            except TimeoutError:
                continue  # nothing is wanted at present
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
        self.refused += 1
        log.warning("refused a tensor connection from %s: %s", peer, why)
