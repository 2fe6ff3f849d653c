"""Loads one stage's parameters into a sealed segment, from the best source that has them.

The daemon carries out the ledger's `Load` through here; what comes back is a descriptor to hand to a
holder. Room was reserved by the ledger before; nothing is decided here but which source serves.
Sources are tried in order, peers all at once; a load that fails or is called off leaves no
descriptor, thread or memory behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from keystage.bundle.api import CHUNK_BYTES
from keystage.bundle.hashing import identity
from keystage.keysmanager import segment
from keystage.keysmanager.api import Parameters, Source
from keystage.keysmanager.disk_cache import DiskCache
from keystage.keysmanager.loader_lanes import Chunks, fetch
from keystage.keysmanager.loader_source import LoadError, ParameterSource, SourceError, Stop
from keystage.keysmanager.source_disk import DiskSource
from keystage.keysmanager.source_home import plan
from keystage.wire.bearer import Bearer, bearer_of

log = logging.getLogger(__name__)

Create = Callable[[int, str], segment.Draft]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedSegment:
    """Parameters in memory, checked.

    Attributes:
        fd: sealed memfd; the caller's to close.
        nbytes: bytes of content.
        huge_bytes: size of its pages where larger than 4096, else 0.
        source: where most of the bytes came from.
        load_s: seconds it took.
        note: sources that were tried and failed, empty where none did.
        is_remote: bytes came from another machine: worth a copy on disk.
    """

    fd: int
    nbytes: int
    huge_bytes: int
    source: Source
    load_s: float
    note: str
    is_remote: bool


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderSettings:
    """Where the daemon's loads may look.

    Attributes:
        peers: addresses (`http://host:port`) of other nodes' KeysManagers.
        token: their bearer token.
        home_is_remote: whether `file://` homes are another machine's disk; None: by file system.
    """

    peers: tuple[str, ...] = ()
    token: Bearer | str = ""
    home_is_remote: bool | None = None


class Loader:
    """Loads for a daemon: plans the sources, and keeps what came from afar on this node's disk."""

    def __init__(self, settings: LoaderSettings, cache: DiskCache | None = None) -> None:
        self._settings = settings
        self._cache = cache
        self._writing: set[asyncio.Task[bool]] = set()

    async def load(self, parameters: Parameters, *, cancelled: asyncio.Event | None = None) -> LoadedSegment:
        """Loads parameters from wherever they are; see `load`."""
        sources = await asyncio.to_thread(self._plan, parameters)
        loaded = await load(parameters, sources, cancelled=cancelled)
        if loaded.is_remote and self._cache is not None:
            copying = os.dup(loaded.fd)  # the segment may be evicted while it is being written
            task = asyncio.create_task(asyncio.to_thread(_keep, self._cache, parameters, copying))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)
        return loaded

    def open_local(self, parameters: Parameters) -> int | None:
        """Opens a file on this node's disk that should hold these parameters, to be served to a peer.

        Blocks on the disk. The bytes are not checked: who receives them does.

        Returns:
            A descriptor of the caller's, None: no disk of this node has such a file.
        """
        for source in self._plan(parameters):
            if isinstance(source, DiskSource) and source.kind == "disk":
                with contextlib.suppress(SourceError):
                    return source.descriptor()
        return None

    def drop(self, identity: str) -> None:
        """Deletes the copy on disk of parameters that were revoked."""
        if self._cache is not None:
            self._cache.drop(identity)

    async def close(self) -> None:
        """Waits for copies that are being written."""
        await asyncio.gather(*self._writing, return_exceptions=True)

    def _plan(self, parameters: Parameters) -> list[ParameterSource]:
        return plan(
            parameters,
            cache=self._cache,
            peers=self._settings.peers,
            token=bearer_of(self._settings.token).current,
            home_is_remote=self._settings.home_is_remote,
        )


def _keep(cache: DiskCache, parameters: Parameters, fd: int) -> bool:
    try:
        return cache.store(parameters, fd)
    finally:
        os.close(fd)


async def load(
    parameters: Parameters,
    sources: Sequence[ParameterSource],
    *,
    cancelled: asyncio.Event | None = None,
    create: Create = segment.create,
) -> LoadedSegment:
    """Loads parameters into a sealed segment, in threads.

    Args:
        parameters: what to load, and the hashes to hold it against.
        sources: where to look, best first; neighbours that are peers are read at once.
        cancelled: calls the load off when set; so does cancelling the task. Either returns only when every
            thread has ended.
        create: makes the segment.

    Raises:
        LoadError: nobody could serve it, or there is no memory for it; names every source and why.
        LoadCancelled: it was called off by `cancelled`.
    """
    stop = Stop()
    # A thread of its own: loads must not wait for each other, nor others for them, in a shared pool.
    pool = ThreadPoolExecutor(1, "keystage-load")
    work = asyncio.get_running_loop().run_in_executor(pool, load_now, parameters, sources, stop, create)
    watch = asyncio.create_task(_watch(cancelled, stop)) if cancelled is not None else None
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await _ended(work)
        if not work.cancelled() and work.exception() is None:
            os.close(work.result().fd)  # it was done already; nobody is there to take it
        raise
    finally:
        if watch is not None:
            watch.cancel()
        pool.shutdown(wait=False)


async def _watch(cancelled: asyncio.Event, stop: Stop) -> None:
    await cancelled.wait()
    stop.set()


async def _ended(work: asyncio.Future[LoadedSegment]) -> None:
    """Waits for threads to end, however often the waiting task is cancelled meanwhile."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])


def load_now(
    parameters: Parameters,
    sources: Sequence[ParameterSource],
    stop: Stop,
    create: Create = segment.create,
) -> LoadedSegment:
    """What `load` does, in the calling thread."""
    name = f"{parameters.pipeline} stage {parameters.name.stage}"
    started_s = time.monotonic()
    check(parameters)
    stop.check()
    try:
        draft = create(parameters.nbytes, f"keystage-{parameters.pipeline}-{parameters.name.stage}")
    except segment.SegmentError as error:
        raise LoadError(f"{name}: {error}") from error
    try:
        chunks = Chunks(parameters)
        for rank in _ranks(sources):
            stop.check()
            if chunks.left:
                fetch(draft, chunks, rank, stop)
        stop.check()
        note = "; ".join(f"{source.name}: {reason}" for source, reason in chunks.failures.items())
        if chunks.left:
            raise LoadError(f"{name}: no source has it: {note or 'none is configured'}")
        fd = draft.seal()
    except (segment.SegmentError, OSError) as error:
        raise LoadError(f"{name}: segment of {parameters.nbytes} bytes: {error}") from error
    finally:
        draft.discard()
    load_s = time.monotonic() - started_s
    best = max(chunks.served_bytes, key=lambda source: chunks.served_bytes[source])
    if note:
        log.warning("%s: %s", name, note)
    log.info(
        "%s: %.3f GB in %.3f s (%.2f GB/s) from %s (%s)",
        name, parameters.nbytes / 1e9, load_s, parameters.nbytes / 1e9 / load_s,
        " and ".join(source.name for source in chunks.served_bytes), best.facts(),
    )  # fmt: skip
    is_remote = any(source.kind != "disk" for source in chunks.served_bytes)
    return LoadedSegment(
        fd, parameters.nbytes, draft.huge_bytes if draft.is_hugetlb else 0, best.kind, load_s, note, is_remote
    )


def _ranks(sources: Sequence[ParameterSource]) -> Iterator[list[ParameterSource]]:
    """Groups neighbours that are peers; every other source stands alone."""
    numbered = enumerate(sources)
    for _, group in itertools.groupby(numbered, key=lambda item: -1 if item[1].kind == "peer" else item[0]):
        yield [source for _, source in group]


def check(parameters: Parameters) -> None:
    """Checks that length, chunk hashes and identity fit each other, before memory is asked for.

    Raises:
        LoadError: they do not; names what, the bound and the value.
    """
    name = f"{parameters.pipeline} stage {parameters.name.stage}"
    if parameters.nbytes <= 0:
        raise LoadError(f"{name}: {parameters.nbytes} bytes, at least 1 is expected")
    expected = -(-parameters.nbytes // CHUNK_BYTES)
    if len(parameters.chunks) != expected:
        raise LoadError(
            f"{name}: {parameters.nbytes} bytes are {expected} chunks, "
            f"{len(parameters.chunks)} hashes are given"
        )
    try:
        found = identity(parameters.chunks, parameters.dtype)
    except ValueError as error:
        raise LoadError(f"{name}: a chunk hash is no hexadecimal number: {error}") from error
    if found != parameters.identity:
        raise LoadError(f"{name}: identity {parameters.identity} given, its hashes make {found}")
