"""The messages that routers and workers exchange: one typed struct per kind.

Every message is sent *per wave or batch, never per token*; session messages carry
`(session, epoch, position)` so that a receiver can drop what is stale and a sender may
repeat itself safely. Bodies are msgpack arrays (`array_like`), tagged by kind.

Flow of a looping pipeline: `Hello`, `Ready`, `Credit` -> `Route`, `Start` -> `Step` around
the ring of workers -> `Tokens` to the router per wave -> `Release`.
Flow of a single-pass pipeline: `Work` -> `Parked` -> `Fetch` -> ... -> `Results`.
Flow of a stream program: `Run` -> `Ran` for each turn of a request at a module -> `Evict`.

This module must not import a transport: `wire.mailbox` moves the bytes, `wire.ring` the tensors.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from keystage.wire.handing import Hand as Hand
from keystage.wire.handing import Handed as Handed
from keystage.wire.handing import KvState as KvState
from keystage.wire.heartbeat import Heartbeat as Heartbeat
from keystage.wire.program import Evict as Evict
from keystage.wire.program import Fault as Fault
from keystage.wire.program import Ran as Ran
from keystage.wire.program import Run as Run
from keystage.wire.program import StreamMessage as StreamMessage
from keystage.wire.shapes import UNBOUNDED as UNBOUNDED
from keystage.wire.shapes import Message as Message
from keystage.wire.shapes import SessionSpec as SessionSpec
from keystage.wire.shapes import StepRows as StepRows
from keystage.wire.shapes import TensorRef as TensorRef
from keystage.wire.single_pass import Fetch as Fetch
from keystage.wire.single_pass import Parked as Parked
from keystage.wire.single_pass import Results as Results
from keystage.wire.single_pass import Work as Work
from keystage.wire.versions import VERSIONS as VERSIONS
from keystage.wire.versions import WIRE_VERSION as WIRE_VERSION

# ---------------------------------------------------------------- worker -> router


class Hello(Message, frozen=True, array_like=True, tag=True):
    """A worker introduces itself; repeated whenever a router asks with `Introduce`.

    Attributes:
        wire: lowest wire version that the worker speaks.
        pipeline: pipeline name.
        stages: stage indices hosted here, ascending.
        replica: unique name of this worker process.
        bundle: identity of the parameters (digest), `emulated` for none.
        device: `cpu`, `cuda:0`, `emulated`.
        slots: sessions (looping) or items in flight (single-pass) it can hold.
        kv_tokens: token positions its KV state can hold; 0 for single-pass.
        max_batch: rows of the largest batch or wave it takes.
        address: its name, by which others reach it (`wire.address`).
        pid: process id, meaningful on `node`.
        node: host identity (boot id); equal identities share memory and process ids.
        looping: whether the pipeline loops.
        first: `Introduce.first` that it heard last from this router, 0 for none. A `Hello` that was meant
            for an earlier incarnation, whose sessions the worker may hold, is known by it.
        call: `Introduce.call` that it heard last, 0 for none, -1 when messages were
            lost: all that the router knows of this worker is void then.
        newest: highest wire version that it speaks, 0: `wire` alone.
    """

    wire: int
    pipeline: str
    stages: tuple[int, ...]
    replica: str
    bundle: str
    device: str
    slots: int
    kv_tokens: int
    max_batch: int
    address: str
    pid: int
    node: str
    looping: bool
    first: int = 0
    call: int = 0
    newest: int = 0


class Ready(Message, frozen=True, array_like=True, tag=True):
    """Weights are resident and a warm-up ran: the worker may be given work."""

    replica: str


class Credit(Message, frozen=True, array_like=True, tag=True):
    """How much this router may hold at this worker *at once* (absolute, idempotent).

    Attributes:
        replica: the worker.
        slots: sessions or items the router may hold here.
        kv_tokens: KV token positions it may count on here: the owner of a path preempts if they run out.
    """

    replica: str
    slots: int
    kv_tokens: int


class Tokens(Message, frozen=True, array_like=True, tag=True):
    """New tokens of one wave, from the worker of the last stage.

    Attributes:
        replica: the worker.
        path: path identifier.
        sessions: sessions with a new token.
        epochs: epoch of each.
        positions: index of the token within the session (prompt tokens count from 0).
        tokens: token ids.
        times: `Step.times` of the wave, None where nobody asked for them.
    """

    replica: str
    path: int
    sessions: list[int]
    epochs: list[int]
    positions: list[int]
    tokens: list[int]
    times: list[float] | None = None


class Failed(Message, frozen=True, array_like=True, tag=True):
    """Sessions that cannot go on at this worker.

    Attributes:
        replica: the worker.
        sessions: who.
        epochs: epoch of each.
        reason: names the thing, the bound and the actual value.
        retryable: whether another worker, or a later time, may succeed.
    """

    replica: str
    sessions: list[int]
    epochs: list[int]
    reason: str
    retryable: bool


class Draining(Message, frozen=True, array_like=True, tag=True):
    """The worker got SIGTERM or `Drain`: bind nothing more here and move what runs."""

    replica: str


class Bye(Message, frozen=True, array_like=True, tag=True):
    """The worker exits: it holds nothing any more, or it must.

    Attributes:
        replica: the worker.
        reason: why it must, with all that it holds; empty: it was drained.
    """

    replica: str
    reason: str = ""


# ---------------------------------------------------------------- router -> worker


class Introduce(Message, frozen=True, array_like=True, tag=True):
    """The router does not know the sender (it restarted, or gave the sender up): say `Hello` again.

    Whatever the worker holds for this router is void: the router has forgotten or moved it.

    Attributes:
        wire: lowest wire version that the router speaks.
        first: base of this incarnation's session numbers; rows of sessions below it, still on their
            way from workers that have not heard of the restart, are void too.
        call: how often this router has given the worker up; a `Hello` of before is not taken.
        newest: highest wire version that it speaks, 0: `wire` alone.
    """

    wire: int
    first: int = 0
    call: int = 0
    newest: int = 0


class Route(Message, frozen=True, array_like=True, tag=True):
    """A path: one worker per stage. Sent to its owner (the worker of stage 0) before first use.

    Attributes:
        path: identifier, never reused by this router.
        replicas: worker name per stage.
        addresses: inbox endpoint per stage.
        waves: waves that may be in flight on the path at once.
        kv_blocks: KV blocks of the worker on it that has fewest.
    """

    path: int
    replicas: list[str]
    addresses: list[str]
    waves: int
    kv_blocks: int = UNBOUNDED


class Unroute(Message, frozen=True, array_like=True, tag=True):
    """Paths that are gone and workers that died: drop waves, free their ring slots.

    A death is told to every living worker: slots and mappings may be left of paths long gone.

    Attributes:
        paths: path identifiers to forget.
        dead: addresses of dead workers.
    """

    paths: list[int]
    dead: list[str]


class Start(Message, frozen=True, array_like=True, tag=True):
    """New sessions for the owner of their path."""

    specs: list[SessionSpec]


class Move(Message, frozen=True, array_like=True, tag=True):
    """Sessions that go on under a higher epoch (new path, new owner, or both).

    By token replay, or from `SessionSpec.kept` positions on with the KV state that the workers have.
    """

    specs: list[SessionSpec]


class Cancel(Message, frozen=True, array_like=True, tag=True):
    """The client went away or a stop string matched: end these sessions and free their state."""

    sessions: list[int]
    epochs: list[int]


class Release(Message, frozen=True, array_like=True, tag=True):
    """Sessions that ended or left this worker: free state of epochs up to the one given."""

    sessions: list[int]
    epochs: list[int]


class Drain(Message, frozen=True, array_like=True, tag=True):
    """Finish what is held, take nothing new, then say `Bye`.

    Attributes:
        deadline_s: seconds after which the worker exits whatever it holds.
    """

    deadline_s: float


# ---------------------------------------------------------------- worker -> worker


class Step(Message, frozen=True, array_like=True, tag=True):
    """One wave on its way around the ring. An empty wave still travels: it returns a credit.

    Attributes:
        path: path identifier.
        wave: number within the path.
        stage: first stage the receiver is to run; 0 means the wave is back at its owner.
        router: identity of the router that owns the path.
        replicas: worker per stage.
        addresses: inbox endpoint per stage.
        sender: inbox endpoint of the sender, for the `Ack`.
        rows: who steps.
        tokens: for a returned wave the sampled token of each row (-1: none), else empty.
        ref: the activation, shape [sum(counts), hidden]; None when there is none.
        drops: sessions whose KV blocks are freed before the wave runs: finished, cancelled, preempted.
        drop_epochs: epoch of each.
        starved: sessions for which a stage had no KV blocks: their rows are left out from there on.
        free_blocks: least free KV blocks over the stages passed so far.
        room_blocks: the same less what older sessions of other paths wait for.
        claim: oldest session of the path that waits for room, -1 for none.
        claim_blocks: KV blocks it waits for.
        times: of a wave with a session that is traced: per stage passed, seconds from its arrival at the
            worker to the start of compute, and of compute. None: nobody asks.
    """

    path: int
    wave: int
    stage: int
    router: str
    replicas: list[str]
    addresses: list[str]
    sender: str
    rows: StepRows
    tokens: list[int]
    ref: TensorRef | None
    drops: list[int] = msgspec.field(default_factory=list)
    drop_epochs: list[int] = msgspec.field(default_factory=list)
    starved: list[int] = msgspec.field(default_factory=list)
    free_blocks: int = UNBOUNDED
    room_blocks: int = UNBOUNDED
    claim: int = -1
    claim_blocks: int = 0
    times: list[float] | None = None


class Ack(Message, frozen=True, array_like=True, tag=True):
    """The receiver has taken these tensors: the ring slots are free again.

    The router sends it in the place of a receiver that died, or when nobody wants a parked output.

    Attributes:
        slots: of the ring, and below 0 of device memory.
        mapped: whether the receiver can read the producer's device memory, which was offered: 1 yes, -1 no,
            0 nothing is said.
    """

    slots: list[int]
    mapped: int = 0


FromWorker: TypeAlias = (
    Hello | Ready | Credit | Parked | Results | Ran | Tokens | Failed | Handed | Heartbeat | Draining | Bye
)
ToWorker: TypeAlias = (
    Introduce
    | Route
    | Unroute
    | Start
    | Move
    | Work
    | Fetch
    | Run
    | Evict
    | Cancel
    | Release
    | Drain
    | Hand
    | KvState
    | Step
    | Ack
)

_encoder = msgspec.msgpack.Encoder()
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


def encode(message: Message) -> bytes:
    """Packs a message into msgpack bytes."""
    return _encoder.encode(message)


def decode_from_worker(body: bytes | memoryview) -> FromWorker:
    """Unpacks what a router receives.

    Raises:
        msgspec.DecodeError: the bytes are no known message.
    """
    try:
        return _from_worker.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def decode_to_worker(body: bytes | memoryview) -> ToWorker:
    """Unpacks what a worker receives.

    Raises:
        msgspec.DecodeError: the bytes are no known message.
    """
    try:
        return _to_worker.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
