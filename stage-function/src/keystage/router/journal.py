"""The journal of keyed requests: what outlives this router of them. The port.

Between `router.idempotency_runs`, which makes answers, and whatever keeps them. One router at a time owns a
request; a journal says who, and takes nothing from who owns it no longer (it is *fenced*).
`router.journal_redis` implements it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

from keystage.router.idempotency import JournalStats, Record


class Opened(enum.Enum):
    """What a journal had of a request.

    Attributes:
        OURS: this router owns it now; the record has what a former owner made.
        HELD: another router makes its answer; the record has what that one has told so far.
        ENDED: the record has its answer.
        AWAY: the journal cannot be asked: this request is kept in memory alone.
    """

    OURS = "ours"
    HELD = "held"
    ENDED = "ended"
    AWAY = "away"


class Journal(Protocol):
    """Keeps records beyond this process. Nothing here raises because the keeper is slow or away."""

    @property
    def is_away(self) -> bool:
        """Whether the keeper cannot be asked at present."""

    @property
    def stats(self) -> JournalStats:
        """What it counts; `fenced` is counted elsewhere."""

    def start(self, on_fenced: Callable[[Record], None]) -> None:
        """Begins to work; `on_fenced` is told of records that another router owns now."""

    async def stop(self) -> None:
        """Writes what waits, within a bound, and ends."""

    async def open(self, record: Record) -> Opened:
        """Asks for a request and takes it if nobody living has it; fills the record with what is known of it.

        Raises:
            KeyReused: the key is another request's.
        """

    def write(self, record: Record) -> None:
        """Its new tokens are kept soon, together with those of others, and only then released to readers."""

    async def close(self, record: Record) -> bool:
        """It has its answer, or failed for good; kept before this returns.

        Returns:
            False: another router owns it, nothing was kept.
        """

    async def leave(self, record: Record) -> None:
        """It stops where it is: whoever is asked for it next may go on."""

    async def forget(self, record: Record) -> None:
        """Nothing of it is to be kept."""
