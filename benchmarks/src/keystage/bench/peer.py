"""`keystage bench peer`: parameters from another node's KeysManager, beside a plain socket copy.

Two processes over loopback TCP. Ours: the peer's own server, the loader's own lanes; every chunk is hashed
as it arrives and the segment is sealed at the end. Beside it, in the same rounds, the same bytes from
the same process over one plain socket: into memory of their own (as ours has to), and into one buffer
that is used over and over (nothing is kept: the limit of the socket). These hash nothing; a third plain copy
does.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import multiprocessing
import os
import random
import socket
import threading
import time
from multiprocessing.connection import Connection

from keystage.bench.frame import BenchError, BenchResult, Figure
from keystage.bundle.api import CHUNK_BYTES
from keystage.bundle.hashing import buffer_chunks, identity
from keystage.keysmanager import segment
from keystage.keysmanager.api import Memory, NodeStatus, Parameters, StageName
from keystage.keysmanager.loader import load
from keystage.keysmanager.peer_server import Offered, make_app, start
from keystage.keysmanager.pod_api import Grant
from keystage.keysmanager.source_peer import PeerSource

ROUNDS = 15
MB = 256
PIECE_BYTES = 1024 * 1024
_TOKEN = "bench"  # noqa: S105 - of a server that lives for seconds on loopback
_WAIT_S = 120.0
_HASH = "SHA-256"
_PLAIN_NOTE = (
    "plain: one connection, sendall and recv_into of 1 MiB; kept: into a fresh mapping as large as the "
    "parameters; hashed: one SHA-256, piece by piece, in the receiving thread"
)


def run(*, quick: bool = False, mb: int = MB) -> BenchResult:
    """Measures all ways, round by round.

    Args:
        quick: a third of the rounds.
        mb: size of the parameters in MiB.

    Raises:
        BenchError: no memory for it, or the serving process failed.
    """
    nbytes = mb * 1024 * 1024
    if 4 * nbytes > segment.available_bytes():
        raise BenchError(f"--mb {mb}: {4 * nbytes} bytes needed, {segment.available_bytes()} are free")
    context = multiprocessing.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    child = context.Process(target=_serve, args=(nbytes, child_pipe), daemon=True)
    child.start()
    child_pipe.close()
    try:
        if not pipe.poll(_WAIT_S):
            raise BenchError(f"the serving process was not ready within {_WAIT_S:g} s")
        plain_port, http_port, parameters = pipe.recv()
        return _measure(plain_port, http_port, parameters, ROUNDS // 3 if quick else ROUNDS)
    except EOFError as error:
        raise BenchError("the serving process ended") from error
    finally:
        child.terminate()
        child.join(5)


def _measure(plain_port: int, http_port: int, parameters: Parameters, rounds: int) -> BenchResult:
    nbytes = parameters.nbytes
    source = PeerSource(f"http://127.0.0.1:{http_port}", _TOKEN, parameters)
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        taken = {
            "plain, kept": measure_plain_copy(plain_port, nbytes),
            "keystage": _ours(source, parameters),
            "plain, kept and hashed": measure_plain_copy(plain_port, nbytes, is_hashed=True),
            "plain, not kept": measure_plain_copy(plain_port, nbytes, is_kept=False),
            _HASH: _hashing(),
        }
        if number:  # the first round warms sockets and code
            for way, seconds in taken.items():
                times.setdefault(way, []).append(seconds)
    rows = [
        {"way": way, "GB/s": nbytes / 1e9 / sorted(taken)[len(taken) // 2], "rounds": len(taken)}
        for way, taken in times.items()
        if way != _HASH
    ]
    one_core = CHUNK_BYTES / 1e9 / sorted(times[_HASH])[rounds // 2]
    return BenchResult(
        rows,
        {
            "peer_ratio": _ratio(
                times["plain, kept"], times["keystage"], "kept in fresh memory", "at least 0.7"
            ),
            "peer_limit_ratio": _ratio(
                times["plain, not kept"], times["keystage"], "into one reused buffer", ""
            ),
        },
        [
            f"{nbytes} bytes a round over loopback; ours: {source.lanes} connections, every chunk hashed",
            _PLAIN_NOTE,
            f"SHA-256: {one_core:.2f} GB/s a core; both ends share {len(os.sched_getaffinity(0))} cores",
        ],
    )


def _ratio(plain: list[float], ours: list[float], what: str, target: str) -> Figure:
    samples = [theirs_s / ours_s for theirs_s, ours_s in zip(plain, ours, strict=True)]
    return Figure(samples, f"GB/s from a peer, checked / GB/s of a plain socket copy {what}", target)


def _ours(source: PeerSource, parameters: Parameters) -> float:
    loaded = asyncio.run(load(parameters, [source]))
    os.close(loaded.fd)
    return loaded.load_s


def _hashing() -> float:
    block = bytes(CHUNK_BYTES)
    started_s = time.perf_counter()
    hashlib.sha256(block)
    return time.perf_counter() - started_s


def measure_plain_copy(port: int, nbytes: int, *, is_kept: bool = True, is_hashed: bool = False) -> float:
    """Seconds that one plain TCP connection takes for `nbytes` from the serving process.

    Args:
        port: where it serves them to whoever connects.
        nbytes: how many it sends.
        is_kept: each byte gets a place of its own in fresh memory; else one buffer takes them all.
        is_hashed: a SHA-256 is taken as they arrive.

    Raises:
        BenchError: it sends fewer.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S) as sock:
        started_s = time.perf_counter()
        digest = hashlib.sha256()
        with mmap.mmap(-1, nbytes if is_kept else PIECE_BYTES) as pages, memoryview(pages) as view:
            sock.sendall(b"g")
            left = nbytes
            while left > 0:
                start = nbytes - left if is_kept else 0
                with view[start : start + min(PIECE_BYTES, left)] as piece:
                    got = sock.recv_into(piece)
                    if is_hashed:
                        digest.update(piece[:got])
                if got == 0:
                    raise BenchError(f"plain copy: {left} of {nbytes} bytes missing")
                left -= got
            return time.perf_counter() - started_s


class _Node:
    """The serving side: one segment."""

    def __init__(self, fd: int, parameters: Parameters) -> None:
        self._fd = fd
        self._parameters = parameters

    async def offer(self, identity: str) -> Offered | None:
        if identity != self._parameters.identity:
            return None
        return Offered(os.dup(self._fd), self._parameters.nbytes)

    async def status(self) -> NodeStatus:
        memory = Memory(limit_bytes=0, used_bytes=0, budget_bytes=0, segment_bytes=0, origin="configured")
        return NodeStatus(
            node="bench",
            protocol=1,
            started_at_s=0,
            holders=(),
            standbys=(),
            memory=memory,
            gpus=(),
            history=(),
        )

    async def set_key_stages(self, stages: tuple[StageName, ...]) -> None:
        """Not asked here."""

    async def invalidate(self, identity: str) -> None:
        """Not asked here."""

    def set_grants(self, grants: tuple[Grant, ...]) -> None:
        """Nobody grants here."""

    def metrics(self) -> bytes:
        return b""


def _serve(nbytes: int, pipe: Connection) -> None:
    draft = segment.create(nbytes, "keystage-bench")
    noise = random.Random(1)
    for offset in range(0, nbytes, CHUNK_BYTES):
        length = min(CHUNK_BYTES, nbytes - offset)
        with draft.window(offset, length) as window:
            window[:] = noise.randbytes(length)
    fd = draft.seal()
    view = segment.map_readonly(fd, nbytes)
    chunks = tuple(buffer_chunks(view))
    parameters = Parameters(
        name=StageName("file:///bench", 0),
        pipeline="bench",
        identity=identity(chunks, "float32"),
        dtype="float32",
        file="bench",
        nbytes=nbytes,
        chunks=chunks,
    )
    plain, http = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_plain, args=(plain, view), daemon=True).start()

    async def serve() -> None:
        await start(make_app(_Node(fd, parameters), _TOKEN), http)
        pipe.send((plain.getsockname()[1], http.getsockname()[1], parameters))
        await asyncio.Event().wait()

    asyncio.run(serve())


def _serve_plain(listening: socket.socket, view: memoryview) -> None:
    while True:
        sock, _ = listening.accept()
        with sock:
            sock.recv(1)
            for start_byte in range(0, len(view), PIECE_BYTES):
                sock.sendall(view[start_byte : start_byte + PIECE_BYTES])
