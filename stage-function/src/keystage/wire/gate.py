"""Who may send to a tcp inbox: a thread that answers ZeroMQ's authentication and counts who is refused.

CURVE proves that the inbox's owner knows the inbox key. That is half of it: without an answer to ZAP
(ZeroMQ RFC 27) libzmq lets any client key in, so whoever learned the inbox's *public* key could send.
Two ways to close that were weighed. To keep the public key secret would do with today's handshake (it
does not travel in clear), but rests on a property that a public key need not have. So every sender of a
deployment shares one key pair, derived from the secret, and the gate compares the key that the client has
proved to hold with it. One key per process would add nothing: all are derived from the same secret.

A peer with another secret fails in the handshake already (it cannot encrypt to the inbox) and never
reaches ZAP; the socket's monitor tells of it. Both are dropped by libzmq, counted and named in the log here.
While two secrets are accepted each has a socket at the same port (`tcp_inbox`), and who comes to the other
one's fails there, and tries again: what monitors tell is not counted then.

The thread sleeps in poll, holds no lock, and ends with `close`.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

ZAP = "inproc://zeromq.zap.01"
LOG_EVERY_S = 10.0
"""A peer with the wrong secret tries again several times a second; one line in a while is enough."""

_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class Gate:
    """Guards the tcp sockets of one inbox.

    Args:
        context: the sockets' context; it can have one gate.
        name: address for the log.

    Attributes:
        refused: peers refused so far.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name: str) -> None:
        self.refused = 0
        self._senders: tuple[bytes, ...] = ()
        self._name = name
        self._told_s = -LOG_EVERY_S
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP)
        self._new: deque[zmq.Socket[bytes]] = deque()
        self._is_closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="wire-gate", daemon=True)
        self._thread.start()

    def accept(self, senders: Iterable[bytes]) -> None:
        """From now on senders must hold one of these CURVE public keys (Z85)."""
        self._senders = tuple(z85.decode(sender) for sender in senders)

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Counts failed handshakes of a socket; to be called before it is bound."""
        monitor = socket.get_monitor_socket(int(_FAILED) | int(zmq.Event.MONITOR_STOPPED))
        monitor.linger = 0
        self._new.append(monitor)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Ends the thread; to be called after the sockets were closed."""
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(5.0)
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        monitors: list[zmq.Socket[bytes]] = []
        while not self._is_closed:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while self._new:
                    monitors.append(self._new.popleft())
                    poller.register(monitors[-1], zmq.POLLIN)
            if self._zap in ready:
                self._answer()
            for monitor in [found for found in monitors if found in ready]:
                if not self._observe(monitor, is_only=len(monitors) == 1):
                    poller.unregister(monitor)
                    monitors.remove(monitor)
                    monitor.close(0)
        for socket in (self._zap, *monitors, *self._new):
            socket.close(0)

    def _answer(self) -> None:
        """One request: version, id, domain, address, identity, mechanism, credentials."""
        version, request, _, peer, _, mechanism, *credentials = self._zap.recv_multipart()
        given = credentials[0] if mechanism == b"CURVE" and len(credentials) == 1 else b""
        is_known = any([hmac.compare_digest(given, sender) for sender in self._senders])  # noqa: C419  # all of them
        if not is_known:
            self._refuse(f"a peer at {peer.decode(errors='replace')} holds a key of its own")
        status, text = (b"200", b"") if is_known else (b"400", b"not a sender of this deployment")
        self._zap.send_multipart([version, request, status, text, b"keystage" if is_known else b"", b""])

    def _observe(self, monitor: zmq.Socket[bytes], *, is_only: bool) -> bool:
        """One event of a monitor; False when its socket is closed."""
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.Event.MONITOR_STOPPED:
            return False
        # The other one was counted by `_answer`.
        if is_only and event["event"] != zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._refuse("a peer did not finish the CURVE handshake")
        return True

    def _refuse(self, what: str) -> None:
        self.refused += 1
        now_s = time.monotonic()
        if now_s - self._told_s >= LOG_EVERY_S:
            self._told_s = now_s
            log.warning(
                "refused at %s: %s; its KEYSTAGE_WIRE_KEY_FILE is not ours, or it is no worker or router "
                "(%d refused so far)",
                self._name, what, self.refused,
            )  # fmt: skip
