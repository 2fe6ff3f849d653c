"""`keystage bench wire`: what an activation costs on its way to a worker of another node.

Two processes over loopback, in the same rounds: the ring (a neighbour), a CURVE frame (the tensor in the
message itself), the tensor connection plain and under TLS 1.3, and beside them the same bytes over a raw
TCP socket into a preallocated buffer. All add up the 64-bit words; times are from send to
acknowledgement, the sender checks the sum. Loopback has no wire: the figures are the cost of the programs.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from keystage.bench.frame import BenchResult, Figure
from keystage.wire import api
from keystage.wire.config import WireConfig
from keystage.wire.opening import WorkerWire, open_worker
from keystage.wire.secret import create_secret
from keystage.worker.executor import Activation
from keystage.worker.outbox import TensorOutbox

SIZES = {"1mib": 1024 * 1024, "16kib": 16 * 1024}
ROUNDS = 15
HOPS = 40
RING_BYTES = 64 * 1024 * 1024
LIMIT_S = 10.0
RAW = "tcp socket"
WAYS = {"ring": "ring", "curve": "CURVE frame", "plain": "tensor connection", "tls": "tensor connection, TLS"}
"""Ways by the name of the figure; a receiver of its own listens for each, on a node as the way needs it."""
_ROWS = api.StepRows([1], [1], [0], [1], [True], [1], [0.0], [1.0], [0])


class WireBenchError(Exception):
    """A hand-off delivered other bytes than were sent, or none in time."""


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    """A sender's end of one way."""

    wire: WorkerWire
    outbox: TensorOutbox
    receiver: str


def run(*, quick: bool = False) -> BenchResult:
    """Measures every way for both sizes, round by round.

    Args:
        quick: a fifth of the rounds.

    Raises:
        WireBenchError: a checksum differs, or nothing comes.
    """
    rounds = ROUNDS // 5 if quick else ROUNDS
    folder = Path(tempfile.mkdtemp(prefix="keystage-wire-"))
    create_secret(folder / "key")
    context = multiprocessing.get_context("spawn")
    children = []
    times: dict[tuple[str, str], list[list[float]]] = {}
    try:
        hands: dict[str, Callable[[np.ndarray], None]] = {}
        for way in (*WAYS, RAW):
            here, there = context.Pipe()
            child = context.Process(target=_receive, args=(folder, way, there), daemon=True)
            child.start()
            children.append(child)
            address = _take(here)
            if way == RAW:
                sock = socket.create_connection(("127.0.0.1", address))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hands[way] = partial(_raw, sock, here)
            else:
                wire = open_worker(f"ipc://{folder}/{way}.s", RING_BYTES, _config(folder, way, "sender"))
                hands[way] = partial(
                    _ours, way, _End(wire, TensorOutbox(wire.mailbox, wire.ring), address), here
                )
        for number in range(rounds + 1):
            for size, nbytes in SIZES.items():
                payload = np.random.default_rng(number).integers(0, 2**62, nbytes // 8, dtype=np.int64)
                for way, hand in hands.items():
                    found = [_timed(hand, payload) for _ in range(HOPS)]
                    if number:  # the first round connects, and warms pages and code
                        times.setdefault((size, way), []).append(found)
        return _result(times)
    finally:
        for child in children:
            child.terminate()
            child.join(5)
        shutil.rmtree(folder, ignore_errors=True)


def _config(folder: Path, way: str, end: str) -> WireConfig:
    return WireConfig(
        node="one" if way == "ring" else end,
        wire_host="127.0.0.1",
        wire_bind="",
        wire_key_file=folder / "key",
        wire_plain=way == "plain",
    )


def _timed(hand: Callable[[np.ndarray], None], payload: np.ndarray) -> float:
    started_s = time.perf_counter()
    hand(payload)
    return time.perf_counter() - started_s


def _ours(way: str, end: _End, sums: Connection, payload: np.ndarray) -> None:
    mailbox = end.wire.mailbox
    data = payload.view(np.uint8).data
    build = partial(_step, mailbox.address)
    if way in (
        "plain",
        "tls",
    ):  # as the outbox does with large ones: it lets small ones come with the message
        ref = end.outbox.park(Activation("int64", payload.shape, data))
        assert ref is not None
        mailbox.send(end.receiver, build(ref))
    elif way == "curve":
        inline = api.TensorRef("int64", payload.shape, 0, 0, 0, data.nbytes, 0)
        mailbox.send(end.receiver, build(inline), data)
    else:
        end.outbox.push(end.receiver, Activation("int64", payload.shape, data), build)
    if not mailbox.wait(LIMIT_S):
        raise WireBenchError(f"{WAYS[way]}: no acknowledgement within {LIMIT_S:g} s")
    for _, body, _ in mailbox.drain():
        message = api.decode_to_worker(body)
        assert isinstance(message, api.Ack)
        end.outbox.acknowledge(message.slots)
    _check(payload, sums)


def _step(sender: str, ref: api.TensorRef) -> api.Step:
    return api.Step(1, 1, 1, "", ["a", "b"], ["", ""], sender, _ROWS, [], ref)


def _raw(sock: socket.socket, sums: Connection, payload: np.ndarray) -> None:
    sock.sendall(payload.nbytes.to_bytes(8, "little"), socket.MSG_MORE)
    sock.sendall(payload.data.cast("B"))
    if sock.recv(1) != b"k":
        raise WireBenchError("the raw receiver went away")
    _check(payload, sums)


def _check(payload: np.ndarray, sums: Connection) -> None:
    expected, actual = int(payload.sum()), _take(sums)
    if actual != expected:
        raise WireBenchError(f"checksum is {actual}, expected {expected}")


def _take(pipe: Connection) -> Any:
    if not pipe.poll(60.0):
        raise WireBenchError("a receiver said nothing within 60 s")
    return pipe.recv()


def _receive(folder: Path, way: str, sums: Connection) -> None:
    if way == RAW:
        _receive_raw(sums)
        return
    wire = open_worker(f"ipc://{folder}/{way}.r", RING_BYTES, _config(folder, way, "receiver"))
    assert wire.sources.fd is not None
    wire.mailbox.watch(wire.sources.fd)
    sums.send(wire.mailbox.address)
    while True:
        wire.mailbox.wait(3600.0)
        for _, body, payload in wire.mailbox.drain():
            step = api.decode_to_worker(body)
            assert isinstance(step, api.Step)
            assert step.ref is not None
            done = partial(_sum, wire, step, payload, sums)
            if payload is not None or not wire.sources.begin([step.ref], [step.sender], done):
                done()
        wire.sources.poll()


def _sum(wire: WorkerWire, step: api.Step, payload: bytes | None, sums: Connection) -> None:
    assert step.ref is not None
    data = memoryview(payload) if payload is not None else wire.sources.view(step.ref, step.sender)
    total = int(np.frombuffer(data, np.int64).sum())
    wire.sources.release(step.ref, step.sender)
    wire.mailbox.send(step.sender, api.Ack([step.ref.slot]))
    sums.send(total)


def _receive_raw(sums: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sums.send(listening.getsockname()[1])
        sock, _ = listening.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = np.empty(max(SIZES.values()) // 8, np.int64)
    view = buffer.data.cast("B")
    while header := sock.recv(8, socket.MSG_WAITALL):
        nbytes = int.from_bytes(header, "little")
        sock.recv_into(view, nbytes, socket.MSG_WAITALL)
        total = int(buffer[: nbytes // 8].sum())
        sock.sendall(b"k")
        sums.send(total)


def _result(times: dict[tuple[str, str], list[list[float]]]) -> BenchResult:
    rows = []
    for (size, way), rounds in times.items():
        everything = np.concatenate(rounds)
        p50_s = float(np.percentile(everything, 50))
        rows.append(
            {
                "activation": size,
                "way": WAYS.get(way, way),
                "p50_us": p50_s * 1e6,
                "p99_us": float(np.percentile(everything, 99)) * 1e6,
                "gb_per_s": SIZES[size] / p50_s / 1e9,
                "hops": len(everything),
            }
        )
    figures = {}
    for size in SIZES:
        for way, name in WAYS.items():
            ratios = [
                float(np.median(ours) / np.median(raw))
                for ours, raw in zip(times[size, way], times[size, RAW], strict=True)
            ]
            figures[f"{way}_ratio_{size}"] = Figure(ratios, f"p50 of {name} / p50 of a raw TCP socket")
    notes = [
        f"{HOPS} hand-offs per way and round over loopback, send to acknowledgement and checked sum",
        "CURVE: the tensor is the second frame of its message; raw TCP: pushed into a preallocated buffer",
        "tensor connection: the message comes first, the consumer fetches (one round trip more)",
    ]
    return BenchResult(rows, figures, notes)
