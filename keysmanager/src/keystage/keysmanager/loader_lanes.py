"""The lanes of a load: threads that read chunks, hash them as they arrive, and put them into a segment.

`loader` makes one `Chunks` per load and calls `fetch` once per rank of sources, until nothing is
left. Sources of one rank are read at once; each lane takes the next chunk, so a faster source serves
more. A source that errs once is given up with all its lanes, and its chunk goes back to the others: what
was checked stays.

Bytes travel in pieces of 1 MiB through a buffer that stays in the core's cache: received, hashed and
written from there. Writing 4 KiB pages through a mapping is half as fast, for each is zeroed first (measured:
1.2 against 2.5 GB/s); huge pages are written through a window in place.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from keystage.bundle.api import CHUNK_BYTES
from keystage.keysmanager.api import Parameters
from keystage.keysmanager.loader_source import Busy, ParameterSource, Reader, SourceError, Stop
from keystage.keysmanager.segment import Draft

PIECE_BYTES = 1024 * 1024
"""Fits the second-level cache of server cores; a direct read of this size keeps an NVMe disk busy."""
BUSY_S = 10.0
"""A lane that is told to come back later, again and again, gives its source up after this."""
_LEAST_PAUSE_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One chunk: its number, place in the file, and SHA-256 (hex)."""

    number: int
    offset: int
    length: int
    digest: str


class Chunks:
    """Chunks still to be had, and who served which; used by all lanes of a load."""

    def __init__(self, parameters: Parameters) -> None:
        """Lists the chunks of a file whose hashes were found consistent with its length."""
        self._changed = threading.Condition()
        self._waiting = collections.deque(
            Span(
                number,
                number * CHUNK_BYTES,
                min(CHUNK_BYTES, parameters.nbytes - number * CHUNK_BYTES),
                digest,
            )
            for number, digest in enumerate(parameters.chunks)
        )
        self._in_flight = 0
        self._is_broken = False
        self.served_bytes: collections.Counter[ParameterSource] = collections.Counter()
        self.failures: dict[ParameterSource, str] = {}

    @property
    def left(self) -> int:
        """Chunks that nobody has served yet."""
        with self._changed:
            return len(self._waiting) + self._in_flight

    def take(self, source: ParameterSource, stop: Stop) -> Span | None:
        """The next chunk for a lane; waits while others' chunks may still come back.

        Returns:
            None: all are served, the source was given up, or the load is called off or has failed.
        """
        with self._changed:
            while not (stop.is_set or self._is_broken or source in self.failures):
                if self._waiting:
                    self._in_flight += 1
                    return self._waiting.popleft()
                if self._in_flight == 0:
                    return None
                self._changed.wait()
            return None

    def done(self, span: Span, source: ParameterSource) -> None:
        """A chunk is in the segment and checked."""
        with self._changed:
            self._in_flight -= 1
            self.served_bytes[source] += span.length
            self._changed.notify_all()

    def give_back(self, span: Span) -> None:
        """A chunk could not be had; somebody else shall try."""
        with self._changed:
            self._in_flight -= 1
            self._waiting.appendleft(span)
            self._changed.notify_all()

    def give_up(self, source: ParameterSource, reason: str) -> None:
        """A source erred: none of its lanes takes another chunk; the first reason counts."""
        with self._changed:
            self.failures.setdefault(source, reason)
            self._changed.notify_all()

    def break_off(self) -> None:
        """The segment itself cannot be filled: no lane takes another chunk."""
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Lets waiting lanes look again."""
        with self._changed:
            self._changed.notify_all()


def fetch(draft: Draft, chunks: Chunks, sources: Sequence[ParameterSource], stop: Stop) -> None:
    """Reads what is left from sources of one rank, all at once; returns when none can serve more.

    Args:
        draft: segment to fill.
        chunks: what is left; tells afterwards who served and who failed.
        sources: where to read; a lane each for every `lanes`, but never more than chunks are left.
        stop: calls it off.

    Raises:
        SegmentError: the segment cannot be written.
        OSError: likewise.
    """
    left = chunks.left
    lanes = [source for source in sources for _ in range(min(source.lanes, left))]
    with stop.guard(chunks.wake), ThreadPoolExecutor(max(1, len(lanes)), "keystage-load") as pool:
        for ended in [pool.submit(_lane, draft, chunks, source, stop) for source in lanes]:
            ended.result()


def _lane(draft: Draft, chunks: Chunks, source: ParameterSource, stop: Stop) -> None:
    if stop.is_set or source in chunks.failures:
        return
    try:
        reader = source.open()
    except SourceError as error:
        chunks.give_up(source, str(error))
        return
    try:
        with stop.guard(reader.abort), mmap.mmap(-1, PIECE_BYTES) as pages, memoryview(pages) as buffer:
            patience = _Patience()
            while (span := chunks.take(source, stop)) is not None:
                busy = _serve(draft, chunks, source, reader, span, buffer, stop)
                if busy is not None and not patience.wait(busy, stop):
                    chunks.give_up(source, f"chunk {span.number}: {busy} for {BUSY_S:g} s")
                if busy is None:
                    patience = _Patience()
    finally:
        reader.close()


def _serve(
    draft: Draft,
    chunks: Chunks,
    source: ParameterSource,
    reader: Reader,
    span: Span,
    buffer: memoryview,
    stop: Stop,
) -> Busy | None:
    """Serves a chunk, or gives it back; says when the source is only busy."""
    is_served = False
    try:
        digest = _move(draft, reader, span, buffer)
        is_served = digest == span.digest
        if not is_served:
            chunks.give_up(
                source, f"chunk {span.number} altered: SHA-256 {span.digest} expected, {digest} found"
            )
            source.damaged()
    except Busy as error:
        return error
    except SourceError as error:
        if not stop.is_set:
            chunks.give_up(source, f"chunk {span.number}: {error}")
    except BaseException:
        chunks.break_off()
        raise
    finally:  # whatever happened: other lanes wait for this chunk's fate
        if is_served:
            chunks.done(span, source)
        else:
            chunks.give_back(span)
    return None


class _Patience:
    """How long one lane has been told to come back later."""

    def __init__(self) -> None:
        self._until_s: float | None = None

    def wait(self, busy: Busy, stop: Stop) -> bool:
        """Waits as told, unless the load is called off; False: it has been long enough."""
        now_s = time.monotonic()
        if self._until_s is None:
            self._until_s = now_s + BUSY_S
        pause_s = max(busy.after_s, _LEAST_PAUSE_S)
        if now_s + pause_s > self._until_s:
            return False
        called_off = threading.Event()
        with stop.guard(called_off.set):
            called_off.wait(pause_s)
        return True


def _move(draft: Draft, reader: Reader, span: Span, buffer: memoryview) -> str:
    """Reads a chunk into the segment; returns its SHA-256 (hex)."""
    digest = hashlib.sha256()
    reader.start(span.offset, span.length)
    if draft.huge_bytes:
        with draft.window(span.offset, span.length) as window:
            for start in range(0, span.length, PIECE_BYTES):
                with window[start : start + PIECE_BYTES] as piece:
                    reader.fill(piece)
                    digest.update(piece)
        return digest.hexdigest()
    for start in range(0, span.length, PIECE_BYTES):
        with buffer[: min(PIECE_BYTES, span.length - start)] as piece:
            reader.fill(piece)
            digest.update(piece)
            _write(draft.fileno(), piece, span.offset + start)
    return digest.hexdigest()


def _write(fd: int, piece: memoryview, offset: int) -> None:
    position = 0
    while position < len(piece):
        with piece[position:] as rest:
            position += os.pwrite(fd, rest, offset + position)
