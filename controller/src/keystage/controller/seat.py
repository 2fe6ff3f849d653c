"""One controller a world: the seat of the one that steers, where no cluster has leases.

Before it: `app` knows the world. After it: the loop, once the seat is taken. The seat is a lock of the kernel
on a file beside the supervisor's socket (or in the state folder, for a stock gateway): it is free the moment
its holder ends, however it ends, so the next one begins within `LOOK_S`. It belongs to one machine, as the
socket does; of two machines that steer one gateway nobody here can know.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from pathlib import Path

LOOK_S = 0.25
"""Between two looks at a taken seat: as often as is decided."""
log = logging.getLogger(__name__)


class Seat:
    """A seat that one process can have.

    Args:
        file: of the lock; it is made, and stays. Its folder may come later.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fd = -1
        self._said = ""

    @property
    def is_taken(self) -> bool:
        """Whether this process has it."""
        return self._fd >= 0

    def wait(self, stop: threading.Event) -> bool:
        """Waits for it.

        Returns:
            False: `stop` was set before.
        """
        while not stop.is_set():
            if self._take():
                return True
            stop.wait(LOOK_S)
        return False

    def leave(self) -> None:
        """Gives it back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self) -> bool:
        try:
            fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._say(f"cannot observe: {self._file} cannot be opened: {error.strerror}")
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            self._say(f"another controller steers here (process {holder}): this one stands by")
            return False
        except OSError as error:  # a full disk must not stop the steering: who holds it is for people
            log.warning("%s: %s", self._file, error.strerror)
        with contextlib.suppress(FileNotFoundError):
            # A file that was replaced while it was opened locks nothing.
            if self._file.stat().st_ino == os.fstat(fd).st_ino:
                self._fd = fd
                if self._said:
                    log.info("this controller steers now")
                return True
        os.close(fd)
        return False

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            log.warning("%s", text)
