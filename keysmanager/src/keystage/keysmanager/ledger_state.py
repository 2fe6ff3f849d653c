"""The ledger's records: what is held, who waits, who maps what, which standbys there are.

Written by the `ledger_*` modules alone, each for its part; read by `ledger` for lists. Sums over the
records live here, so that bytes are counted in one place. No IO, no clock.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from keystage.keysmanager.api import Parameters, Source, StandbyState
from keystage.keysmanager.budget import HUGE_BYTES, PAGE_BYTES, Pool, rounded

Prepare = Literal["cpu", "none"]


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerSettings:
    """How the ledger decides.

    Attributes:
        prepare: for what holders of key stages are made ready ahead: `none` on a node with GPUs.
        loads_at_once: loads ahead of demand at one time; more would only share the disk's bandwidth.
        packed_ratio: packed form over file, reserved until the holder tells its true size; it exists
            beside the raw form while it is made. oneDNN pads little.
        load_backoff_s: rest before what failed is tried ahead of demand again; doubles with each failure.
        backoff_limit_s: longest such rest.
        pressure_rest_s: no loads ahead of demand for so long after memory was short, or they would
            take back what was just given.
        evict_rest_s: a key stage that was evicted on request is not loaded ahead again for so long.
        standby_refill_s: a used standby is replaced so much later: its start must not slow the
            first work of the replica it has become.
        standby_backoff_s: rest after a standby failed to start; doubles with each failure.
        revoked_limit: revoked identities remembered; the oldest are forgotten beyond.
    """

    prepare: Prepare = "cpu"
    loads_at_once: int = 2
    packed_ratio: float = 1.02
    load_backoff_s: float = 10.0
    backoff_limit_s: float = 300.0
    pressure_rest_s: float = 10.0
    evict_rest_s: float = 60.0
    standby_refill_s: float = 1.0
    standby_backoff_s: float = 5.0
    revoked_limit: int = 10_000


@dataclasses.dataclass(slots=True, eq=False)
class Held:
    """A full segment: it takes memory while the daemon (or the holder) owns it or anybody maps it.

    Attributes:
        identity: of its parameters.
        nbytes: whole pages.
        is_huge: it counts to the pool of huge pages.
        is_owned: it can be handed out; False: only its mappings keep it.
        users: requests that map it, or are being started from it.
    """

    identity: str
    nbytes: int
    is_huge: bool = False
    is_owned: bool = True
    users: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """What is known of one identity.

    Attributes:
        parameters: what it is.
        raw: the file's bytes, None: not here.
        packed: the holder's own form, None: it has none.
        is_loading: a `Load` is out.
        is_cancelled: and its `CancelLoad` too.
        holder: the process.
        prepare: for what the holder is made ready.
        is_leaving: an `EndHolder` is out.
        is_doomed: invalidated; what is here of it ends as soon as nobody starts from it.
        reserved_raw_bytes, is_huge_planned: room kept for the load in flight.
        reserved_packed_bytes: room kept for the holder's packed form.
        pid: of the holder, 0: none.
        failures, retry_at_s, reason: of loads and holders; loads ahead of demand wait for `retry_at_s`.
    """

    parameters: Parameters
    raw: Held | None = None
    packed: Held | None = None
    is_loading: bool = False
    is_cancelled: bool = False
    holder: Literal["none", "starting", "ready"] = "none"
    prepare: Prepare = "none"
    is_leaving: bool = False
    is_doomed: bool = False
    reserved_raw_bytes: int = 0
    is_huge_planned: bool = False
    reserved_packed_bytes: int = 0
    pid: int = 0
    source: Source = "memory"
    load_s: float = 0.0
    loaded_at_s: float = 0.0
    used_at_s: float = 0.0
    uses: int = 0
    failures: int = 0
    retry_at_s: float = 0.0
    reason: str = ""

    @property
    def identity(self) -> str:
        """SHA-256 of the parameters."""
        return self.parameters.identity

    @property
    def form(self) -> Held | None:
        """The segment that children of the holder map."""
        return self.packed if self.packed is not None else self.raw

    def is_present(self) -> bool:
        """Something of it is here that can be ended."""
        return self.raw is not None or self.packed is not None or self.holder != "none"


@dataclasses.dataclass(slots=True, eq=False)
class Asked:
    """A request from its question until its answer, and after it while its claim is open.

    Attributes:
        number: the asker's.
        kind: of question.
        parameters: the stage asked for; None: no stage or several, or an eviction.
        identity: of that stage.
        prepare, shape, is_private: as in `events.ForkAsked`.
        takes_packed: as in `events.GetAsked`.
        asked_at_s: when.
        has_waited: it was not served at once, so the load is part of its start.
        state: `waiting` for a holder; `starting`: a spawn or fill is out; `open`: its claim is.
        held: the segment it maps, None: none.
        standby: the one that becomes it.
        is_bare: started from the fork server, with nothing mapped.
        is_gone: nobody listens any longer, or its claim closed before its start was told.
        failures, reason: starts that came to nothing.
    """

    number: int
    kind: Literal["fork", "get", "evict"]
    parameters: Parameters | None
    identity: str
    asked_at_s: float
    prepare: Prepare = "none"
    shape: str = ""
    is_private: bool = False
    takes_packed: bool = False
    has_waited: bool = False
    state: Literal["waiting", "starting", "open"] = "waiting"
    held: Held | None = None
    standby: int | None = None
    is_bare: bool = False
    is_gone: bool = False
    is_released: bool = False
    failures: int = 0
    reason: str = ""


@dataclasses.dataclass(slots=True, eq=False)
class Idle:
    """A standby worker; `is_ending`: an `EndStandby` is out."""

    number: int
    shape: str
    state: StandbyState
    since_s: float
    pid: int = 0
    is_ending: bool = False


@dataclasses.dataclass(slots=True)
class Shape:
    """A shape class: how many idle standbys it shall have, and when the next may be started."""

    count: int
    start_at_s: float = 0.0
    failures: int = 0


@dataclasses.dataclass(slots=True)
class State:
    """Everything the ledger knows. `ranks` maps a key stage to its place in the list."""

    settings: LedgerSettings
    entries: dict[str, Entry] = dataclasses.field(default_factory=dict)
    asked: dict[int, Asked] = dataclasses.field(default_factory=dict)
    held: list[Held] = dataclasses.field(default_factory=list)
    ranks: dict[str, int] = dataclasses.field(default_factory=dict)
    listed: dict[str, Parameters] = dataclasses.field(default_factory=dict)
    revoked: dict[str, None] = dataclasses.field(default_factory=dict)
    standbys: dict[int, Idle] = dataclasses.field(default_factory=dict)
    shapes: dict[str, Shape] = dataclasses.field(default_factory=dict)
    next_standby: int = 1
    memory: Pool = dataclasses.field(default_factory=Pool)
    huge: Pool = dataclasses.field(default_factory=Pool)
    ahead_from_s: float = 0.0

    def entry(self, parameters: Parameters) -> Entry:
        """The entry of these parameters, made if there is none; their home is where they were seen last."""
        entry = self.entries.setdefault(parameters.identity, Entry(parameters))
        if not entry.is_loading:
            entry.parameters = parameters
        return entry

    def waiting(self, identity: str) -> list[Asked]:
        """Requests that wait for this identity, first come first."""
        return [a for a in self.asked.values() if a.state == "waiting" and a.identity == identity]

    def is_starting(self, identity: str) -> bool:
        """Whether a child is being started from its segments."""
        return any(a.state == "starting" and a.held and a.identity == identity for a in self.asked.values())

    def held_bytes(self, is_huge: bool) -> int:
        """Bytes of full segments in one pool, mapped ones that nobody owns included."""
        return sum(held.nbytes for held in self.held if held.is_huge == is_huge)

    def reserved_bytes(self, is_huge: bool) -> int:
        """Bytes kept for loads and packed forms in flight in one pool."""
        raw = sum(e.reserved_raw_bytes for e in self.entries.values() if e.is_huge_planned == is_huge)
        return raw if is_huge else raw + sum(e.reserved_packed_bytes for e in self.entries.values())

    def free_bytes(self, is_huge: bool) -> int:
        """Bytes that may still be reserved in one pool; those being given back are not free yet."""
        pool = self.huge if is_huge else self.memory
        return pool.free_bytes(self.held_bytes(is_huge) + self.reserved_bytes(is_huge))

    def hold(self, identity: str, nbytes: int, is_huge: bool) -> Held:
        """Notes a full segment."""
        held = Held(identity, rounded(nbytes, HUGE_BYTES if is_huge else PAGE_BYTES), is_huge)
        self.held.append(held)
        return held

    def disown(self, held: Held | None) -> None:
        """Its owner has closed it: it is forgotten once nobody maps it."""
        if held is not None:
            held.is_owned = False
            self._forget(held)

    def unmap(self, asked: Asked) -> None:
        """A request maps nothing any longer."""
        if asked.held is not None:
            asked.held.users.discard(asked.number)
            self._forget(asked.held)
            asked.held = None

    def _forget(self, held: Held) -> None:
        if not held.is_owned and not held.users and held in self.held:
            self.held.remove(held)
