"""The consumer's end of tensor connections: one connection and one thread per producer of another node.

`sources` orders tensors here as soon as their message arrives; they come in the order in which they
were asked for, while the engine computes. A broken connection fails what was ordered over it, by name, and
the next order makes a new one. The thread never touches messages, slots or sessions.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
from collections.abc import Callable

from keystage.wire.address import split_host
from keystage.wire.api import TensorRef
from keystage.wire.errors import PeerError
from keystage.wire.link import Keys, Link
from keystage.wire.tensor_stream import (
    MAX_REASON_BYTES,
    MAX_TENSOR_BYTES,
    OK,
    REPLY,
    REQUEST,
    SILENCE_S,
    explain,
    greet,
    receive,
    receive_into,
)

MAX_ORDERS = 64
"""Orders sent before the first is answered: more would only wait in the producer's socket."""
SPARE_BUFFERS = 8
"""Buffers kept for the next tensors: fresh memory costs a page fault per 4 KiB."""

_ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip


class Arrival:
    """One tensor on its way. Written by the fetching thread, `is_done` last.

    Attributes:
        ref: what was asked for.
        data: its bytes once it is done, None if it failed.
        reason: why it failed.
        is_done: whether it is here or has failed.
    """

    __slots__ = ("buffer", "data", "is_done", "reason", "ref")

    def __init__(self, ref: TensorRef) -> None:
        self.ref = ref
        self.buffer: bytearray | None = None
        self.data: memoryview | None = None
        self.reason = ""
        self.is_done = False


def check_size(ref: TensorRef) -> str | None:
    """Why a reference's size cannot be true, None when it can: asked before memory is taken for it."""
    if not 0 <= ref.nbytes <= MAX_TENSOR_BYTES:
        return f"a tensor of {ref.nbytes} bytes; the bound is {MAX_TENSOR_BYTES}"
    item = _ITEM_BYTES.get(ref.dtype)
    if item is None:
        return f"a tensor of unknown element type {ref.dtype!r}"
    if min(ref.shape, default=0) < 0 or math.prod(ref.shape) * item != ref.nbytes:
        return f"a tensor of {ref.nbytes} bytes with shape {list(ref.shape)} of {ref.dtype}"
    return None


class Fetcher:
    """Fetches from one producer.

    Args:
        address: `host:port` of the producer's tensor server.
        link: keys.
        arrived: called from the thread after each arrival, done or failed.
    """

    def __init__(self, address: str, link: Link, arrived: Callable[[Arrival], None]) -> None:
        self._address = address
        self._link = link
        self._arrived = arrived
        self._orders: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._spare: list[bytearray] = []
        self._sock: socket.socket | None = None
        self._keys: Keys | None = None
        self._is_closed = False
        threading.Thread(target=self._run, name="tensors-from", daemon=True).start()

    def order(self, arrival: Arrival) -> None:
        """Asks for a tensor."""
        self._orders.put(arrival)

    def recycle(self, arrival: Arrival) -> None:
        """The engine has used a tensor up: its buffer may hold another one."""
        buffer, arrival.buffer, arrival.data = arrival.buffer, None, None
        if buffer is not None and len(self._spare) < SPARE_BUFFERS:
            self._spare.append(buffer)

    def close(self) -> None:
        """Ends the connection and the thread; what was ordered fails."""
        self._is_closed = True
        self._orders.put(None)
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                # Not `SSLSocket.shutdown`: it would let the thread go on without TLS.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _run(self) -> None:
        is_open = True
        while is_open:
            orders, is_open = self._take()
            left = list(orders)
            try:
                if self._is_closed:
                    raise PeerError("the producer was given up")
                sock = self._connected()
                sock.sendall(b"".join(REQUEST.pack(a.ref.slot, a.ref.offset, a.ref.nbytes) for a in orders))
                while left:
                    self._receive(sock, left[0])
                    self._done(left.pop(0), "")
            except Exception as error:  # noqa: BLE001  # whatever it is: arrivals are told, and the thread lives on
                self._disconnect()
                for arrival in left:
                    self._done(arrival, explain(error))
        self._disconnect()

    def _take(self) -> tuple[list[Arrival], bool]:
        """Waits for orders; what is there at once, at most `MAX_ORDERS`, and whether more may follow."""
        orders: list[Arrival] = []
        order = self._orders.get()
        while order is not None:
            orders.append(order)
            if len(orders) == MAX_ORDERS:
                return orders, True
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return orders, True
        return orders, False

    def _connected(self) -> socket.socket:
        keys = self._link.keys[0]
        if self._keys != keys:  # nothing is on its way now: the secret was replaced, and the old one ends
            self._disconnect()
        if self._sock is None:
            self._keys = keys
            sock = socket.create_connection(split_host(self._address), SILENCE_S)
            try:
                self._sock = greet(sock, self._link, self._address, keys)
            except (PeerError, OSError):
                sock.close()
                raise
        return self._sock

    def _disconnect(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _receive(self, sock: socket.socket, arrival: Arrival) -> None:
        ref = arrival.ref
        status, nbytes = REPLY.unpack(receive(sock, REPLY.size))
        if status != OK:
            if nbytes > MAX_REASON_BYTES:
                raise PeerError(f"a refusal of {nbytes} bytes; the bound is {MAX_REASON_BYTES}")
            arrival.reason = receive(sock, nbytes).decode(errors="replace")
            return
        if nbytes != ref.nbytes:
            raise PeerError(f"announces {nbytes} bytes for a tensor of {ref.nbytes}")
        arrival.buffer = self._buffer(nbytes)
        view = memoryview(arrival.buffer)[:nbytes]
        receive_into(sock, view)
        arrival.data = view

    def _buffer(self, nbytes: int) -> bytearray:
        for i, spare in enumerate(self._spare):
            if nbytes <= len(spare) <= max(4 * nbytes, 1 << 16):
                return self._spare.pop(i)
        return bytearray(max(nbytes, 1))

    def _done(self, arrival: Arrival, reason: str) -> None:
        if reason:
            arrival.data, arrival.reason = None, reason
        arrival.is_done = True
        self._arrived(arrival)
