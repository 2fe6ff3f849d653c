"""Parameters from a file: the node's disk cache, or the bundle's folder.

Order of reading, per range: what the page cache holds is copied from there (asking for it does not
wait for the disk), the rest comes by direct reads, which neither fill the page cache with gigabytes
that are held in memory anyway nor pay for a second copy; where the file system refuses direct reads, or
is another machine's, by buffered sequential ones. Never by mapping the file: on network file systems that
reads page by page.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from keystage.keysmanager.api import Source
from keystage.keysmanager.loader_mounts import file_system
from keystage.keysmanager.loader_source import LANES, SourceError

NETWORK_LANES = 2
"""Two long sequential reads: more make a file server seek."""

BLOCK_BYTES = 4096
"""Direct reads are aligned to this in file and memory: no disk in use has larger logical blocks."""

_NOT_CACHED = frozenset({errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


class FileReader:
    """Reads ranges of an open file; positional, so that no lane disturbs another."""

    def __init__(self, buffered: int, direct: int | None) -> None:
        """Keeps descriptors, which it closes.

        Args:
            buffered: the file.
            direct: the same file opened for direct reads, None: none.
        """
        self._buffered = buffered
        self._direct = direct
        self._offset = 0
        self._is_cached = True

    def start(self, offset: int, length: int) -> None:
        """Begins a range; its first bytes are looked for in the page cache."""
        del length
        self._offset = offset
        self._is_cached = self._direct is not None

    def fill(self, view: memoryview) -> None:
        """Reads the next bytes of the range into `view`."""
        position = 0
        while position < len(view):
            with view[position:] as rest:
                got = self._read(rest, self._offset)
            if got == 0:
                raise SourceError(f"truncated while it was read: nothing at byte {self._offset}")
            position += got
            self._offset += got

    def _read(self, view: memoryview, offset: int) -> int:
        try:
            if self._is_cached and (got := self._from_cache(view, offset)) > 0:
                return got
            self._is_cached = False
            if self._direct is not None and offset % BLOCK_BYTES == 0 and len(view) >= BLOCK_BYTES:
                with view[: len(view) // BLOCK_BYTES * BLOCK_BYTES] as whole:
                    got = self._directly(self._direct, whole, offset)
                if got > 0:
                    return got
            return os.preadv(self._buffered, [view], offset)
        except OSError as error:
            raise SourceError(f"cannot be read at byte {offset}: {error.strerror or error}") from error

    def _from_cache(self, view: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._buffered, [view], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in _NOT_CACHED:
                return 0
            raise

    def _directly(self, direct: int, view: memoryview, offset: int) -> int:
        try:
            return os.preadv(direct, [view], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = None  # opened, but refused at reading: buffered from here on
            os.close(direct)
            os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return 0

    def abort(self) -> None:
        """A read of a local file ends by itself."""

    def close(self) -> None:
        """Closes the descriptors."""
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)


class DiskSource:
    """The file of one stage on this machine, or on a network file system mounted here."""

    def __init__(
        self,
        path: Path,
        nbytes: int,
        *,
        is_remote: bool = False,
        damaged: Callable[[], None] | None = None,
    ) -> None:
        """Names the file; nothing is opened.

        Args:
            path: of the file.
            nbytes: its length as the bundle has it.
            is_remote: it is another machine's disk: counts as home, read buffered.
            damaged: called when its bytes fail their hash (a cache deletes its copy).
        """
        self._path = path
        self._nbytes = nbytes
        self._is_remote = is_remote
        self._damaged = damaged
        self.kind: Source = "home" if is_remote else "disk"
        self.name = f"{self.kind} {path}"
        self.lanes = NETWORK_LANES if is_remote else LANES

    def descriptor(self) -> int:
        """Opens the file; the descriptor is the caller's to close.

        Raises:
            SourceError: missing, no regular file, of another length.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceError(error.strerror or str(error)) from error
        try:
            self._check(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open(self) -> FileReader:
        """Opens the file for one lane."""
        buffered = self.descriptor()
        try:
            direct = None if self._is_remote else self._open_direct(buffered)
            if direct is None:
                with contextlib.suppress(OSError):
                    os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            os.close(buffered)
            raise
        return FileReader(buffered, direct)

    def _check(self, fd: int) -> None:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise SourceError("not a regular file")
        if found.st_size != self._nbytes:
            word = "truncated" if found.st_size < self._nbytes else "too long"
            raise SourceError(f"{word}: {self._nbytes} bytes expected, {found.st_size} found")

    def _open_direct(self, fd: int) -> int | None:
        # By descriptor, not by path: the file may have been replaced meanwhile.
        with contextlib.suppress(OSError):
            # Asking the page cache must not start reading ahead what direct reads will bring.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        return None

    def facts(self) -> str:
        """Type of the file system."""
        return file_system(self._path) or "unknown file system"

    def damaged(self) -> None:
        """Tells the owner of a damaged copy."""
        if self._damaged is not None:
            self._damaged()
