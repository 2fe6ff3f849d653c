"""Whether there is room, and who goes to make some: arithmetic on bytes, nothing else.

`ledger_rooms` asks before every load and whenever memory was looked at. Two pools, never mixed: the
host's memory, where the budget is 85 % of the effective limit, and free pages of 2 MiB.

What others use is known only when `memory` looks, and a load in flight is at that moment anywhere
between empty and full. So a look gives an interval, and the last estimate is moved into it:

    used - held - reserved  <=  others  <=  used - held

With nothing in flight the interval is a point. No IO, no clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

HUGE_BYTES = 2 * 1024 * 1024
PAGE_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """One kind of memory.

    Attributes:
        budget_bytes: what everybody together may use.
        others_bytes: what is used by others than our segments.
    """

    budget_bytes: int = 0
    others_bytes: int = 0

    def free_bytes(self, taken_bytes: int) -> int:
        """Bytes left when our segments and reservations take `taken_bytes`; negative: too much is used."""
        return self.budget_bytes - self.others_bytes - taken_bytes


def seen(pool: Pool, used_bytes: int, budget_bytes: int, held_bytes: int, reserved_bytes: int) -> Pool:
    """The host's pool after a look.

    Args:
        pool: as it was.
        used_bytes: by everybody, our segments included.
        budget_bytes: of everybody.
        held_bytes: our full segments.
        reserved_bytes: our loads in flight, which are partly written.
    """
    high = max(0, used_bytes - held_bytes)
    low = max(0, used_bytes - held_bytes - reserved_bytes)
    return Pool(budget_bytes, min(max(pool.others_bytes, low), high))


def seen_huge(pool: Pool, free_bytes: int, held_bytes: int, reserved_bytes: int) -> Pool:
    """The pool of huge pages after a look: `free_bytes` are free, besides what we hold."""
    low = free_bytes + held_bytes
    high = free_bytes + held_bytes + reserved_bytes
    return Pool(min(max(pool.budget_bytes, low), high), 0)


def rounded(nbytes: int, page_bytes: int) -> int:
    """Whole pages, in bytes."""
    return -(-nbytes // page_bytes) * page_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A holder that may be ended.

    Attributes:
        identity: of its parameters.
        nbytes: what ending it gives back.
        rank: place in the key-stage list, None: not listed.
        used_at_s: when it was last used.
    """

    identity: str
    nbytes: int
    rank: int | None
    used_at_s: float


def order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Who goes first: unlisted ones, least recently used first; then listed ones, lowest rank first."""
    return sorted(
        candidates, key=lambda c: (c.rank is not None, -c.rank if c.rank is not None else 0, c.used_at_s)
    )


def victims(candidates: Iterable[Candidate], short_bytes: int) -> list[Candidate] | None:
    """The shortest run of `order` that gives `short_bytes` back; None: all of them would not.

    A later, larger one is never taken in place of an earlier one, so the order holds strictly.
    """
    chosen: list[Candidate] = []
    for candidate in order(candidates):
        if short_bytes <= 0:
            break
        chosen.append(candidate)
        short_bytes -= candidate.nbytes
    return chosen if short_bytes <= 0 else None


def text(nbytes: int) -> str:
    """Bytes for people: `5.0 GiB`, `16.0 MiB`."""
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.1f} GiB"
    return f"{nbytes / (1 << 20):.1f} MiB"
