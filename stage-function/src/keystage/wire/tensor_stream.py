"""The protocol of a tensor connection: who the other end is, what is asked, what comes back.

One TCP connection per (producer, consumer), made by the consumer; TLS 1.3 unless the deployment says
that its network encrypts. Both ends, as bytes on the stream:

1. consumer: magic, version, nonce. producer: magic, version, nonce, MAC over both nonces.
   consumer: MAC over both nonces. The MACs (HMAC-SHA256 under a key of the deployment's secret, one label
   per role) prove each to the other also where there is no TLS. The consumer's nonce begins with the
   fingerprint of its secret (4 bytes): a producer that accepts two answers with that one.
2. consumer, any number of times: slot, offset, length. producer, in the same order: status, length, and so
   many bytes: the tensor, or the reason why there is none.

`tensor_server` and `tensor_fetch` are the two ends. This module knows sockets, not rings nor threads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keystage.wire.errors import PeerError
from keystage.wire.link import Keys, Link

if TYPE_CHECKING:
    from keystage.wire.certificate import Tls

MAGIC = b"KSTN"
VERSION = 1
SILENCE_S = 5.0
"""A peer that moves no byte for this long is dead, as one without heartbeats is."""
MAX_TENSOR_BYTES = 1 << 30
"""Above any activation; a length beyond it is refused before memory is taken for it."""
MAX_REASON_BYTES = 1024

OPENING = struct.Struct("<4sH32s")
PROOF_BYTES = 32
REQUEST = struct.Struct("<QQQ")
REPLY = struct.Struct("<QQ")
OK, REFUSED = 0, 1

_TLS_HANDSHAKE = 0x16
_DIFFERS = "KEYSTAGE_WIRE_PLAIN differs from ours"


def prepare(sock: socket.socket, *, is_tls: bool) -> None:
    """Time-outs and options of a connected socket.

    Plain sockets block in the kernel, with its time-outs: so a tensor is one system call, during which
    no other Python thread is asked for the interpreter.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A consumer whose host vanished asks for nothing more: only the kernel's probes notice it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if is_tls:
        sock.settimeout(SILENCE_S)
        return
    sock.settimeout(None)
    limit = struct.pack("ll", int(SILENCE_S), 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def greet(sock: socket.socket, link: Link, peer: str, keys: Keys | None = None) -> socket.socket:
    """The consumer's end of the handshake; returns the socket to use from now on.

    Args:
        sock: connected.
        link: own node and keys.
        peer: the producer, for messages.
        keys: those to be shown; None: those that are used now.

    Raises:
        PeerError: the peer does not hold the secret, or speaks something else.
        OSError: the connection broke.
    """
    keys = keys or link.keys[0]
    mine = bytes.fromhex(keys.fingerprint) + secrets.token_bytes(28)
    try:
        if keys.tls is not None:
            sock.settimeout(SILENCE_S)
            wrapped = keys.tls.client.wrap_socket(sock, server_hostname=keys.tls.client_hostname)
            keys.tls.check_peer(wrapped)
            sock = wrapped
        prepare(sock, is_tls=keys.tls is not None)
        sock.sendall(OPENING.pack(MAGIC, VERSION, mine))
        head = receive(sock, OPENING.size)
    except (PeerError, ConnectionError) as error:
        raise PeerError(f"no greeting ({error}); it died, or {_DIFFERS}") from error
    theirs = _opening(head, peer)
    if _shown(link, b"producer", mine, theirs, receive(sock, PROOF_BYTES)) is None:
        raise PeerError(f"{peer} does not hold this deployment's secret (KEYSTAGE_WIRE_KEY_FILE)")
    sock.sendall(_proof(keys, b"consumer", mine, theirs))
    return sock


def welcome(sock: socket.socket, link: Link, peer: str) -> tuple[socket.socket, Keys]:
    """The producer's end of the handshake; as `greet`, and the keys that the consumer has shown."""
    keys = link.keys[0]
    if keys.tls is not None:
        sock.settimeout(SILENCE_S)
        accepted = [other.tls for other in link.keys if other.tls is not None]
        wrapped = keys.tls.server_choosing(accepted).wrap_socket(sock, server_side=True)
        _check_any(wrapped, accepted)
        sock = wrapped
    prepare(sock, is_tls=keys.tls is not None)
    theirs = _opening(receive(sock, OPENING.size), peer)
    keys = next((meant for meant in link.keys if theirs.startswith(bytes.fromhex(meant.fingerprint))), keys)
    mine = secrets.token_bytes(32)
    sock.sendall(OPENING.pack(MAGIC, VERSION, mine) + _proof(keys, b"producer", theirs, mine))
    shown = _shown(link, b"consumer", theirs, mine, receive(sock, PROOF_BYTES))
    if shown is None:
        raise PeerError(f"{peer} does not hold this deployment's secret (KEYSTAGE_WIRE_KEY_FILE)")
    return sock, shown


def _check_any(sock: ssl.SSLSocket, accepted: Sequence[Tls]) -> None:
    """Makes sure that a peer has shown the certificate of one of the secrets; raises as `Tls.check_peer`."""
    for tls in accepted[1:]:
        with contextlib.suppress(PeerError):
            tls.check_peer(sock)
            return
    accepted[0].check_peer(sock)


def receive(sock: socket.socket, nbytes: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        PeerError: the stream ended, or was silent for too long, in the midst of them.
        TimeoutError: nothing came for `SILENCE_S`.
        OSError: it broke.
    """
    buffer = bytearray(nbytes)
    receive_into(sock, memoryview(buffer))
    return bytes(buffer)


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fills a buffer; raises as `receive`."""
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    got = 0
    while got < view.nbytes:
        try:
            count = sock.recv_into(view[got:], view.nbytes - got, flags)
        except (BlockingIOError, TimeoutError) as error:  # the former: the kernel's time-out
            if got:
                raise PeerError(f"silent for {SILENCE_S:g} s after {got} of {view.nbytes} bytes") from error
            raise TimeoutError(errno.ETIMEDOUT, f"silent for {SILENCE_S:g} s") from error
        if not count:
            raise PeerError(f"the stream ended after {got} of {view.nbytes} bytes")
        got += count


def explain(error: Exception) -> str:
    """An error of a connection in words, with what to do where it is known."""
    if isinstance(error, ssl.SSLCertVerificationError) or "UNKNOWN_CA" in str(error):
        return "its certificate is not that of this deployment's secret (KEYSTAGE_WIRE_KEY_FILE)"
    if isinstance(error, ssl.SSLError):
        return f"no TLS 1.3 with it ({error.reason}); it died, or {_DIFFERS}"
    return str(error) or type(error).__name__


def _opening(head: bytes, peer: str) -> bytes:
    magic, version, nonce = OPENING.unpack(head)
    if magic != MAGIC:
        hint = f"; it speaks TLS: {_DIFFERS}" if head[0] == _TLS_HANDSHAKE else ""
        raise PeerError(f"{peer} speaks no tensor protocol (began with {magic!r}{hint})")
    if version != VERSION:
        raise PeerError(f"{peer} speaks version {version} of the tensor protocol, this process {VERSION}")
    assert isinstance(nonce, bytes)
    return nonce


def _proof(keys: Keys, role: bytes, consumer: bytes, producer: bytes) -> bytes:
    return hmac.digest(keys.handshake_key, role + b"\0" + consumer + producer, hashlib.sha256)


def _shown(link: Link, role: bytes, consumer: bytes, producer: bytes, proof: bytes) -> Keys | None:
    """Which of the accepted keys a proof is made with, None: no one's."""
    for keys in link.keys:
        if hmac.compare_digest(proof, _proof(keys, role, consumer, producer)):
            return keys
    return None
