"""What the sending process and its workers tell each other over pipes: MessagePack behind a length.

Worker's input: a `Part`, then a `Start`. Its output: `Ready`, then any number of `Rows`, then `Ended`; it
ends early if its input does. Used by `worker` and `processes`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from keystage.loadgen.sending.route import Reading, Version
from keystage.loadgen.sending.row import Row

LENGTH = struct.Struct("!Q")


class Part(msgspec.Struct, array_like=True):
    """The share of a plan that one process sends.

    Attributes:
        indices: places of its requests in the whole plan, int64 in machine order.
        times_s: when each is sent, float64 in machine order.
        targets: which URL each goes to, int32 in machine order.
        bodies: which of `contents` each carries, int32 in machine order.
        contents: bodies, each once.
        urls: addresses of the plan.
        headers: of every request.
        reading: what is read of answers.
        timeout_s: a request fails after this long.
        http: version of HTTP.
        retries: how often a failed request is sent again.
    """

    indices: bytes
    times_s: bytes
    targets: bytes
    bodies: bytes
    contents: list[bytes]
    urls: list[str]
    headers: dict[str, str]
    reading: Reading
    timeout_s: float
    http: Version
    retries: int


class Start(msgspec.Struct, array_like=True):
    """When the run starts, `time.monotonic()` of this machine."""

    start_s: float


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The part is here and can be sent."""


RowFields: TypeAlias = tuple[int, float, float | None, float, int, int | None, int, str, int]


class Rows(msgspec.Struct, array_like=True, tag="rows"):
    """Requests that have ended, as `fields` tells them."""

    rows: list[RowFields]


class Ended(msgspec.Struct, array_like=True, tag="ended"):
    """All requests have ended.

    Attributes:
        cpu_s: processor time of the process from start to end of the run.
        connections: connections made.
        moved: requests moved to another connection because no byte of them was processed.
    """

    cpu_s: float
    connections: int
    moved: int


class Finished(msgspec.Struct, array_like=True, tag="finished"):
    """What an agent's processes told beside rows; see `Faced`."""

    processes: int
    cpu_s: float
    connections: int
    moved: int
    faults: list[str]


class Clock(msgspec.Struct, array_like=True, tag="clock"):
    """`time.monotonic()` of the agent."""

    at_s: float


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """Why an agent does not send."""

    reason: str


class Prepare(msgspec.Struct, array_like=True, tag="prepare"):
    """A part for an agent: its indices count from 0.

    Attributes:
        part: what is sent.
        processes: how many are to send it, None for as many as its rate and the agent's cores ask for.
    """

    part: Part
    processes: int | None


class WhatTime(msgspec.Struct, array_like=True, tag="time"):
    """Asks an agent for its clock."""


class Begin(msgspec.Struct, array_like=True, tag="begin"):
    """Lets an agent send.

    Attributes:
        start_s: when, on the agent's own clock.
        bound_s: seconds from now after which every request must have ended.
    """

    start_s: float
    bound_s: float


Told = Ready | Rows | Ended
AgentTold = Ready | Rows | Finished | Clock | Refused
AgentAsked = Prepare | WhatTime | Begin

_encoder = msgspec.msgpack.Encoder()
told = msgspec.msgpack.Decoder(Told).decode
part = msgspec.msgpack.Decoder(Part).decode
start = msgspec.msgpack.Decoder(Start).decode
agent_told = msgspec.msgpack.Decoder(AgentTold).decode
agent_asked = msgspec.msgpack.Decoder(AgentAsked).decode
encoded = _encoder.encode


def framed(message: msgspec.Struct) -> bytes:
    """A message as it is written."""
    content = _encoder.encode(message)
    return LENGTH.pack(len(content)) + content


def fields(row: Row) -> RowFields:
    """What a row has that its schedule did not."""
    return (
        row.index, row.sent_s, row.first_s, row.last_s, row.status, row.prompt_tokens, row.output_tokens,
        row.error, row.attempts,
    )  # fmt: skip


def fill(rows: Sequence[Row], told: RowFields) -> Row:
    """Puts what was told into its row, and returns it."""
    row = rows[told[0]]
    (
        _, row.sent_s, row.first_s, row.last_s, row.status, row.prompt_tokens, row.output_tokens,
        row.error, row.attempts,
    ) = told  # fmt: skip
    return row
