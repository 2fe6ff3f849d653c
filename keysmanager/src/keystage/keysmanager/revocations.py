"""Identities somebody revoked: a file of one a line, so that a restart does not hand them out again.

Written by `daemon` at an `Invalidate`, read at its start. To take a revocation back, delete the line
and start the daemon again. A bundle that was merely replaced revokes nothing.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

log = logging.getLogger("keystage.keysmanager")

LIMIT = 10_000
"""As many as the ledger remembers; the oldest lines are forgotten beyond."""
_IDENTITY = re.compile(r"[0-9a-f]{64}")


class Revocations:
    """The file.

    Args:
        path: of the file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[str, ...]:
        """All identities, the latest `LIMIT` of them, oldest first.

        Raises:
            OSError: there is a file that cannot be read: going on would hand out what was revoked.
        """
        try:
            lines = self._path.read_text(encoding="ascii", errors="replace").split()
        except FileNotFoundError:
            return ()
        known = dict.fromkeys(line for line in lines if _IDENTITY.fullmatch(line))
        return tuple(known)[-LIMIT:]

    def add(self, identity: str) -> None:
        """Writes one down before it is acted upon; a disk that refuses is logged."""
        if _IDENTITY.fullmatch(identity) is None or identity in self.read():
            return
        try:
            with self._path.open("a", encoding="ascii") as file:
                file.write(f"{identity}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            log.error("revocation of %s is forgotten at the next start: %s", identity[:12], error)
