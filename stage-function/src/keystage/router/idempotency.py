"""Requests with an `Idempotency-Key`: what is kept of them, and for how long. Pure; time comes in.

Before it: `router.idempotency_http` reads the headers. After it: `router.idempotency_runs` makes the
answers, `router.journal` keeps them beyond this process. A record is of one request: its fingerprint, what
was drawn for it (seed, name, time of birth), the tokens made so far or the finished bytes. A table of them
forgets the answered ones first asked for the longest ago when a bound is reached; it refuses nothing, and
never forgets one that runs.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

from keystage.router.engine import Failure, Refusal

RECORD_BYTES = 1024
"""What a record takes beside its tokens or bytes: names, fingerprint and the table's own entries."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeyBounds:
    """What is kept of requests with a key.

    Attributes:
        entries: records, running ones included.
        size_bytes: of records at rest.
        kept_s: after an answer was complete, or was last asked for.
        grace_s: that a running request goes on without a reader.
    """

    entries: int = 65_536
    size_bytes: int = 64 * 1024 * 1024
    kept_s: float = 600.0
    grace_s: float = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """What was drawn for a request once, so that its answer is the same whenever it is written.

    Attributes:
        seed: of the sampling.
        identifier: `id` of an OpenAI answer, empty where the dialect has none.
        created_s: its `created`, Unix seconds.
    """

    seed: int
    identifier: str
    created_s: int


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """A complete answer in bytes."""

    body: bytes
    content_type: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class JournalStats:
    """What a router's journal counts.

    Attributes:
        is_away: whether it cannot be asked at present.
        losses: times that it was lost.
        round_trips: that wrote tokens or endings.
        tokens: written in them.
        taken_over: requests of other routers that this one went on with.
        fenced: requests of this one that another router went on with.
    """

    is_away: bool = False
    losses: int = 0
    round_trips: int = 0
    tokens: int = 0
    taken_over: int = 0
    fenced: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class KeyStats:
    """What a router counts of requests with a key.

    Attributes:
        asked: by what was there: `new`, `running`, `kept`, `resumed`, or `reused` for another request.
        records: known now.
        nbytes: of those at rest.
        journal: None without one.
    """

    asked: dict[str, int]
    records: int
    nbytes: int
    journal: JournalStats | None


class Standing(enum.Enum):
    """Where a record stands.

    Attributes:
        RUNNING: its answer is being made, here or by another router.
        PAUSED: it ended without (the rest of) its answer, for a reason that may pass; asked again it goes on.
        ENDED: it has its answer, or failed for good.
    """

    RUNNING = "running"
    PAUSED = "paused"
    ENDED = "ended"


class Record:
    """One request with a key.

    Attributes:
        name: digest of tenant and key.
        fingerprint: digest of everything that decides the answer.
        stamp: see `Stamp`.
        deadline_unix_s: when its answer is too late, None where the request said nothing.
        tokens: made so far.
        released: how many of them readers may have; behind `tokens` while the journal is written.
        whole: the answer of what makes no tokens.
        refusal: why it has no (complete) answer.
        standing: see `Standing`.
        is_opened: whether it is known what was there of it before.
        is_found: whether it began before this process knew of it.
        journaled: tokens of it in the journal, None: it is not journaled.
        readers: clients that wait for it now.
        rest_s: since when it is at rest.
        idle_s: since when nobody reads it, None: somebody does.
    """

    __slots__ = (
        "_waiting", "deadline_unix_s", "fingerprint", "idle_s", "is_found", "is_opened", "journaled", "name",
        "readers", "refusal", "released", "rest_s", "stamp", "standing", "tokens", "whole",
    )  # fmt: skip

    def __init__(self, name: str, fingerprint: str, stamp: Stamp) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.stamp = stamp
        self.deadline_unix_s: float | None = None
        self.tokens = array("I")
        self.released = 0
        self.whole: Whole | None = None
        self.refusal: Refusal | None = None
        self.standing = Standing.RUNNING
        self.is_opened = False
        self.is_found = False
        self.journaled: int | None = None
        self.readers = 0
        self.rest_s = 0.0
        self.idle_s: float | None = None
        self._waiting: list[Callable[[], None]] = []

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return RECORD_BYTES + 4 * len(self.tokens) + (len(self.whole.body) if self.whole is not None else 0)

    def ahead_of(self, position: int) -> bool:
        """Whether there is news for a reader that has so many tokens: more of them, or the end."""
        return self.released > position or self.standing is not Standing.RUNNING

    def when_news(self, wake: Callable[[], None]) -> None:
        """Calls `wake`, once, when anything has changed."""
        self._waiting.append(wake)

    def tell(self) -> None:
        """Something has changed."""
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    def release(self, tokens: int) -> None:
        """Readers may have so many tokens."""
        if tokens > self.released:
            self.released = tokens
            self.tell()

    def rewind(self) -> None:
        """Takes back what was made and not released: somebody else makes it."""
        del self.tokens[self.released :]
        self.whole = None
        self.refusal = None

    def end(self, standing: Standing) -> None:
        """Nothing more comes of this run."""
        self.standing = standing
        self.released = len(self.tokens)
        self.tell()

    def resume(self) -> None:
        """A new run goes on where the last one ended."""
        self.standing = Standing.RUNNING
        self.refusal = None
        self.is_opened = False
        self.idle_s = None


class Table:
    """Records by name.

    Args:
        bounds: see `KeyBounds`.

    Attributes:
        nbytes: of the records at rest.
    """

    def __init__(self, bounds: KeyBounds) -> None:
        self.bounds = bounds
        self.nbytes = 0
        self._running: dict[str, Record] = {}
        self._resting: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running) + len(self._resting)

    @property
    def running(self) -> Iterable[Record]:
        """Those whose answer is being made."""
        return self._running.values()

    def find(self, name: str, now_s: float) -> Record | None:
        """The record of that name; one at rest counts as asked for now."""
        self.expire(now_s)
        record = self._running.get(name)
        if record is None and (record := self._resting.get(name)) is not None:
            record.rest_s = now_s
            self._resting.move_to_end(name)
        return record

    def run(self, record: Record) -> None:
        """A record begins to run, or runs again."""
        if self._resting.pop(record.name, None) is not None:
            self.nbytes -= record.nbytes
        self._running[record.name] = record
        self._trim()

    def rest(self, record: Record, now_s: float) -> None:
        """A record has ended or paused: it is kept for a while."""
        if self._running.pop(record.name, None) is None:
            return
        record.rest_s = now_s
        self._resting[record.name] = record
        self.nbytes += record.nbytes
        self._trim()

    def forget(self, record: Record) -> None:
        """A record is not kept; who reads it reads on."""
        if self._running.get(record.name) is record:
            del self._running[record.name]
        elif self._resting.get(record.name) is record:
            del self._resting[record.name]
            self.nbytes -= record.nbytes

    def expire(self, now_s: float) -> None:
        """Forgets what was at rest for long enough."""
        while self._resting:
            record = next(iter(self._resting.values()))
            if now_s - record.rest_s < self.bounds.kept_s:
                return
            self.forget(record)

    def _trim(self) -> None:
        while self._resting and (len(self) > self.bounds.entries or self.nbytes > self.bounds.size_bytes):
            self.forget(next(iter(self._resting.values())))


def is_kept(refusal: Refusal) -> bool:
    """Whether a refusal is the answer to a request, and so to all its repetitions.

    A failure of the pipeline on it is: a request that ends workers must not be tried again by a client that
    repeats it blindly. That it cannot be served as it is (4xx) shows again at once, and the key stays free
    for a corrected request; that there was no room or no time (429, 503, 504) may be otherwise soon.
    """
    return isinstance(refusal, Failure) and refusal.status == Failure.status


def is_resumable(refusal: Refusal) -> bool:
    """Whether the same request may go on later where it ended: there was no room or no time for it."""
    return refusal.status in (429, 503, 504)


def name_of(tenant: str, key: str) -> str:
    """Name of a record: keys of one tenant are nobody else's."""
    return _digest((tenant.encode(), key.encode()))


def fingerprint_of(parts: Iterable[bytes]) -> str:
    """Digest of what decides an answer."""
    return _digest(parts)


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(b"%d:" % len(part))
        found.update(part)
    return found.hexdigest()
