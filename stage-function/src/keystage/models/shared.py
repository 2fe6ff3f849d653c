"""A stage's own parameters moved into memory that forked children share.

Used by the KeysManager's holder while a stage is built for the CPU: `models.llama_parameters` hands
over every large tensor it made (packed matrices, embedding, head). The whole pages of its memory are
written to one memfd, which is mapped over them, shared and read-only: the tensor stays as it is, at
its address, but is no anonymous memory any more, and children map the same pages.

Memory moved so must never go back to the allocator, which would write into it: moved tensors are
kept to the end of the process. This module must not know what the tensors mean.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from typing import TypeAlias

import torch

MIN_BYTES = 64 * 1024
"""Smaller tensors stay: children share them by copy-on-write as well, and nobody writes them."""

Keep: TypeAlias = Callable[[torch.Tensor], None]
"""Takes a tensor that a stage has made for itself and will hold for life."""

_WRITE_BYTES = 1024 * 1024 * 1024
_MAP_FIXED = 0x10
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

_kept: list[torch.Tensor] = []


class SharedMemoryError(Exception):
    """Memory that cannot be moved; names the size."""


class SharedMemory:
    """One memfd that tensors are moved into, until it is sealed.

    Args:
        name: shown in /proc, for people.
    """

    def __init__(self, name: str) -> None:
        self._fd = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # What is mapped through a descriptor for reading can never become writable, so it does not
        # stand against the write seal (before Linux 6.7 any other shared mapping does).
        self._reader = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._spans: list[tuple[int, int]] = []
        self.nbytes = 0

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
            return
        _kept.append(tensor)
        offset = self.nbytes
        try:
            _write(self._fd, offset, start, length)
        except OSError as error:
            raise SharedMemoryError(f"cannot share {length} bytes: {error.strerror}") from error
        _map_over(start, length, mmap.PROT_READ, mmap.MAP_SHARED, self._reader, offset)
        self._spans.append((start, length))
        self.nbytes += length

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


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and length in bytes."""
    if tensor.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)  # noqa: SLF001  # an operator
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.nbytes


def _write(fd: int, offset: int, start: int, length: int) -> None:
    """Copies memory to a file; written, not mapped: a mapping would forbid the write seal."""
    source = memoryview((ctypes.c_char * length).from_address(start)).cast("B")
    done = 0
    while done < length:
        done += os.pwrite(fd, source[done : done + _WRITE_BYTES], offset + done)


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


def can_share_packed() -> bool:
    """Whether this torch can tell where a packed matrix lies."""
    return hasattr(torch.ops.mkldnn, "data_ptr") and hasattr(torch.ops.mkldnn, "_nbytes")
