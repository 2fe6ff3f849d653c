"""Old garbage is collected, names looked up once are let go, and free pages of the C heap go back."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from keystage.wire.upkeep import Upkeep

CHUNKS = 60_000
CHUNK_BYTES = 1000


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_became_garbage_when_it_was_old_is_collected() -> None:
    """A request in flight lives through collections of the young, and its cycles with it."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 1000, 1000)
    try:
        node = Node()
        seen = weakref.ref(node)
        gc.collect(0)
        gc.collect(1)
        del node
        gc.collect(1)
        assert seen() is not None
        upkeep = Upkeep(collect_every_s=0.0)
        upkeep.now_and_then()
        assert seen() is None
        assert upkeep.collections == 1
        # What took long is done seldom, whatever was asked for.
        for _ in range(3):
            upkeep.now_and_then()
        assert upkeep.collections == 1
    finally:
        gc.set_threshold(*before)


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
    upkeep = Upkeep(trim_every_s=0.0)
    upkeep.now_and_then()
    assert upkeep.trims == 1
    assert kept_bytes - anonymous_bytes() > CHUNKS * CHUNK_BYTES / 2
    libc.free(ctypes.c_void_p(chunks[-1]))


IN_A_THREAD = """
import ctypes, sys
from concurrent.futures import ThreadPoolExecutor
from keystage.wire.upkeep import Upkeep, one_heap
from unit.test_wire_upkeep import anonymous_bytes

if sys.argv[1] == "one heap":
    one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
upkeep = Upkeep(trim_every_s=0.0)

def answer(parts: int) -> None:
    chunks = [libc.malloc(1000) for _ in range(parts)]
    for chunk in chunks:
        ctypes.memset(chunk, 1, 1000)
    for chunk in chunks:
        libc.free(ctypes.c_void_p(chunk))

with ThreadPoolExecutor(1) as threads:
    held = []
    for parts in (10, 300):
        threads.submit(answer, parts).result()
        upkeep.now_and_then()
        held.append(anonymous_bytes())
print(held[1] - held[0])
"""


def test_what_a_thread_touched_once_goes_back_where_there_is_one_heap() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this libc has no malloc_trim")
    kept_bytes = {
        heaps: int(
            subprocess.run(
                [sys.executable, "-c", IN_A_THREAD, heaps],
                cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True,
            ).stdout
        )
        for heaps in ("one heap", "a heap each")
    }  # fmt: skip
    assert kept_bytes["a heap each"] > 120_000
    assert kept_bytes["one heap"] < 60_000


def test_a_name_that_was_looked_up_once_is_let_go() -> None:
    """As C code makes them: a string of its own for each look-up, held by the cache of attributes then."""
    name = b"no_such_attribute".decode()
    before = sys.getrefcount(name)
    assert getattr(object(), name, None) is None
    assert sys.getrefcount(name) == before + 1
    Upkeep(trim_every_s=0.0).now_and_then()
    assert sys.getrefcount(name) == before


def test_it_is_rare() -> None:
    upkeep = Upkeep(3600.0, 3600.0)
    for _ in range(1000):
        upkeep.now_and_then()
    assert (upkeep.trims, upkeep.collections) == (0, 0)
