"""Pages of the C heap in which nothing is any more go back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from keystage.wire.heap import HeapTrim

CHUNKS = 60_000
CHUNK_BYTES = 1000


def anonymous_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel tells no anonymous memory")


def test_what_was_freed_below_something_in_use_goes_back() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("this libc has no malloc_trim")
    libc.malloc.restype = ctypes.c_void_p
    chunks = [libc.malloc(CHUNK_BYTES) for _ in range(CHUNKS)]
    for chunk in chunks:
        ctypes.memset(chunk, 1, CHUNK_BYTES)
    for chunk in chunks[:-1]:  # the last one, at the end of the heap, is in use
        libc.free(ctypes.c_void_p(chunk))
    kept_bytes = anonymous_bytes()
    heap = HeapTrim(every_s=0.0)
    heap.now_and_then()
    assert heap.trims == 1
    assert kept_bytes - anonymous_bytes() > CHUNKS * CHUNK_BYTES / 2
    libc.free(ctypes.c_void_p(chunks[-1]))


def test_it_is_rare() -> None:
    heap = HeapTrim(every_s=3600.0)
    for _ in range(1000):
        heap.now_and_then()
    assert heap.trims == 0
