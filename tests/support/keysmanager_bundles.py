"""Bundles of random bytes, peers that serve them, and servers that misbehave; all over real sockets.

Used by the tests of catalog, loader and peer server. The bytes are no model: nobody below the worker
looks into them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec

from keystage.bundle import store
from keystage.bundle.api import CHUNK_BYTES, emulated
from keystage.bundle.hashing import file_chunks, identity
from keystage.keysmanager.api import Memory, NodeStatus, Parameters, StageName
from keystage.keysmanager.catalog import Catalog
from keystage.keysmanager.loader_http import HttpLimits
from keystage.keysmanager.peer_server import Offered, PeerRefused, make_app, start
from keystage.keysmanager.pod_api import Grant
from keystage.keysmanager.source_peer import PeerSource

TOKEN = "a-token-of-the-nodes"
PATIENT = HttpLimits(connect_s=2.0, silent_s=30.0, span_s=60.0)
THREE_CHUNKS = 2 * CHUNK_BYTES + 5000


def write_stages(folder: Path, sizes: list[int], *, seed: int = 1, name: str = "p") -> Path:
    """Writes (or replaces) a bundle whose stages' files hold random bytes of these lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = random.Random(seed)
    pipeline = emulated(name, len(sizes), execution="single-pass")
    stages = []
    for spec, nbytes in zip(pipeline.stages, sizes, strict=True):
        file = folder / f"stage-{spec.index:02}.safetensors"
        partial = folder / "partial"
        partial.write_bytes(noise.randbytes(nbytes))
        partial.replace(file)
        chunks = file_chunks(file)
        stages.append(
            msgspec.structs.replace(
                spec, file=file.name, nbytes=nbytes, chunks=chunks, identity=identity(chunks, "float32")
            )
        )
    store.write(folder, msgspec.structs.replace(pipeline, dtype="float32", stages=stages))
    return folder


def parameters_of(folder: Path, stage: int = 0, home: str = "") -> Parameters:
    """Parameters of a stage, as the catalog resolves them; `home` replaces the bundle's address."""
    found, _ = Catalog(folder / "unused").resolve(StageName(folder.as_uri(), stage))
    return msgspec.structs.replace(found, name=StageName(home or folder.as_uri(), stage))


def three_chunks(folder: Path) -> Path:
    """A bundle with a stage of three chunks (the last one short), and a small one."""
    return write_stages(folder / "bundle", [THREE_CHUNKS, 7001])


def peer(url: str, wanted: Parameters, token: str = TOKEN, limits: HttpLimits = PATIENT) -> PeerSource:
    """A peer as a source of these parameters."""
    return PeerSource(url, token, wanted, limits=limits)


class FilesBackend:
    """Serves files (or segments) by identity; remembers what it was told."""

    def __init__(self, files: dict[str, Path | int]) -> None:
        self.files = files
        self.stages: tuple[StageName, ...] = ()
        self.invalid: list[str] = []
        self.grants: tuple[Grant, ...] = ()
        self.offered = 0

    async def status(self) -> NodeStatus:
        memory = Memory(limit_bytes=4, used_bytes=3, budget_bytes=2, segment_bytes=1, origin="configured")
        return NodeStatus(
            node="n",
            protocol=1,
            started_at_s=1.0,
            holders=(),
            standbys=(),
            memory=memory,
            gpus=(),
            history=(),
        )

    async def offer(self, identity: str) -> Offered | None:
        self.offered += 1
        found = self.files.get(identity)
        if found is None:
            return None
        fd = os.dup(found) if isinstance(found, int) else os.open(found, os.O_RDONLY | os.O_CLOEXEC)
        return Offered(fd, os.fstat(fd).st_size)

    async def set_key_stages(self, stages: tuple[StageName, ...]) -> None:
        if any(stage.stage > 8 for stage in stages):
            raise PeerRefused("stage 9 of a bundle with 8", 404)
        self.stages = stages

    async def invalidate(self, identity: str) -> None:
        self.invalid.append(identity)

    def set_grants(self, grants: tuple[Grant, ...]) -> None:
        self.grants = grants

    def metrics(self) -> bytes:
        return b"keystage_up 1\n"


@contextlib.asynccontextmanager
async def serving(backend: FilesBackend, token: str = TOKEN) -> AsyncIterator[str]:
    """A peer in this process; gives its address."""
    sock = socket.create_server(("127.0.0.1", 0))
    runner = await start(make_app(backend, token), sock)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def odd_server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server whose every GET is answered by `answer`; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):
                answer(self)

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients that hang up are what is tested; anything else fails the client's side."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def asked_range(handler: BaseHTTPRequestHandler, total: int = 0) -> tuple[int, int]:
    """First and last byte of a request's range; one without an end goes to the last of `total` bytes."""
    first, last = handler.headers["Range"].removeprefix("bytes=").split("-")
    return int(first), int(last or total - 1)


def answer_range(
    handler: BaseHTTPRequestHandler, body: bytes, total: int, *, claim: int | None = None
) -> None:
    """Answers a range with `body`, whatever was asked; `claim`: the length that the head names."""
    first, last = asked_range(handler, total)
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {first}-{last}/{total}")
    handler.send_header("Content-Length", str(len(body) if claim is None else claim))
    handler.end_headers()
    handler.wfile.write(body)


def folder_server(folder: Path) -> contextlib.AbstractContextManager[str]:
    """An HTTP home: files of a folder, ranges and ETag honoured."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        path = folder / handler.path.lstrip("/")
        if not path.is_file():
            handler.send_error(404)
            return
        etag = f'"{path.stat().st_mtime_ns}"'
        if handler.headers.get("If-None-Match") == etag:
            handler.send_response(304)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        elif "Range" in handler.headers:
            body = path.read_bytes()
            first, last = asked_range(handler, len(body))
            answer_range(handler, body[first : last + 1], len(body))
        else:
            body = path.read_bytes()
            handler.send_response(200)
            handler.send_header("ETag", etag)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)

    return odd_server(answer)


def holdings() -> tuple[int, int, int]:
    """What this process holds: descriptors, threads, memfds that are mapped."""
    maps = Path("/proc/self/maps").read_text()
    return sum(1 for _ in Path("/proc/self/fd").iterdir()), threading.active_count(), maps.count("/memfd:")


def settles_at(before: tuple[int, int, int], within_s: float = 10.0) -> bool:
    """Whether this process holds no more than before, once servers within it have seen hang-ups."""
    deadline_s = time.monotonic() + within_s
    while any(now > then for now, then in zip(holdings(), before, strict=True)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def content(fd: int, nbytes: int) -> bytes:
    """All bytes of a segment, which is closed."""
    try:
        return os.pread(fd, nbytes, 0)
    finally:
        os.close(fd)


async def until(is_so: Callable[[], bool], within_s: float = 10.0) -> None:
    """Waits until something is so, bounded."""
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.005)
