"""Which key stages were kept on this node, across restarts of daemon and controller.

`daemon` remembers what the ledger says (`events.Remember`) and, after a restart, loads what was last
used and is still valid before anybody asks. One JSON file, replaced as a whole: a reader sees the old
or the new one. A file that cannot be read is set aside, never overwritten: history is a hint, and its
loss costs one slow start.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from keystage.keysmanager.api import HistoryEntry, StageName
from keystage.wire.unreadable import UNREADABLE

log = logging.getLogger(__name__)

LIMIT = 1000
"""Entries kept; the longest unused go first."""

_Key = tuple[str, int, str]


class History:
    """Entries by stage and identity.

    Args:
        path: the file; its folder is made when it is first written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[_Key, HistoryEntry] = {}
        self.is_changed = False

    def load(self) -> None:
        """Reads the file; a missing one is empty, a corrupt one is set aside as `<name>.corrupt`."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("history %s cannot be read, starting empty: %s", self.path, error.strerror)
            return
        try:
            entries = msgspec.json.decode(content, type=list[HistoryEntry])
        except UNREADABLE as error:
            aside = self.path.with_name(self.path.name + ".corrupt")
            log.warning("history %s is corrupt and was set aside as %s: %s", self.path, aside, error)
            with contextlib.suppress(OSError):  # on a read-only disk it stays where it is
                self.path.replace(aside)
            return
        self._entries = {_key(entry.name, entry.identity): entry for entry in entries}
        self._bound()

    def remember(self, name: StageName, identity: str, at_s: float, *, is_valid: bool = True) -> None:
        """A stage was used, or its parameters are not valid any longer.

        Args:
            name: the stage.
            identity: of its parameters now.
            at_s: Unix seconds.
            is_valid: False once invalidated; that is not a use.
        """
        key = _key(name, identity)
        before = self._entries.get(key)
        uses = before.uses if before is not None else 0
        used_at_s = at_s if is_valid or before is None else before.at_s
        self._entries[key] = HistoryEntry(
            name=name, identity=identity, at_s=used_at_s, uses=uses + is_valid, is_valid=is_valid
        )
        self.is_changed = True
        self._bound()

    def invalidate(self, identity: str) -> None:
        """Marks every stage with these parameters, also where the ledger does not know them."""
        for key, entry in self._entries.items():
            if entry.identity == identity and entry.is_valid:
                self._entries[key] = msgspec.structs.replace(entry, is_valid=False)
                self.is_changed = True

    def entries(self) -> tuple[HistoryEntry, ...]:
        """All entries, the last used first."""
        return tuple(sorted(self._entries.values(), key=lambda e: (-e.at_s, e.identity, e.name.bundle)))

    def names(self) -> tuple[StageName, ...]:
        """Stages to load first after a restart: valid ones, the last used first, each once."""
        return tuple(dict.fromkeys(entry.name for entry in self.entries() if entry.is_valid))

    def save(self) -> None:
        """Writes the file if anything has changed; a full disk is a warning, the next call tries again."""
        if not self.is_changed:
            return
        self.is_changed = False  # what is remembered while this is written is for the next call
        draft = self.path.with_name(self.path.name + ".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                file.write(msgspec.json.encode(list(self.entries())))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
        except OSError as error:
            log.warning("history %s cannot be written: %s", self.path, error.strerror)
            with contextlib.suppress(OSError):
                draft.unlink()
            self.is_changed = True

    def _bound(self) -> None:
        if len(self._entries) > LIMIT:
            kept = self.entries()[:LIMIT]
            self._entries = {_key(entry.name, entry.identity): entry for entry in kept}


def _key(name: StageName, identity: str) -> _Key:
    return name.bundle, name.stage, identity
