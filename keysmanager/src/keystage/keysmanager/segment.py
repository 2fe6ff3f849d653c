"""Memory that several processes read and nobody can write any more: sealed memfds.

The loader fills a `Draft` window by window, then seals it; the descriptor is passed to holders,
standbys and workers, which map it with `map_readonly`. Mappings are shared and read-only always: a
private mapping works too, but silently makes a second copy in anonymous memory as it is touched.

Mappings for readers are made without Python's `mmap` module, whose objects keep a descriptor of
their own: a forked child closes all descriptors it was not given, and such an object would later
close a stranger that got the number. A sealed segment's bytes are never checked here; `loader` did.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PAGE_BYTES = mmap.PAGESIZE
HUGE_BYTES = 2 * 1024 * 1024

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE: no new writable mapping and no write; Python's fcntl has no name for it."""
_THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_SEAL_NAMES = (
    (fcntl.F_SEAL_SEAL, "SEAL"),
    (fcntl.F_SEAL_SHRINK, "SHRINK"),
    (fcntl.F_SEAL_GROW, "GROW"),
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class SegmentError(Exception):
    """A segment that cannot be made, mapped or trusted; names sizes."""

    http_status = 507


class Draft:
    """A segment that is being filled; made by `create`. Windows may be used from several threads.

    Attributes:
        nbytes: bytes of content.
        huge_bytes: size of its pages where larger than 4096 (asked for, not proven, with transparent
            huge pages), else 0.
        is_hugetlb: its pages come from the pool of 2 MiB pages, which is budgeted apart.
    """

    def __init__(self, fd: int, nbytes: int, *, huge_bytes: int, is_hugetlb: bool) -> None:
        self._fd = fd
        self._open = 0
        self.nbytes = nbytes
        self.huge_bytes = huge_bytes
        self.is_hugetlb = is_hugetlb

    def fileno(self) -> int:
        """Descriptor, for writes that need no window; -1 once sealed or discarded."""
        return self._fd

    @contextlib.contextmanager
    def window(self, offset: int, length: int) -> Iterator[memoryview]:
        """Bytes [offset, offset + length), writable; unmapped at exit, so keep no slice of them.

        Raises:
            SegmentError: outside the segment, or no address space.
        """
        if offset < 0 or length < 1 or offset + length > self.nbytes:
            raise SegmentError(
                f"window of bytes {offset} to {offset + length}: the segment holds {self.nbytes}"
            )
        step = HUGE_BYTES if self.is_hugetlb else PAGE_BYTES
        start = offset // step * step
        span = offset + length - start
        span = -(-span // step) * step if self.is_hugetlb else span
        try:
            pages = mmap.mmap(self._fd, span, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
        except OSError as error:
            raise SegmentError(f"cannot map {span} bytes for writing: {error.strerror}") from error
        self._open += 1
        try:
            if self.huge_bytes and not self.is_hugetlb:
                with contextlib.suppress(OSError):  # advice only; small pages serve too
                    pages.madvise(mmap.MADV_HUGEPAGE)
            with memoryview(pages) as whole, whole[offset - start : offset - start + length] as part:
                yield part
        finally:
            pages.close()
            self._open -= 1

    def seal(self) -> int:
        """Makes content and size final; the descriptor belongs to the caller from now on.

        Raises:
            SegmentError: a window is open, or the kernel refuses.
        """
        if self._open or self._fd < 0:
            raise SegmentError(
                f"cannot seal: {self._open} windows are open" if self._open else "sealed before"
            )
        seal(self._fd)
        fd, self._fd = self._fd, -1
        return fd

    def discard(self) -> None:
        """Gives the memory back; does nothing once sealed or discarded."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def create(nbytes: int, name: str, *, huge: bool = True) -> Draft:
    """Makes an empty segment.

    Pages of 2 MiB where the pool has them, else transparent ones where shared memory may have them,
    else 4 KiB. Memory is taken as it is written, but the size is checked against what is free now:
    writing beyond it would end this process instead of raising.

    Args:
        nbytes: bytes of content.
        name: shown in /proc, for people.
        huge: whether huge pages are tried.

    Raises:
        SegmentError: the size is absurd or not free; names both.
    """
    if nbytes <= 0:
        raise SegmentError(f"segment {name}: {nbytes} bytes, at least 1 is expected")
    if huge and (draft := _huge_draft(nbytes, name)) is not None:
        return draft
    free = available_bytes()
    if nbytes > free:
        raise SegmentError(f"segment {name}: {nbytes} bytes wanted, {free} bytes of memory are free")
    try:
        fd = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise SegmentError(f"segment {name} of {nbytes} bytes: {error.strerror}") from error
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise SegmentError(f"segment {name} of {nbytes} bytes: {error.strerror}") from error
    return Draft(fd, nbytes, huge_bytes=HUGE_BYTES if huge and _has_thp() else 0, is_hugetlb=False)


def _huge_draft(nbytes: int, name: str) -> Draft | None:
    """A segment of hugetlb pages, all of them reserved; None where the pool has too few."""
    size = -(-nbytes // HUGE_BYTES) * HUGE_BYTES
    if size > free_huge_bytes():
        return None
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB
    try:
        fd = os.memfd_create(name[:200], flags)
    except OSError:
        return None
    try:
        os.ftruncate(fd, size)
        # A shared mapping reserves its pages, and the file keeps the reservation when it goes.
        mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()
        # A cgroup's limit is enforced where a page is first taken: here, not by a signal while loading.
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        return None
    return Draft(fd, nbytes, huge_bytes=HUGE_BYTES, is_hugetlb=True)


def seal(fd: int) -> None:
    """Seals a memfd against every change.

    Adds F_SEAL_WRITE, the stronger seal, where nobody maps it writable and where this kernel still
    maps such a file read-only (before Linux 6.7 it does not).

    Raises:
        SegmentError: the kernel refuses.
    """
    seals = _SIZE_SEALS | _FUTURE_WRITE
    if _write_seal_is_mappable():
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            if error.errno != errno.EBUSY:  # a writable mapping or a pinned page: the weaker seal serves
                raise SegmentError(f"cannot seal: {error.strerror}") from error
        else:
            return
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
    except OSError as error:
        raise SegmentError(f"cannot seal: {error.strerror}") from error


@functools.cache
def _write_seal_is_mappable() -> bool:
    fd = os.memfd_create("probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        mmap.mmap(fd, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ).close()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def check_sealed(fd: int) -> int:
    """Checks that nobody can change a segment any more; returns its size in bytes.

    Raises:
        SegmentError: no memfd, or a seal is missing; names it.
    """
    try:
        found = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise SegmentError(f"descriptor {fd} is no memfd: {error.strerror}") from error
    missing = [name for seal_bit, name in _SEAL_NAMES if not found & seal_bit]
    if not found & (fcntl.F_SEAL_WRITE | _FUTURE_WRITE):
        missing.append("WRITE")
    if missing:
        raise SegmentError(f"segment is not sealed: {', '.join(missing)} missing")
    return size


def reopened_readonly(fd: int) -> int:
    """A descriptor of the same segment through which nothing can be written or sealed."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def map_readonly(fd: int, nbytes: int) -> memoryview:
    """Maps the first bytes of a segment, shared and read-only.

    The mapping goes when the view and everything made from it (slices, tensors) are gone; `fd` may
    be closed before.

    Raises:
        SegmentError: the segment is smaller, or no address space.
    """
    size = os.fstat(fd).st_size
    if not 0 < nbytes <= size:
        raise SegmentError(f"cannot map {nbytes} bytes: the segment holds {size}")
    length = size  # of whole pages where they are huge, which unmapping asks for
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        raise SegmentError(f"cannot map {length} bytes: {os.strerror(ctypes.get_errno())}")
    _libc.madvise(address, length, mmap.MADV_HUGEPAGE)  # advice only; small pages serve too
    pages = _pages_at(address, nbytes)
    weakref.finalize(pages, _libc.munmap, address, length).atexit = False
    return memoryview(pages).cast("B").toreadonly()


class _Kept:
    """Mixed into ctypes arrays, so that they can be watched and can keep their origin alive."""

    origin: object


def _pages_at(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    kind: Any = type("Pages", (_Kept, ctypes.c_char * nbytes), {})
    pages: ctypes.Array[ctypes.c_char] = kind.from_address(address)
    return pages


def as_tensor(view: memoryview) -> torch.Tensor:
    """The bytes as a uint8 tensor in place, which keeps the mapping alive; must never be written.

    torch warns about buffers that are marked read-only, since it cannot mark tensors so.
    """
    import numpy as np
    import torch

    address = np.frombuffer(view, np.uint8).ctypes.data
    pages = _pages_at(address, len(view))
    pages.origin = view  # type: ignore[attr-defined]
    return torch.frombuffer(pages, dtype=torch.uint8)


def available_bytes() -> int:
    """Memory that can be taken without swapping (MemAvailable of the host)."""
    return _meminfo("MemAvailable")


def free_huge_bytes() -> int:
    """Free and unreserved pages of 2 MiB in the pool, in bytes."""
    if _meminfo("Hugepagesize") != HUGE_BYTES:
        return 0
    return max(0, _meminfo("HugePages_Free") - _meminfo("HugePages_Rsvd")) * HUGE_BYTES


def _meminfo(field: str) -> int:
    """A field of /proc/meminfo, in bytes where it has a unit; 0 where it is missing."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            number, _, unit = value.strip().partition(" ")
            return int(number) * (1024 if unit == "kB" else 1)
    return 0


def _has_thp() -> bool:
    """Whether shared memory may have transparent huge pages where they are advised."""
    try:
        text = _THP.read_text()
    except OSError:
        return False
    return any(f"[{choice}]" in text for choice in ("always", "within_size", "advise", "force"))
