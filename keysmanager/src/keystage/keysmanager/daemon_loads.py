"""Raw segments: loads under way, and the descriptors of what was loaded.

Below `daemon`; `loader` does the work in threads. Every load ends in one outcome, `Loaded` or
`LoadFailed`, also when it is cancelled. This module must not decide what stays.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Protocol

from keystage.keysmanager.api import Parameters
from keystage.keysmanager.events import Event, Loaded, LoadFailed
from keystage.keysmanager.loader import LoadedSegment
from keystage.keysmanager.loader_source import LoadError

log = logging.getLogger("keystage.keysmanager")


class Fetches(Protocol):
    """What is needed of `loader.Loader`."""

    async def load(self, parameters: Parameters, *, cancelled: asyncio.Event | None = None) -> LoadedSegment:
        """Loads into a sealed segment; raises LoadError."""


@dataclasses.dataclass(frozen=True, slots=True)
class Raw:
    """A loaded segment: the daemon's own descriptor, and whose parameters it holds."""

    fd: int
    huge_bytes: int
    parameters: Parameters
    note: str


class Loads:
    """All raw segments of this daemon.

    Args:
        loader: does the work.
        tell: takes the outcomes.
    """

    def __init__(self, loader: Fetches, tell: Callable[[Event], None]) -> None:
        self._loader = loader
        self._tell = tell
        self._raw: dict[str, Raw] = {}
        self._cancels: dict[str, asyncio.Event] = {}

    def raw(self, identity: str) -> Raw | None:
        """The raw segment of these parameters, None: not here."""
        return self._raw.get(identity)

    async def load(self, parameters: Parameters) -> None:
        """Loads; tells `Loaded` or `LoadFailed`."""
        identity = parameters.identity
        cancelled = self._cancels[identity] = asyncio.Event()
        try:
            loaded = await self._loader.load(parameters, cancelled=cancelled)
        except LoadError as error:
            self._tell(LoadFailed(identity, str(error)))
            return
        except Exception as error:  # a source must never end the daemon, nor leave an asker waiting
            log.exception("loading %s", parameters.file)
            self._tell(LoadFailed(identity, f"{type(error).__name__}: {error}"))
            return
        finally:
            del self._cancels[identity]
        self.drop(identity)
        self._raw[identity] = Raw(loaded.fd, loaded.huge_bytes, parameters, loaded.note)
        self._tell(Loaded(identity, loaded.source, loaded.nbytes, loaded.load_s, loaded.huge_bytes))

    def cancel(self, identity: str) -> None:
        """Calls a load off; one that is done already stays done."""
        if identity in self._cancels:
            self._cancels[identity].set()

    def drop(self, identity: str) -> None:
        """Closes a raw segment; who mapped it keeps it."""
        raw = self._raw.pop(identity, None)
        if raw is not None:
            os.close(raw.fd)

    def close(self) -> None:
        """Cancels loads, closes all segments."""
        for cancelled in self._cancels.values():
            cancelled.set()
        for identity in list(self._raw):
            self.drop(identity)
