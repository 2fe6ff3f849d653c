"""Copies on this node's disk of parameters that came from elsewhere: bounded, least recently used out.

The loader writes here what came from a peer or a remote home, and reads here first the next time. Off
unless KEYSTAGE_KEYSMANAGER_CACHE_BYTES is set: a disk belongs to its operator, and where the home is a local
disk a second copy gains nothing. A copy is the stage's file under its identity; it appears complete
(renamed when written and synced) or not at all, and is checked chunk by chunk like any other source.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
from pathlib import Path

from keystage.keysmanager.api import Parameters

log = logging.getLogger(__name__)

_IDENTITY = re.compile(r"[0-9a-f]{64}")
_COPY_BYTES = 16 * 1024 * 1024


class DiskCache:
    """A folder of copies. Every method may block on the disk; all may be called from any thread."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Names the folder.

        Args:
            folder: made when the first copy is written.
            limit_bytes: bytes all copies may take together; 0: nothing is written.
        """
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()

    def find(self, identity: str) -> Path | None:
        """The copy of these parameters, which counts as used now; None: there is none."""
        if _IDENTITY.fullmatch(identity) is None:
            return None
        path = self._folder / identity
        try:
            os.utime(path)
        except OSError:
            return None
        return path

    def drop(self, identity: str) -> None:
        """Deletes the copy of these parameters (damaged, or revoked), if there is one."""
        if _IDENTITY.fullmatch(identity) is not None:
            with contextlib.suppress(FileNotFoundError):
                (self._folder / identity).unlink()
                log.warning("disk cache: dropped %s", identity[:12])

    def held_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(nbytes for _, nbytes, _ in self._copies())

    def store(self, parameters: Parameters, fd: int) -> bool:
        """Writes a copy from a checked segment.

        Args:
            parameters: what it holds.
            fd: the sealed segment; stays open.

        Returns:
            Whether a copy is there now. What does not fit, or a disk that refuses, is logged; a cache is
            never a reason to fail.
        """
        name, nbytes = f"{parameters.pipeline} stage {parameters.name.stage}", parameters.nbytes
        if _IDENTITY.fullmatch(parameters.identity) is None or nbytes > self._limit_bytes:
            log.info(
                "disk cache: %s (%d bytes) exceeds the limit of %d bytes", name, nbytes, self._limit_bytes
            )
            return False
        with self._lock:
            path = self._folder / parameters.identity
            if path.exists():
                return True
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._sweep()
                self._make_room(nbytes)
                free_bytes = shutil.disk_usage(self._folder).free
                if free_bytes < nbytes:
                    log.warning("disk cache: %s needs %d bytes, %d are free", name, nbytes, free_bytes)
                    return False
                self._write(path, fd, nbytes)
            except OSError as error:
                log.warning("disk cache: %s not kept: %s", name, error.strerror or error)
                return False
            return True

    def _write(self, path: Path, fd: int, nbytes: int) -> None:
        partial = self._folder / f".{path.name}.partial"
        try:
            with partial.open("wb", buffering=0) as file:
                position = 0
                while position < nbytes:
                    block = os.pread(fd, min(_COPY_BYTES, nbytes - position), position)
                    if not block:
                        raise OSError(f"segment ends at byte {position}, {nbytes} expected")
                    position += file.write(block)
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _make_room(self, nbytes: int) -> None:
        copies = sorted(self._copies())
        held_bytes = sum(size for _, size, _ in copies)
        for _, size, path in copies:
            if held_bytes + nbytes <= self._limit_bytes:
                return
            path.unlink(missing_ok=True)
            held_bytes -= size
            log.info("disk cache: %s made room (%d bytes)", path.name[:12], size)

    def _copies(self) -> list[tuple[int, int, Path]]:
        """(last use in nanoseconds, bytes, path) of every copy."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                if _IDENTITY.fullmatch(path.name) is not None:
                    with contextlib.suppress(FileNotFoundError):
                        facts = path.stat()
                        found.append((facts.st_mtime_ns, facts.st_size, path))
        return found

    def _sweep(self) -> None:
        """Removes what a daemon that was killed has left half written."""
        for rest in self._folder.glob(".*.partial"):
            rest.unlink(missing_ok=True)
