"""`keystage bench hop`: what handing an activation to the next worker costs.

Two processes. Ours: the workers' own hand-off (tensor outbox, shared-memory ring, ZeroMQ message,
`torch.frombuffer` on the receiver, `Ack`). Beside it, in the same rounds: the same bytes over a raw
UNIX socket into a preallocated buffer, with a one-byte acknowledgement. Both receivers make a tensor
and add up its 64-bit words; the sender checks the sum. Times are from send to acknowledgement.
"""

from __future__ import annotations

import multiprocessing
import shutil
import socket
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from keystage.bench.frame import BenchResult, Figure
from keystage.wire import api
from keystage.wire.mailbox import Mailbox
from keystage.wire.ring import PeerRings, Ring
from keystage.worker.executor import Activation
from keystage.worker.outbox import TensorOutbox

SIZES = {"1mib": 1024 * 1024, "16kib": 16 * 1024}
ROUNDS = 15
HOPS = 100
RING_BYTES = 64 * 1024 * 1024
_ROWS = api.StepRows([1], [1], [0], [1], [True], [1], [0.0], [1.0], [0])


class HopError(Exception):
    """A hand-off delivered other bytes than were sent, or none in time."""


def run(*, quick: bool = False) -> BenchResult:
    """Measures both ways for both sizes, round by round.

    Args:
        quick: a fifth of the rounds.

    Raises:
        HopError: a checksum differs.
    """
    rounds, hops = (ROUNDS // 5 if quick else ROUNDS), HOPS
    folder = Path(tempfile.mkdtemp(prefix="keystage-hop-"))
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    sums, child_sums = context.Pipe()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "raw"))
    listening.listen(1)
    child = context.Process(target=_receive, args=(folder, child_sums), daemon=True)
    child.start()
    mailbox = Mailbox(f"ipc://{folder}/sender")
    try:
        raw, _ = listening.accept()
        outbox = TensorOutbox(mailbox, Ring(RING_BYTES))
        receiver = f"ipc://{folder}/receiver"
        times: dict[tuple[str, str], list[list[float]]] = {}
        for number in range(rounds + 1):
            for size, nbytes in SIZES.items():
                payload = np.random.default_rng(number).integers(0, 2**62, nbytes // 8, dtype=np.int64)
                ours = [_ours(mailbox, outbox, receiver, payload, sums) for _ in range(hops)]
                theirs = [_raw(raw, payload, sums) for _ in range(hops)]
                if number:  # the first round warms pages, sockets and code
                    times.setdefault((size, "keystage"), []).append(ours)
                    times.setdefault((size, "unix socket"), []).append(theirs)
        return _result(times, hops)
    finally:
        child.terminate()
        child.join(5)
        mailbox.close()
        listening.close()
        shutil.rmtree(folder, ignore_errors=True)


def _result(times: dict[tuple[str, str], list[list[float]]], hops: int) -> BenchResult:
    rows = []
    for (size, way), rounds in times.items():
        everything = np.concatenate(rounds) * 1e6
        rows.append(
            {
                "activation": size,
                "way": way,
                "p50_us": float(np.percentile(everything, 50)),
                "p99_us": float(np.percentile(everything, 99)),
                "hops": len(everything),
            }
        )
    figures = {}
    for size in SIZES:
        ratios = [
            float(np.median(ours) / np.median(raw))
            for ours, raw in zip(times[size, "keystage"], times[size, "unix socket"], strict=True)
        ]
        figures[f"ratio_{size}"] = Figure(
            ratios, "p50 of our hand-off / p50 of a raw UNIX socket", "at most 2" if size == "1mib" else ""
        )
    notes = [
        f"{hops} hand-offs per way and round, send to acknowledgement, tensor made and summed in both",
        "ours: one copy into shared memory, two ZeroMQ messages; raw: two copies through the kernel",
    ]
    return BenchResult(rows, figures, notes)


def _ours(mailbox: Mailbox, outbox: TensorOutbox, to: str, payload: np.ndarray, sums: Connection) -> float:
    data = payload.view(np.uint8).data
    activation = Activation("int64", payload.shape, data)
    started_s = time.perf_counter()
    outbox.push(to, activation, partial(_step, mailbox.address))
    while True:
        if not mailbox.wait(5.0):
            raise HopError("no acknowledgement within 5 s")
        slots = [
            slot
            for _, body, _ in mailbox.drain()
            if isinstance(message := api.decode_to_worker(body), api.Ack)
            for slot in message.slots
        ]
        if slots:
            break
    elapsed_s = time.perf_counter() - started_s
    outbox.acknowledge(slots)
    _check(payload, sums)
    return elapsed_s


def _step(sender: str, ref: api.TensorRef) -> api.Step:
    return api.Step(1, 1, 1, "", ["a", "b"], ["", ""], sender, _ROWS, [], ref)


def _raw(raw: socket.socket, payload: np.ndarray, sums: Connection) -> float:
    started_s = time.perf_counter()
    raw.sendall(payload.nbytes.to_bytes(8, "little"))
    raw.sendall(payload.data.cast("B"))
    if raw.recv(1) != b"k":
        raise HopError("the raw receiver went away")
    elapsed_s = time.perf_counter() - started_s
    _check(payload, sums)
    return elapsed_s


def _check(payload: np.ndarray, sums: Connection) -> None:
    if not sums.poll(5.0):
        raise HopError("the receiver gave no checksum within 5 s")
    expected, actual = int(payload.sum()), sums.recv()
    if actual != expected:
        raise HopError(f"checksum is {actual}, expected {expected}")


def _receive(folder: Path, sums: Connection) -> None:
    torch.set_num_threads(1)
    mailbox = Mailbox(f"ipc://{folder}/receiver")
    rings = PeerRings()
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(str(folder / "raw"))
    raw.setblocking(False)
    buffer = torch.empty(max(SIZES.values()) // 8, dtype=torch.int64)
    view = buffer.numpy().data.cast("B")
    while True:
        # Whoever comes first is served; the other side is quiet meanwhile, as the sender takes turns.
        if mailbox.wait(0.0005):
            _take_ours(mailbox, rings, sums)
            while mailbox.wait(0.02):
                _take_ours(mailbox, rings, sums)
        try:
            header = raw.recv(8)
        except BlockingIOError:
            continue
        raw.setblocking(True)
        raw.settimeout(0.02)
        while header:
            _take_raw(raw, int.from_bytes(header, "little"), buffer, view, sums)
            try:
                header = raw.recv(8)
            except TimeoutError:
                break
        raw.setblocking(False)


def _take_ours(mailbox: Mailbox, rings: PeerRings, sums: Connection) -> None:
    for _, body, _ in mailbox.drain():
        message = api.decode_to_worker(body)
        assert isinstance(message, api.Step)
        assert message.ref is not None
        tensor = torch.frombuffer(rings.view(message.ref), dtype=torch.int64)
        total = int(tensor.sum())
        mailbox.send(message.sender, api.Ack([message.ref.slot]))
        sums.send(total)


def _take_raw(
    raw: socket.socket, nbytes: int, buffer: torch.Tensor, view: memoryview, sums: Connection
) -> None:
    got = 0
    while got < nbytes:
        got += raw.recv_into(view[got:nbytes])
    total = int(buffer[: nbytes // 8].sum())
    raw.sendall(b"k")
    sums.send(total)
