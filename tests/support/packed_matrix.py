"""A matrix packed into shared memory, in a process of its own: what else a test process frees would count."""

from __future__ import annotations

import mmap
import os

import torch
from support.keysmanager_forks import mappings, status_bytes

from keystage.models.linear import linear
from keystage.models.shared import SharedMemory

MIB = 1 << 20


def check() -> None:
    """Packs, computes, takes it back; counts anonymous memory at every step."""
    torch.manual_seed(3)
    weight, x = torch.randn(2048, 4096), torch.randn(3, 4096)
    expected = linear(weight, None)(x)
    before = status_bytes(os.getpid(), "RssAnon")
    memory = SharedMemory("matrix")
    multiply = linear(weight, None, keep=memory.move)
    memory.seal()
    assert 31 * MIB < memory.nbytes <= 32 * MIB + 2 * mmap.PAGESIZE
    assert status_bytes(os.getpid(), "RssAnon") - before < 4 * MIB
    assert torch.equal(multiply(x), expected)
    assert status_bytes(os.getpid(), "RssAnon") - before < 4 * MIB
    (entry,) = mappings(os.getpid(), "memfd:matrix")
    assert entry["line"].split()[1] == "r--s"
    memory.make_private()
    assert torch.equal(multiply(x), expected)
    assert list(mappings(os.getpid(), "memfd:matrix")) == []
    assert status_bytes(os.getpid(), "RssAnon") - before > 28 * MIB


if __name__ == "__main__":
    check()
