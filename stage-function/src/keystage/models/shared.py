"""A stage's own parameters moved into memory that forked children share.

Used by the KeysManager's holder while a stage is built for the CPU: `models.named_tensors` hands
over every large tensor it made (packed matrices, embedding, head). The whole pages of its memory are
written to one memfd, which is mapped over them, shared and read-only: the tensor stays as it is, at
its address, but is no anonymous memory any more, and children map the same pages. The file holds each tensor
as a whole, so that a process which is no child can use it too (`Ready`).

Memory moved so must never go back to the allocator, which would write into it: moved tensors outlive even
the end of the interpreter, which clears modules. This module must not know what the tensors mean.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

import torch

MIN_BYTES = 64 * 1024
"""Smaller tensors stay: children share them by copy-on-write as well, and nobody writes them."""

Keep: TypeAlias = Callable[[torch.Tensor], None]
"""Takes a tensor that a stage has made for itself and will hold for life."""


@runtime_checkable
class Ready(Protocol):
    """A `Keep` whose tensors were made before: a stage that is given one makes none of them itself."""

    def __call__(self, tensor: torch.Tensor) -> None:
        """See `Keep`; never needed."""

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """The next tensor, in the order in which a stage hands them to `Keep`.

        Raises:
            BundleError: it has another shape, or there is none.
        """


_WRITE_BYTES = 1024 * 1024 * 1024
_MAP_FIXED = 0x10
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


class SharedMemoryError(Exception):
    """Memory that cannot be moved; names the size."""


class SharedMemory:
    """One memfd that tensors are moved into, until it is sealed.

    Args:
        name: shown in /proc, for people.

    Attributes:
        nbytes: bytes of the file that hold tensors, in whole pages.
        moved: every tensor that was handed over, in order, and where the file holds it; -1: it was small.
    """

    def __init__(self, name: str) -> None:
        self._fd = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # What is mapped through a descriptor for reading can never become writable, so it does not
        # stand against the write seal (before Linux 6.7 any other shared mapping does).
        self._reader = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._spans: list[tuple[int, int]] = []
        self.nbytes = 0
        self.moved: list[tuple[torch.Tensor, int]] = []

    def move(self, tensor: torch.Tensor) -> None:
        """Moves a contiguous or packed CPU tensor; small ones stay.

        Raises:
            SharedMemoryError: no memory; the tensor is as before.
        """
        assert self._fd >= 0, "sealed"
        address, nbytes = _memory_of(tensor)
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length < MIN_BYTES:
            self.moved.append((tensor, -1))
            return
        # As far from a page's border as in memory: the whole pages can then be mapped over.
        offset = self.nbytes + address % mmap.PAGESIZE
        self.write(bytes_of(tensor), offset)
        inner = offset + start - address
        _map_over(start, length, mmap.PROT_READ, mmap.MAP_SHARED, self._reader, inner)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))  # nobody ever gives it back, see the module
        self._spans.append((start, length))
        self.moved.append((tensor, offset))
        self.nbytes = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Writes to the file; it is not mapped for that, which would forbid the write seal.

        Args:
            data: what.
            offset: where, in bytes from the file's start; `nbytes` stays as it is.

        Raises:
            SharedMemoryError: no memory.
        """
        view = memoryview(data).cast("B")
        nbytes = len(view)
        try:
            while view:
                done = os.pwrite(self._fd, view[:_WRITE_BYTES], offset)
                view, offset = view[done:], offset + done
        except OSError as error:
            raise SharedMemoryError(f"cannot share {nbytes} bytes: {error.strerror}") from error

    def reader(self) -> int:
        """A descriptor of the file through which nothing can be written; the caller's."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def seal(self) -> None:
        """Makes size and content final; what is mapped stays, the descriptors go."""
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
        os.close(self._fd)
        os.close(self._reader)
        self._fd = -1

    def make_private(self) -> None:
        """Gives this process a copy of its own at the same addresses; others keep the shared one.

        Raises:
            SharedMemoryError: no memory.
        """
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        for start, length in self._spans:
            copy = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
            if copy is None or copy == _FAILED:
                raise SharedMemoryError(f"no memory for {length} bytes: {os.strerror(ctypes.get_errno())}")
            ctypes.memmove(copy, start, length)
            moved = _libc.mremap(copy, length, length, _MREMAP_MAYMOVE | _MREMAP_FIXED, start)
            if moved != start:
                raise SharedMemoryError(f"cannot remap {length} bytes: {os.strerror(ctypes.get_errno())}")
        self._spans.clear()

    def leave(self) -> None:
        """Unmaps the memory here, for a process that will not use the tensors: touching one ends it."""
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        for start, length in self._spans:
            _map_over(start, length, 0, kind, -1, 0)
        self._spans.clear()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous or packed CPU tensor's memory, while it lives."""
    address, nbytes = _memory_of(tensor)
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and length in bytes."""
    if tensor.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)  # noqa: SLF001  # an operator
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.nbytes


def _map_over(start: int, length: int, protection: int, kind: int, fd: int, offset: int) -> None:
    """Replaces whole pages of this process by another mapping."""
    found = _libc.mmap(start, length, protection, kind | _MAP_FIXED, fd, offset)
    if found != start:
        raise SharedMemoryError(f"cannot map {length} bytes: {os.strerror(ctypes.get_errno())}")


def trim_heap() -> None:
    """Returns free memory of the C allocator to the system, where the allocator can."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
