"""Copying a segment into an arena: registered ahead, lanes through a ring, registration in place, or neither.

Below `device_copy`, whose docstring says what each way reaches. One thread runs the copy, so that the
caller can get libraries ready meanwhile; cuda_driver's calls release the interpreter lock.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from keystage.keysmanager import pinning
from keystage.keysmanager.arena import Arena
from keystage.keysmanager.mapped_pages import drop_pages, has_huge_pages
from keystage.keysmanager.pinning import RING_CHUNK_BYTES, RING_DEPTH, Ring
from keystage.keysmanager.registered_copy import RegisteredCopy
from keystage.keysmanager.registration import Registration
from keystage.keysmanager.segment import as_tensor
from keystage.wire.cuda_driver import CudaError, Driver

log = logging.getLogger("keystage.keysmanager")

REGISTER_CHUNK_BYTES = 64 * 1024 * 1024
STAGED_LANES = 12
"""Fewer lanes stage slower than one thread registers huge pages."""
STAGED_LANES_SMALL_PAGES = 6
"""Pages of 4 KiB register at 16 to 19 GB/s: six lanes of about 3 GB/s reach that."""
_SWITCH_S = 0.0001

Way = Literal["registered-ahead", "staged", "registered", "pageable", "memory", "peer-gpu"]


@dataclass(frozen=True, slots=True)
class Copied:
    """How a segment came to a device.

    Attributes:
        nbytes: bytes copied.
        seconds: until the device had them.
        way: how, see `device_copy`; `memory`: within host memory, `peer-gpu`: from another replica's arena.
        lanes: threads at work.
        note: why nothing better was possible, empty where nothing was.
    """

    nbytes: int
    seconds: float
    way: Way
    lanes: int
    note: str = ""


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    """Threads that copy get the interpreter lock soon.

    They take it for microseconds, between calls. Any other thread that computes in Python meanwhile must
    give it back as fast, and still costs a third of the speed of lanes: measured 0.152 s instead of 0.117
    for 5 GiB, with a thread that is busy for 30 ms.
    """
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


class Copy:
    """A segment on its way into an arena; begins at once, in threads of its own.

    Args:
        view: the file, mapped shared and read-only.
        data_start: bytes of header that are left out.
        arena: the target, of which nothing is in use on the device.
        ring: pinned memory made ahead, None: there is none.
        ahead: of this mapping, what was registered before, None: nothing. It stays the caller's.

    Raises:
        CudaError: the device refuses what was registered.
    """

    def __init__(
        self,
        view: memoryview,
        data_start: int,
        arena: Arena,
        ring: Ring | None,
        ahead: Registration | None = None,
    ) -> None:
        self._source = as_tensor(view)
        self._start = data_start
        self._arena = arena
        self._ring = ring
        self._ahead = ahead
        self._registered: list[int] = []
        self._driver: Driver | None = None
        self._result: Copied | None = None
        self._error: BaseException | None = None
        if arena.data.is_cuda:
            torch.cuda.synchronize(arena.data.device)
            self._driver = Driver()
        self._begin_s = time.perf_counter()
        self._first: RegisteredCopy | None = None
        if ahead is not None and self._driver is not None:
            ends = self._source.data_ptr(), data_start, arena.data.data_ptr()
            self._first = RegisteredCopy(self._driver, ahead, *ends)
        self._thread = threading.Thread(target=self._run, name="copy", daemon=True)
        self._thread.start()

    def wait(self) -> Copied:
        """Returns when the device has all bytes.

        Raises:
            CudaError: the device refused a copy.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def join(self) -> None:
        """Waits for the end of the copy, good or bad."""
        self._thread.join()

    def unmap(self, unmapped: Callable[[], None] | None = None) -> None:
        """Unpins and unmaps the pages, in a thread (40 ms for 5 GiB), but not what is registered ahead."""
        if self._driver is None:
            self._source = self._source.new_empty(0)
            if unmapped is not None:
                unmapped()
            return
        threading.Thread(target=self._unmap, args=(unmapped,), name="unmap", daemon=True).start()

    def _unmap(self, unmapped: Callable[[], None] | None) -> None:
        assert self._driver is not None
        self._driver.enter()
        for address in self._registered:
            with contextlib.suppress(CudaError):  # the context ends: nothing is pinned then
                self._driver.unregister(address)
        self._registered.clear()
        drop_pages(self._source)
        self._source = self._source.new_empty(0)
        if unmapped is not None:
            unmapped()

    def _run(self) -> None:
        try:
            way, lanes, note = self._copy()
        except BaseException as error:  # noqa: BLE001  # raised again by `wait`
            self._error = error
            return
        nbytes = self._source.numel() - self._start
        self._result = Copied(nbytes, time.perf_counter() - self._begin_s, way, lanes, note)

    def _copy(self) -> tuple[Way, int, str]:
        size = self._source.numel()
        if self._driver is None:
            self._arena.data[: size - self._start].copy_(self._source[self._start :])
            return "memory", 1, "mapped ahead" if self._ahead is not None else ""
        self._driver.enter()
        first = self._first
        if first is None:
            return self._rest(0)
        try:
            is_all = first.done_bytes >= size
            return ("registered-ahead", first.streams, "") if is_all else self._rest(first.done_bytes)
        finally:
            first.wait()

    def _rest(self, begin: int) -> tuple[Way, int, str]:
        """File bytes from `begin` (a multiple of large pages) on, which nobody has registered."""
        assert self._driver is not None
        first, note = max(begin, self._start), f"{begin} bytes were registered ahead" if begin else ""
        if self._ring is not None and self._ring.lanes >= self._enough_lanes():
            self._staged(self._ring, first)
            return "staged", self._ring.lanes, note
        if not self._driver.can_register_read_only():
            note = "this device cannot pin memory that is mapped read-only"
            return self._without_registering(first, note)
        with _quick_switches():
            done, refused = self._registering(begin)
        if refused is None:
            return "registered", 1, note
        note = pinning.refusal(refused, min(REGISTER_CHUNK_BYTES, self._source.numel() - done))
        return self._without_registering(max(done, self._start), note)

    def _enough_lanes(self) -> int:
        return STAGED_LANES if has_huge_pages(self._source) else STAGED_LANES_SMALL_PAGES

    def _registering(self, begin: int) -> tuple[int, CudaError | None]:
        """Pins from `begin` on, each chunk copied while the next is pinned; (bytes done, why no further)."""
        assert self._driver is not None
        source, size = self._source.data_ptr(), self._source.numel()
        stream = self._driver.stream()
        try:
            for chunk in range(begin, size, REGISTER_CHUNK_BYTES):
                end = min(chunk + REGISTER_CHUNK_BYTES, size)
                pages = -(-(end - chunk) // mmap.PAGESIZE) * mmap.PAGESIZE
                try:
                    self._driver.register(source + chunk, pages)
                except CudaError as error:
                    return chunk, error
                self._registered.append(source + chunk)
                self._queue(max(chunk, self._start), end, stream)
        finally:
            self._driver.wait_stream(stream)
            self._driver.destroy_stream(stream)
        return size, None

    def _without_registering(self, begin: int, note: str) -> tuple[Way, int, str]:
        """The rest through a ring pinned now, or else by the driver's own pageable copy."""
        assert self._driver is not None
        try:
            ring = self._ring or Ring(self._driver, pinning.lanes())
        except CudaError as error:
            log.warning("%s; no ring either (%s): pageable copy", note, error)
            stream = self._driver.stream()
            for chunk in range(begin, self._source.numel(), REGISTER_CHUNK_BYTES):
                self._queue(chunk, min(chunk + REGISTER_CHUNK_BYTES, self._source.numel()), stream)
            self._driver.wait_stream(stream)
            self._driver.destroy_stream(stream)
            return "pageable", 1, note
        log.warning("%s; staged through %d bytes of pinned memory", note, ring.nbytes)
        self._staged(ring, begin)
        if ring is not self._ring:
            ring.close()
        return "staged", ring.lanes, note

    def _queue(self, begin: int, end: int, stream: int) -> None:
        """Queues the copy of file bytes [begin, end)."""
        assert self._driver is not None
        target = self._arena.data.data_ptr() + begin - self._start
        self._driver.copy_to_device(target, self._source.data_ptr() + begin, end - begin, stream)

    def _staged(self, ring: Ring, begin: int) -> None:
        """Copies from `begin` on through the ring, lanes taking chunks in order."""
        chunks = collections.deque(range(begin, self._source.numel(), RING_CHUNK_BYTES))
        errors: list[CudaError] = []
        threads = [
            threading.Thread(target=self._lane, args=(ring, lane, chunks, errors), name=f"lane-{lane}")
            for lane in range(ring.lanes)
        ]
        with _quick_switches():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]

    def _lane(self, ring: Ring, lane: int, chunks: collections.deque[int], errors: list[CudaError]) -> None:
        driver, source, size = self._driver, self._source.data_ptr(), self._source.numel()
        assert driver is not None
        target = self._arena.data.data_ptr() - self._start
        stream = ring.streams[lane]
        number = 0
        try:
            driver.enter()
            while True:
                try:
                    chunk = chunks.popleft()
                except IndexError:
                    break
                length = min(RING_CHUNK_BYTES, size - chunk)
                place, event = ring.place(lane, number)
                if number >= RING_DEPTH:
                    driver.wait_event(event)
                ctypes.memmove(place, source + chunk, length)
                driver.queue_chunk(target + chunk, place, length, stream, event)
                number += 1
            driver.wait_stream(stream)
        except CudaError as error:
            errors.append(error)
