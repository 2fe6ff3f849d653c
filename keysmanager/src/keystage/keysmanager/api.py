"""Messages of the KeysManager: to those who want replicas, to peers, and to its own fork server.

One daemon a node. Who wants a replica speaks to it over a UNIX socket of type SEQPACKET: one message, one
answer, descriptors beside it (`channel`). So do daemon, fork server and holders by socket pairs:

    supervisor --Fork+fds--> daemon --Spawn+fds--> fork server or holder ==fork==> replica
                                                                                   |
    daemon <--------------------- Progress over the claim, then end of file -------+

A *claim* is one end of a socket pair that every consumer of a segment holds: while it is open the
segment counts as mapped and its holder is not evicted. A replica on the CPU keeps it for life, one on
a GPU closes it when its device has the parameters. Nobody's life hangs on the daemon: replicas watch
the *lifeline* of their owner, and are handed to the owner (a child subreaper) when they are forked.

Peers and the controller speak HTTP over TCP with a bearer token (`peer_server`):
    GET /v1/status                              -> NodeStatus
    GET /v1/parameters/{identity}               bytes of the stage's file, Range honoured (404: not here)
    PUT /v1/key-stages        [StageName, ...]  ranked, replaces the last list
    POST /v1/invalidate       Invalidate
    PUT /v1/grants            [pod_api.Grant, ...]
    GET /metrics                                Prometheus text
"""

from __future__ import annotations

from typing import Literal

import msgspec

from keystage.keysmanager.pod_api import PackedForm

PROTOCOL = 1
MAX_MESSAGE_BYTES = 128 * 1024
"""A SEQPACKET message must fit the socket buffer as a whole."""

Phase = Literal["forked", "mapped", "listening", "forward", "ready"]
"""What a replica reports on its claim, in order; `forward`: its first forward pass is done."""

Via = Literal["standby", "holder", "fork-server"]
"""How a replica was started; `fork-server`: with no parameters, it reads the bundle itself."""

Source = Literal["gpu", "peer-gpu", "memory", "disk", "peer", "home"]
"""Where parameters came from, best first; `memory`: a segment of this node; `peer`: another node."""

HolderState = Literal["loading", "ready", "leaving", "failed"]
StandbyState = Literal["starting", "idle", "filling"]


class Message(msgspec.Struct, frozen=True, tag=True):
    """What can be told; the tag is the class name."""


class StageName(msgspec.Struct, frozen=True):
    """A stage by name: the bundle's home (`file://` or `http(s)://`) and the stage's index."""

    bundle: str
    stage: int


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that a daemon can fetch and check.

    Attributes:
        name: whose they are.
        pipeline: pipeline name, for people and labels.
        identity: SHA-256 (hex) over chunk hashes and type, see `bundle.hashing.identity`.
        dtype: element type of the file (`float32`, ...).
        file: file name within the bundle.
        nbytes: length of the file.
        chunks: SHA-256 (hex) per 16 MiB.
    """

    name: StageName
    pipeline: str
    identity: str
    dtype: str
    file: str
    nbytes: int
    chunks: tuple[str, ...]


# ------------------------------------------------------------------ to the daemon


class Fork(Message, frozen=True, kw_only=True):
    """Starts a replica. Descriptors beside it: lifeline (read end), output (write end), HTTP socket.

    The daemon reads bundle, stages, device and type from `env`; it loads what is missing first,
    so the answer may take as long as a load.

    Attributes:
        replica: its name.
        module: module whose `main(supply)` runs in the child (`keystage.worker.app`), or whose `main()`
            does where it takes no supply (`keystage.router.app`).
        env: its whole environment.
        wanted_at_s: `time.monotonic` (one clock for the machine) when it was wanted, for the timeline.
        sharing: `shared` one copy for all replicas of a stage on this node; `private` one of its own.
    """

    replica: str
    module: str
    env: dict[str, str]
    wanted_at_s: float
    sharing: Literal["shared", "private"] = "shared"


class Get(Message, frozen=True, kw_only=True):
    """Asks for a stage's parameters as a sealed memfd, or its `packed` form with this tag; a claim."""

    name: StageName
    packed: str = ""


class KeyStages(Message, frozen=True):
    """Stages to keep in host memory, most important first; replaces the last list."""

    stages: tuple[StageName, ...]


class Invalidate(Message, frozen=True):
    """A hash was changed or revoked: its holder ends, running replicas finish on what they have."""

    identity: str


class Evict(Message, frozen=True):
    """Ends a holder that nobody maps; refused while somebody does."""

    identity: str


class Standbys(Message, frozen=True, kw_only=True):
    """Keeps so many standby workers of a shape class. Beside it: the owner's lifeline (read end).

    Attributes:
        name: a stage of the class; every stage with equal layout, type and device can use them.
        env: environment as for `Fork`; replica name, sockets and stage may differ when it is used.
        count: how many idle ones there shall be, 0 ends them.
    """

    name: StageName
    env: dict[str, str]
    count: int


class StatusAsked(Message, frozen=True):
    """Asks for `NodeStatus`."""


# ------------------------------------------------------------------ answers


class Ok(Message, frozen=True):
    """Done."""


class Refused(Message, frozen=True):
    """Not done; the reason names the thing, the bound and the actual value.

    Attributes:
        reason: one line.
        status: HTTP status that fits (400 bad request, 404 unknown, 409 in use, 507 no memory, 502 source).
    """

    reason: str
    status: int = 400


class Forked(Message, frozen=True, kw_only=True):
    """A replica runs.

    Attributes:
        pid: its process id; it is a child of the nearest subreaper above the daemon.
        via: how it was started.
        source: where its parameters came from, empty: it loads them itself or needs none.
        note: why nothing better was possible (`no room for 5.0 GiB: ...`), empty where nothing was.
        load_s: seconds spent loading before the fork.
        fork_s: seconds from request to running child, without `load_s`.
    """

    pid: int
    via: Via
    source: Source | Literal[""] = ""
    note: str = ""
    load_s: float = 0.0
    fork_s: float = 0.0


class Segment(Message, frozen=True, kw_only=True):
    """A sealed memfd is beside it.

    Attributes:
        parameters: what it holds: the stage's file, byte for byte, unless it is `packed`.
        huge_bytes: size of its pages where larger than 4096, else 0.
        source: where it came from.
    """

    parameters: Parameters
    huge_bytes: int = 0
    source: Source = "memory"
    packed: PackedForm | None = None


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One holder, as `keystage cache` lists it.

    Attributes:
        rank: place in the key-stage list from 0, None: not listed.
        nbytes: bytes of host memory (raw and packed form together).
        source: where they came from.
        loaded_at_s: Unix seconds.
        used_at_s: Unix seconds of the last fork or `Get`.
        uses: forks and `Get`s.
        claims: consumers that map it now.
        pid: of the holder, 0: none.
        reason: why it failed.
    """

    pipeline: str
    stage: int
    identity: str
    state: HolderState
    rank: int | None
    nbytes: int
    source: Source
    load_s: float
    loaded_at_s: float
    used_at_s: float
    uses: int
    claims: int
    pid: int
    reason: str = ""


class StandbyEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One standby worker.

    Attributes:
        registered: identities whose segments it has mapped and pinned as a whole.
        note: why another one is not.
    """

    shape: str
    device: str
    state: StandbyState
    pid: int
    since_s: float
    registered: tuple[str, ...] = ()
    note: str = ""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as NVML tells it: bytes in all, bytes free, whether it is usable."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory as the budget sees it.

    Attributes:
        limit_bytes: effective limit (cgroup v2, v1, or host; or as configured).
        used_bytes: anonymous, shared and unevictable memory; page cache does not count.
        budget_bytes: what may be used (85 % of the limit).
        segment_bytes: what the daemon's segments take of it.
        origin: `cgroup2`, `cgroup1`, `host` or `configured`.
        huge_free_bytes: free pages of 2 MiB, budgeted apart.
    """

    limit_bytes: int
    used_bytes: int
    budget_bytes: int
    segment_bytes: int
    origin: str
    huge_free_bytes: int = 0


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """That a key stage was kept here: survives restarts, decides what is loaded first.

    Attributes:
        name: the stage.
        identity: of its parameters then.
        at_s: Unix seconds of its last use.
        uses: how often.
        is_valid: False once invalidated.
    """

    name: StageName
    identity: str
    at_s: float
    uses: int
    is_valid: bool = True


class NodeStatus(Message, frozen=True, kw_only=True):
    """What is where on this node."""

    node: str
    protocol: int
    started_at_s: float
    holders: tuple[CacheEntry, ...]
    standbys: tuple[StandbyEntry, ...]
    memory: Memory
    gpus: tuple[Gpu, ...]
    history: tuple[HistoryEntry, ...]
    gpu_reason: str = ""


# ------------------------------------------------------------------ daemon and fork server


class Hold(Message, frozen=True, kw_only=True):
    """daemon -> fork server: forks a holder. Beside it: its socket, the raw segment (memfd).

    Attributes:
        parameters: what the segment holds.
        pipeline: content of `pipeline.json`, as JSON.
        prepare: device types for which the holder makes ready: `cpu` builds the stage and keeps its
            packed form in a segment of its own, `cuda` nothing.
        dtype: type the stage is built in.
    """

    parameters: Parameters
    pipeline: bytes
    prepare: Literal["cpu", "none"]
    dtype: str


class Held(Message, frozen=True, kw_only=True):
    """holder -> daemon: ready to fork. `packed_bytes`: its own segment (beside it if `packed`), 0: none."""

    pid: int
    packed_bytes: int = 0
    packed: PackedForm | None = None


class Spawn(Message, frozen=True, kw_only=True):
    """daemon -> fork server, holder: forks a replica. Beside it: lifeline, output, HTTP socket, claim.

    `env`, `module`: as in `Fork`. `sharing`: as in `Fork`.
    """

    replica: str
    module: str
    env: dict[str, str]
    sharing: Literal["shared", "private"] = "shared"


class Spawned(Message, frozen=True):
    """fork server, holder -> daemon: the child runs."""

    pid: int


class Fill(Message, frozen=True, kw_only=True):
    """daemon -> standby: become this (see `Fork`). Beside it: segment, lifeline, output, HTTP, claim."""

    replica: str
    module: str
    env: dict[str, str]
    parameters: Parameters


class Register(Message, frozen=True):
    """daemon -> standby: map the segment beside it, pin its next part; told until `Registered` is all."""

    parameters: Parameters


class Registered(Message, frozen=True):
    """standby -> daemon: so many bytes from the file's start need no pinning any more."""

    identity: str
    nbytes: int


class Unregister(Message, frozen=True):
    """daemon -> standby: unpin and unmap this segment, then answer `Ok`: its memory is wanted."""

    identity: str


class Progress(Message, frozen=True):
    """replica -> daemon, over the claim: a phase was reached at `at_s` (`time.monotonic`)."""

    phase: Phase
    at_s: float
    note: str = ""


Request = Fork | Get | KeyStages | Invalidate | Evict | Standbys | StatusAsked
Answer = Ok | Refused | Forked | Segment | NodeStatus
ForkServerMessage = (
    Hold | Spawn | Held | Spawned | Refused | Fill | Progress | Register | Registered | Unregister
)
