"""The secrets that are valid now, as the key file says: it may change under running processes.

Before it: `secret` reads the file. After it: `link` derives keys, `bearer` tokens. Who uses them asks anew
each time, or has itself woken (`watch`). A file that is none keeps what was there, and is named in the log.

The file is looked at once a second, by its name: a secret that is mounted into a container is replaced by
another link, which no watch on the file itself would notice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

from keystage.wire.errors import WireError
from keystage.wire.secret import Secret, read_secrets

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the file; a look is one system call."""


class Keyring:
    """Secrets of a deployment. May be used by any thread.

    Args:
        path: the key file.

    Attributes:
        version: another number after each change.

    Raises:
        WireError: the file is none.
    """

    def __init__(self, path: Path) -> None:
        self.version = 0
        self._path = path
        self._lock = threading.Lock()
        self._seen = _stamp(path)
        self._secrets = read_secrets(path)
        self._looked_s = time.monotonic()
        self._watchers: set[int] = set()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def __repr__(self) -> str:
        return f"Keyring({str(self._path)!r})"

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """The one that is used first, then others that are accepted; at most `LOOK_S` old."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self.look(now_s)
        return self._secrets

    def look(self, now_s: float | None = None) -> None:
        """Reads the file if it is another one than before."""
        with self._lock:
            self._looked_s = time.monotonic() if now_s is None else now_s
            stamp = _stamp(self._path)
            if stamp == self._seen:
                return
            try:
                found = read_secrets(self._path)
            except WireError as error:
                log.error("%s; the secrets read before stay", error)
                self._seen = stamp
                return
            self._seen = stamp
            if found == self._secrets:
                return
            for fd in self._watchers:  # first: who sees the new version has its wake-up to take back
                os.eventfd_write(fd, 1)
            self._secrets = found
            self.version += 1
            accepted = ", ".join(secret.fingerprint for secret in found)
            log.info("uses the secret %s from now on, accepts %s", found[0].fingerprint, accepted)

    def watch(self) -> int:
        """A descriptor that becomes readable when the secrets have changed; to be given to `unwatch`."""
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with self._lock:
            self._watchers.add(fd)
            if self._thread is None:
                self._end.clear()
                self._thread = threading.Thread(target=self._run, name="keyring", daemon=True)
                self._thread.start()
        return fd

    def unwatch(self, fd: int) -> None:
        """Ends a watch and closes its descriptor."""
        with self._lock:
            self._watchers.discard(fd)
            os.close(fd)
            thread = self._thread
            if self._watchers or thread is None:
                return
            self._thread = None
            self._end.set()
        thread.join()

    def _run(self) -> None:
        while not self._end.wait(LOOK_S):
            self.look()


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes with the file's content, also where it is replaced as a whole."""
    with contextlib.suppress(OSError):
        facts = path.stat()
        return facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size
    return ()
