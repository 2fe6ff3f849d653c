"""Files out of the page cache, so that a start from a cold disk is one."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

from keystage.bench.frame import BenchError


def drop_from_page_cache(path: Path) -> None:
    """Makes the next read of a file come from its disk.

    Raises:
        BenchError: its pages stay (a file system in memory, say).
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if is_cached(path):
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1")
    if is_cached(path):
        raise BenchError(f"{path} stays in the page cache: no start from a cold disk here")


def is_cached(path: Path) -> bool:
    """Whether a page in the middle of a file is in the page cache.

    Asked of the kernel by `mincore`: trying to read without waiting would start to read the file ahead.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = libc.mincore(address, ctypes.c_size_t(size), pages)
        del first, address
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return bool(pages[len(pages) // 2] & 1)
