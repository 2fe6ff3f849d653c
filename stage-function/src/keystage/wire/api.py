"""The messages that routers and workers exchange: one typed struct per kind.

Every message is sent *per wave or batch, never per token*; session messages carry
`(session, epoch, position)` so that a receiver can drop what is stale and a sender may
repeat itself safely. Bodies are msgpack arrays (`array_like`), tagged by kind.

Flow of a looping pipeline: `Hello`, `Ready`, `Credit` -> `Route`, `Start` -> `Step` around
the ring of workers -> `Tokens` to the router per wave -> `Release`.
Flow of a single-pass pipeline: `Work` -> `Parked` -> `Fetch` -> ... -> `Results`.

This module must not import a transport: `wire.mailbox` moves the bytes, `wire.ring` the tensors.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from keystage.wire.shapes import SessionSpec as SessionSpec
from keystage.wire.shapes import StepRows as StepRows
from keystage.wire.shapes import TensorRef as TensorRef

WIRE_VERSION = 1
"""Raised when a field changes its meaning; `Hello` and `Introduce` carry it."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of every message; the tag is the class name."""


# ---------------------------------------------------------------- worker -> router


class Hello(Message, frozen=True, array_like=True, tag=True):
    """A worker introduces itself; repeated whenever a router asks with `Introduce`.

    Attributes:
        wire: wire version the worker speaks.
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


class Ready(Message, frozen=True, array_like=True, tag=True):
    """Weights are resident and a warm-up ran: the worker may be given work."""

    replica: str


class Credit(Message, frozen=True, array_like=True, tag=True):
    """How much this router may hold at this worker *at once* (absolute, idempotent).

    Attributes:
        replica: the worker.
        slots: sessions or items the router may hold here.
        kv_tokens: KV token positions it may reserve here.
    """

    replica: str
    slots: int
    kv_tokens: int


class Parked(Message, frozen=True, array_like=True, tag=True):
    """Outputs of a single-pass stage wait at their producer for a late-bound successor.

    Attributes:
        replica: the producer.
        stage: stage that produced them.
        sessions: items.
        epochs: epoch of each item.
        refs: where each output lies (one ring slot each).
        started_s: seconds between receipt of the batch and start of compute.
        compute_s: seconds of compute for the whole batch.
    """

    replica: str
    stage: int
    sessions: list[int]
    epochs: list[int]
    refs: list[TensorRef]
    started_s: float
    compute_s: float


class Results(Message, frozen=True, array_like=True, tag=True):
    """Outputs of the last stage of a single-pass pipeline, bytes inline.

    Attributes are those of `Parked`; `payloads` holds the raw bytes of each output and
    `dtype`/`shapes` describe them.
    """

    replica: str
    stage: int
    sessions: list[int]
    epochs: list[int]
    dtype: str
    shapes: list[tuple[int, ...]]
    payloads: list[bytes]
    started_s: float
    compute_s: float


class Tokens(Message, frozen=True, array_like=True, tag=True):
    """New tokens of one wave, from the worker of the last stage.

    Attributes:
        replica: the worker.
        path: path identifier.
        sessions: sessions with a new token.
        epochs: epoch of each.
        positions: index of the token within the session (prompt tokens count from 0).
        tokens: token ids.
    """

    replica: str
    path: int
    sessions: list[int]
    epochs: list[int]
    positions: list[int]
    tokens: list[int]


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


class Heartbeat(Message, frozen=True, array_like=True, tag=True):
    """The engine loop is alive; sent every second, dead after five without.

    Attributes:
        replica: the worker.
        state: worker state name.
        held_slots: sessions or items it holds.
        held_kv_tokens: reserved KV positions.
        busy_s: cumulative seconds of compute, per hosted stage.
        batches: cumulative batches or waves, per hosted stage.
        rows: cumulative rows (sessions stepped or items), per hosted stage.
    """

    replica: str
    state: str
    held_slots: int
    held_kv_tokens: int
    busy_s: list[float]
    batches: list[int]
    rows: list[int]


class Draining(Message, frozen=True, array_like=True, tag=True):
    """The worker got SIGTERM or `Drain`: bind nothing more here and move what runs."""

    replica: str


class Bye(Message, frozen=True, array_like=True, tag=True):
    """The worker holds nothing any more and exits."""

    replica: str


# ---------------------------------------------------------------- router -> worker


class Introduce(Message, frozen=True, array_like=True, tag=True):
    """The router does not know the sender (it restarted, or gave the sender up): say `Hello` again.

    Whatever the worker holds for this router is void: the router has forgotten or moved it.

    Attributes:
        wire: wire version the router speaks.
        first: base of this incarnation's session numbers; rows of sessions below it, still on their
            way from workers that have not heard of the restart, are void too.
    """

    wire: int
    first: int = 0


class Route(Message, frozen=True, array_like=True, tag=True):
    """A path: one worker per stage. Sent to its owner (the worker of stage 0) before first use.

    Attributes:
        path: identifier, never reused by this router.
        replicas: worker name per stage.
        addresses: inbox endpoint per stage.
        waves: waves that may be in flight on the path at once.
    """

    path: int
    replicas: list[str]
    addresses: list[str]
    waves: int


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
    """Sessions that go on under a higher epoch, by token replay (new path, new owner, or both)."""

    specs: list[SessionSpec]


class Work(Message, frozen=True, array_like=True, tag=True):
    """A batch for the first stage of a single-pass pipeline, inputs inline.

    Attributes:
        stage: stage index.
        sessions: items.
        epochs: epoch of each.
        dtype: element type of the inputs.
        shapes: shape of each input.
        payloads: raw bytes of each input.
        more: whether the pipeline has a later stage (False: answer with `Results`).
    """

    stage: int
    sessions: list[int]
    epochs: list[int]
    dtype: str
    shapes: list[tuple[int, ...]]
    payloads: list[bytes]
    more: bool


class Fetch(Message, frozen=True, array_like=True, tag=True):
    """A batch for a later stage: take each input from the producer that parked it.

    Attributes:
        stage: stage index to run.
        sessions: items.
        epochs: epoch of each.
        refs: where each input lies.
        producers: inbox endpoint of each producer, for the `Ack`.
        more: whether a later stage follows.
    """

    stage: int
    sessions: list[int]
    epochs: list[int]
    refs: list[TensorRef]
    producers: list[str]
    more: bool


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


class Ack(Message, frozen=True, array_like=True, tag=True):
    """The receiver has taken these tensors: the ring slots are free again.

    The router sends it in the place of a receiver that died, or when nobody wants a parked output.
    """

    slots: list[int]


FromWorker: TypeAlias = (
    Hello | Ready | Credit | Parked | Results | Tokens | Failed | Heartbeat | Draining | Bye
)
ToWorker: TypeAlias = (
    Introduce | Route | Unroute | Start | Move | Work | Fetch | Cancel | Release | Drain | Step | Ack
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
    return _from_worker.decode(body)


def decode_to_worker(body: bytes | memoryview) -> ToWorker:
    """Unpacks what a worker receives.

    Raises:
        msgspec.DecodeError: the bytes are no known message.
    """
    return _to_worker.decode(body)
