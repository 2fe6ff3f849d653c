"""What the ledger is told and what it answers: the daemon's life as data.

`ledger.Ledger.handle(event, now_s)` takes one event and returns instructions; `daemon` carries them
out and tells the outcome as further events. No IO, no clock. Every asynchronous instruction ends in
exactly one outcome event, also when it fails, so the ledger can never wait for ever on one.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from keystage.keysmanager.api import Parameters, Phase, Source, StageName, Via

# ------------------------------------------------------------------ events


@dataclasses.dataclass(frozen=True, slots=True)
class ForkAsked:
    """A replica is wanted.

    Attributes:
        request: number by which the answer finds its asker; unique while open.
        parameters: what it needs; empty for a router or an emulated stage. More than one: a worker of
            several stages, started from the fork server, which gets their segments by `Get`.
        prepare: see `api.Hold`.
        shape: shape class for a standby; empty: none can serve it.
        is_private: it wants a copy of its own: never from a prepared holder's shared form.
    """

    request: int
    parameters: tuple[Parameters, ...]
    prepare: Literal["cpu", "none"]
    shape: str = ""
    is_private: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class GetAsked:
    """A raw segment is wanted; `takes_packed`: the holder's packed form serves as well."""

    request: int
    parameters: Parameters
    takes_packed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class AskerGone:
    """Who asked has closed its connection before the answer."""

    request: int


@dataclasses.dataclass(frozen=True, slots=True)
class KeyStagesSet:
    """The ranked list, resolved; those that could not be resolved are left out by the daemon."""

    parameters: tuple[Parameters, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Invalidated:
    """What is held of this identity must not be handed out any longer; those who wait are refused.

    Attributes:
        identity: of the parameters.
        is_revoked: True: never again, later requests are refused too. False: the bundle was replaced
            where it lay; should a name stand for it again, it is loaded (and checked) anew.
    """

    identity: str
    is_revoked: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class EvictAsked:
    """Somebody wants a holder ended."""

    request: int
    identity: str


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """`Load` succeeded: a sealed segment exists, checked chunk by chunk."""

    identity: str
    source: Source
    nbytes: int
    load_s: float
    huge_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class LoadFailed:
    """`Load` failed with every source."""

    identity: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class HolderReady:
    """`StartHolder` succeeded; `packed_bytes` more are in use."""

    identity: str
    pid: int
    packed_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class HolderGone:
    """The holder ended, asked to or not; or `StartHolder` failed.

    After an `EndHolder` nothing is left of it: its segments are closed. Without one (it died, or could
    not start) its packed form is lost and the raw segment, unless dropped, is still the daemon's.
    """

    identity: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Spawned:
    """`Spawn` or `FillStandby` succeeded for a request: its claim is open."""

    request: int
    pid: int


@dataclasses.dataclass(frozen=True, slots=True)
class SpawnFailed:
    """`Spawn` or `FillStandby` failed."""

    request: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Progressed:
    """A replica reports a phase on its claim."""

    request: int
    phase: Phase


@dataclasses.dataclass(frozen=True, slots=True)
class Released:
    """A claim was closed: unmapped, or dead."""

    request: int


@dataclasses.dataclass(frozen=True, slots=True)
class StandbysWanted:
    """So many idle standbys of a shape class are wanted."""

    shape: str
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class StandbyReady:
    """A standby is idle now."""

    standby: int
    pid: int


@dataclasses.dataclass(frozen=True, slots=True)
class StandbyGone:
    """A standby ended, or could not start."""

    standby: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class MemorySeen:
    """What the host says: bytes in use by everybody, the segments included, and the budget."""

    used_bytes: int
    budget_bytes: int
    huge_free_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


Event = (
    ForkAsked
    | GetAsked
    | AskerGone
    | KeyStagesSet
    | Invalidated
    | EvictAsked
    | Loaded
    | LoadFailed
    | HolderReady
    | HolderGone
    | Spawned
    | SpawnFailed
    | Progressed
    | Released
    | StandbysWanted
    | StandbyReady
    | StandbyGone
    | MemorySeen
    | Ticked
)

# ------------------------------------------------------------------ instructions


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Fetch and check parameters into a segment; room for them is reserved. Outcome: Loaded, LoadFailed.

    Attributes:
        parameters: what.
        is_huge: pages of 2 MiB are reserved for it (tell `segment.create(huge=...)`); where they are
            short after all it takes ordinary pages, and `Loaded.huge_bytes` is 0.
    """

    parameters: Parameters
    is_huge: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class StartHolder:
    """Fork a holder on a loaded segment. Outcome: HolderReady or HolderGone."""

    parameters: Parameters
    prepare: Literal["cpu", "none"]


@dataclasses.dataclass(frozen=True, slots=True)
class EndHolder:
    """End the holder if there is one, close and forget its segments. Outcome: HolderGone.

    It is also how a raw segment without a holder (loaded for a `Get`) is given up.
    """

    identity: str


@dataclasses.dataclass(frozen=True, slots=True)
class DropRaw:
    """Close the daemon's raw segment: the holder lives on its packed form. No outcome, never fails.

    Follows every `HolderReady` with a packed form, and the last release of a raw segment that was
    loaded again beside one. Whoever mapped the raw form keeps it.
    """

    identity: str


@dataclasses.dataclass(frozen=True, slots=True)
class CancelLoad:
    """Nobody wants it any longer. Outcome: LoadFailed (or Loaded, if it was done already)."""

    identity: str


@dataclasses.dataclass(frozen=True, slots=True)
class Spawn:
    """Fork the replica of a request. Outcome: Spawned or SpawnFailed.

    Attributes:
        request: whose.
        identity: holder to fork from; None: the fork server.
        via, source, note, load_s: go into the answer.
    """

    request: int
    identity: str | None
    via: Via
    source: Source | Literal[""]
    note: str
    load_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class FillStandby:
    """Make a standby the replica of a request. Outcome: Spawned or SpawnFailed; the standby is gone then."""

    request: int
    standby: int
    identity: str
    source: Source
    load_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class GiveSegment:
    """Answer a `Get`; its connection is a claim from now on (ends with `Released`)."""

    request: int
    identity: str
    source: Source
    is_packed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class StartStandby:
    """Start a standby. Outcome: StandbyReady or StandbyGone."""

    standby: int
    shape: str


@dataclasses.dataclass(frozen=True, slots=True)
class EndStandby:
    """End an idle standby. Outcome: StandbyGone."""

    standby: int


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a request with a refusal."""

    request: int
    reason: str
    status: int


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """Answer a request with `Ok`."""

    request: int


@dataclasses.dataclass(frozen=True, slots=True)
class Remember:
    """Write the history entry of a stage (used, or invalid now)."""

    name: StageName
    identity: str
    is_valid: bool


Instruction = (
    Load
    | StartHolder
    | EndHolder
    | DropRaw
    | CancelLoad
    | Spawn
    | FillStandby
    | GiveSegment
    | StartStandby
    | EndStandby
    | Refuse
    | Done
    | Remember
)
