"""The messages of stream programs: turns of requests at modules, and what they hand on. Part of `wire.api`.

A *turn* is one execution of a module for one request. `Run` (a batch of turns) -> `Ran` (streams and places
of the outputs) -> `Run` of the module that consumes the stream, wherever it is. Tensors stay with their
producer until a consumer fetches them; bodies of requests and answers travel in the messages. `meta` is what
modules read and routers do not: the header, and how the tensors lie in the slot.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from keystage.wire.shapes import Message, TensorRef

FaultKind: TypeAlias = Literal["request", "company", "retry"]
"""Whose fault: the request, one of the batch (nobody knows which), the circumstances."""


class StreamMessage(msgspec.Struct, frozen=True, array_like=True):
    """One message on a stream.

    Attributes:
        stream: name of the stream.
        meta: header and layout of the tensors, for modules.
        ref: where its tensors lie, as bytes in one slot; None for bodies, answers and bare headers.
        producer: inbox address of the worker that has them, empty where `ref` is None.
        body: the request's body (entry) or the answer (exit).
        content_type: of `body`.
        visits: how often it will still pass the stream's consumer, this visit included; 0: not known.
    """

    stream: str
    meta: bytes = b""
    ref: TensorRef | None = None
    producer: str = ""
    body: bytes = b""
    content_type: str = ""
    visits: int = 0


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """Why a turn failed.

    Attributes:
        kind: see `FaultKind`.
        reason: names the module, the bound and the actual value.
        http_status: what the client is to see of it.
    """

    kind: FaultKind
    reason: str
    http_status: int = 500


class Run(Message, frozen=True, array_like=True, tag=True):
    """A batch of turns of one module.

    Attributes:
        stage: the module.
        turns: router-unique number of each turn.
        sessions: request of each.
        epochs: epoch of each request.
        inputs: messages of each turn: one, or one for each stream that a join waits for.
    """

    stage: int
    turns: list[int]
    sessions: list[int]
    epochs: list[int]
    inputs: list[list[StreamMessage]]


class Ran(Message, frozen=True, array_like=True, tag=True):
    """Turns that ended; a batch may be told in parts, if the ring has no room for all of its outputs.

    Attributes:
        replica: the worker.
        stage: the module.
        turns: which.
        outputs: what each turn hands on, by stream; empty where it failed.
        faults: why it failed, None where it did not.
        batch: turns of the whole batch.
        started_s: seconds between receipt of the batch and start of compute.
        compute_s: seconds of compute for the whole batch.
    """

    replica: str
    stage: int
    turns: list[int]
    outputs: list[list[StreamMessage]]
    faults: list[Fault | None]
    batch: int
    started_s: float
    compute_s: float


class Evict(Message, frozen=True, array_like=True, tag=True):
    """Requests that left a loop, ended, or start over: forget their state.

    Attributes:
        sessions: requests.
        epochs: epoch of each; turns of later ones stay.
        stages: module of each whose state goes; -1: all that are hosted, and turns that wait are dropped too.
    """

    sessions: list[int]
    epochs: list[int]
    stages: list[int]
