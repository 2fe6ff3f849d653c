"""A mapped segment's pages in this process: how large they are, and that they leave its page table.

Below `segment_copy`. The segment itself keeps its pages, whatever is done here.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def drop_pages(source: torch.Tensor) -> None:
    """Takes a segment's pages out of this process's page table; the segment keeps them."""
    address = source.data_ptr()
    length = source.numel() // mmap.PAGESIZE * mmap.PAGESIZE
    if length:
        _libc.madvise(address, length, mmap.MADV_DONTNEED)


def has_huge_pages(source: torch.Tensor) -> bool:
    """Whether most of a mapping lies in pages of 2 MiB, as far as the kernel tells for what is touched."""
    source[0].item()
    address = source.data_ptr()
    huge = resident = 0
    with contextlib.suppress(OSError), open("/proc/self/smaps") as lines:  # noqa: PTH123
        inside = False
        for line in lines:
            first = line.split(" ", 1)[0]
            if "-" in first and not first.endswith(":"):
                if inside:
                    break
                low, _, high = first.partition("-")
                inside = int(low, 16) <= address < int(high, 16)
            elif inside and first in ("ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"):
                huge += int(line.split()[1])
            elif inside and first == "Rss:":
                resident = int(line.split()[1])
    return huge > 0 and 2 * huge >= resident
