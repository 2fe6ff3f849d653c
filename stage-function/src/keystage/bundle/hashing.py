"""Hashes of parameter files: SHA-256 per 16 MiB chunk, and the identity made from them.

Written by `bundle.split`, checked by `bundle.store.verify` and while a stage is loaded. Chunks
are hashed in threads (hashlib releases the interpreter lock), so ranges can be checked alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keystage.bundle.api import CHUNK_BYTES

_READ_BYTES = 1024 * 1024


def default_threads() -> int:
    """Threads that hash at once: the cores this process may use, four at most."""
    return min(4, len(os.sched_getaffinity(0)))


def file_chunks(path: Path, threads: int | None = None) -> list[str]:
    """Hashes a file.

    Args:
        path: the file.
        threads: threads to use, by default as many as cores (four at most).

    Returns:
        SHA-256 (hex) of each `CHUNK_BYTES` of the file, the last chunk may be shorter.
    """
    starts = range(0, path.stat().st_size, CHUNK_BYTES)
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        return list(pool.map(lambda start: _hash_range(path, start), starts))


def buffer_chunks(buffer: memoryview, threads: int | None = None) -> list[str]:
    """Hashes bytes in memory, as `file_chunks` hashes a file."""
    parts = [buffer[start : start + CHUNK_BYTES] for start in range(0, len(buffer), CHUNK_BYTES)]
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        return list(pool.map(lambda part: hashlib.sha256(part).hexdigest(), parts))


def identity(chunks: Sequence[str], dtype: str) -> str:
    """SHA-256 (hex) over the chunk hashes and the element type: names the parameters."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(bytes.fromhex(chunk))
    digest.update(dtype.encode())
    return digest.hexdigest()


def _hash_range(path: Path, start: int) -> str:
    digest = hashlib.sha256()
    left = CHUNK_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left > 0 and (block := file.read(min(left, _READ_BYTES))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()
