"""Who may send to a tcp inbox: a thread that answers ZeroMQ's authentication and counts who is refused.

CURVE proves that the inbox's owner knows the inbox key. That is half of it: without an answer to ZAP
(ZeroMQ RFC 27) libzmq lets any client key in, so whoever learned the inbox's *public* key could send.
Two ways to close that were weighed. To keep the public key secret would do with today's handshake (it
does not travel in clear), but rests on a property that a public key need not have. So every sender of a
deployment shares one key pair, derived from the secret, and the gate compares the key that the client has
proved to hold with it. One key per process would add nothing: all are derived from the same secret.

A peer with another secret fails in the handshake already (it cannot encrypt to the inbox) and never
reaches ZAP; the socket's monitor tells of it. Both are dropped by libzmq, counted and named in the log here.

The thread sleeps in poll, holds no lock, and ends when the inbox is closed.
"""

from __future__ import annotations

import logging
import threading
import time

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
    """Guards one inbox. To be made before the inbox is bound to tcp.

    Args:
        context: the inbox's context; it can have one gate.
        inbox: the socket to be guarded.
        sender: CURVE public key (Z85) that senders must hold.
        name: address for the log.

    Attributes:
        refused: peers refused so far.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], inbox: zmq.Socket[bytes], sender: bytes, name: str
    ) -> None:
        self.refused = 0
        self._sender = z85.decode(sender)
        self._name = name
        self._told_s = -LOG_EVERY_S
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP)
        self._monitor = inbox.get_monitor_socket(int(_FAILED) | int(zmq.Event.MONITOR_STOPPED))
        self._monitor.linger = 0
        self._thread = threading.Thread(target=self._run, name="wire-gate", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for the thread after the inbox was closed."""
        self._thread.join(5.0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        is_open = True
        while is_open:
            ready = dict(poller.poll())
            if self._zap in ready:
                self._answer()
            if self._monitor in ready:
                is_open = self._observe()
        self._zap.close(0)
        self._monitor.close(0)

    def _answer(self) -> None:
        """One request: version, id, domain, address, identity, mechanism, credentials."""
        version, request, _, peer, _, mechanism, *credentials = self._zap.recv_multipart()
        is_known = mechanism == b"CURVE" and credentials == [self._sender]
        if not is_known:
            self._refuse(f"a peer at {peer.decode(errors='replace')} holds a key of its own")
        status, text = (b"200", b"") if is_known else (b"400", b"not a sender of this deployment")
        self._zap.send_multipart([version, request, status, text, b"keystage" if is_known else b"", b""])

    def _observe(self) -> bool:
        """One event of the monitor; False when the inbox is closed."""
        event = recv_monitor_message(self._monitor)
        if event["event"] == zmq.Event.MONITOR_STOPPED:
            return False
        if event["event"] != zmq.Event.HANDSHAKE_FAILED_AUTH:  # that one was counted by `_answer`
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
