"""What a source of parameters is to the loader, and how a load is called off.

`source_disk`, `source_peer` and `source_home` implement `ParameterSource`; `loader_lanes` reads from
them, several lanes at a time, one `Reader` a lane. A reader moves bytes and checks lengths; whether
the bytes are the right ones is for the lanes to say (hashes), never for a source.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from keystage.keysmanager.api import Source

LANES = max(4, min(8, len(os.sched_getaffinity(0))))
"""Readers of one source at once. Each hashes what it reads at about 1.6 GB/s, so as many as cores; four
at least, as waiting for disk or network takes no core (measured on 2 cores: 1 lane 0.6 GB/s from disk,
2 lanes 0.9, 4 lanes 1.2, 8 lanes 1.2); eight at most, as replicas that serve meanwhile need the rest."""


class SourceError(Exception):
    """A source did not give what was asked of it: one line, the source is named by who reports it."""


class NotThere(SourceError):
    """A source is fine but has no such file."""


class Busy(SourceError):
    """A source is fine and asks to be asked again after `after_s` seconds."""

    def __init__(self, reason: str, after_s: float) -> None:
        super().__init__(reason)
        self.after_s = after_s


class LoadError(Exception):
    """Parameters could not be had; names what was tried and why each failed."""

    http_status = 502


class LoadCancelled(LoadError):
    """Nobody wants the parameters any longer."""

    http_status = 409


class Reader(Protocol):
    """One lane's way to a source. Used by one thread, but for `abort`."""

    def start(self, offset: int, length: int) -> None:
        """Begins a range; `fill` then gives its bytes in order.

        Args:
            offset: first byte within the stage's file.
            length: bytes of the range.

        Raises:
            SourceError: the source has no such range, or answers with another.
        """

    def fill(self, view: memoryview) -> None:
        """Fills `view` with the next bytes of the range.

        Args:
            view: writable, page-aligned, at most what is left of the range.

        Raises:
            SourceError: truncated, silent for too long, unreadable.
        """

    def abort(self) -> None:
        """Makes a blocked `fill` end soon, from any thread; does nothing where it cannot block."""

    def close(self) -> None:
        """Gives back connection or descriptor."""


class ParameterSource(Protocol):
    """One place that may have the file of one stage.

    Attributes:
        kind: what it counts as in status and history.
        name: names it in errors and logs (`disk /path`, `peer http://host:port`).
        lanes: readers that work on it at once.
    """

    @property
    def kind(self) -> Source:
        """What it counts as."""

    @property
    def name(self) -> str:
        """Names it for people."""

    @property
    def lanes(self) -> int:
        """Readers at once."""

    def open(self) -> Reader:
        """Makes a reader.

        Raises:
            SourceError: missing, of another length, unreachable.
        """

    def facts(self) -> str:
        """What explains its speed (type of file system), for the log; may be empty."""

    def damaged(self) -> None:
        """Bytes from it failed their hash: a copy that is ours to delete is deleted."""


class Stop:
    """Calls off a load: a flag, and what must be told so that no thread stays blocked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._aborts: dict[int, Callable[[], None]] = {}
        self._number = 0
        self._is_set = False

    @property
    def is_set(self) -> bool:
        """Whether the load is called off."""
        return self._is_set

    def set(self) -> None:
        """Calls the load off; what is registered is told once."""
        with self._lock:
            self._is_set = True
            aborts = list(self._aborts.values())
        for abort in aborts:
            abort()

    def check(self) -> None:
        """Raises `LoadCancelled` if the load is called off."""
        if self._is_set:
            raise LoadCancelled("cancelled")

    @contextmanager
    def guard(self, abort: Callable[[], None]) -> Iterator[None]:
        """Calls `abort` if the load is called off within the block (or was before it).

        `abort` may still run shortly after the block: it must be harmless then.
        """
        with self._lock:
            self._number += 1
            number = self._number
            self._aborts[number] = abort
            late = self._is_set
        try:
            if late:
                abort()
            yield
        finally:
            with self._lock:
                del self._aborts[number]
