"""What messages are made of: a tensor's place, a session, the rows of a wave. Part of `wire.api`."""

from __future__ import annotations

import msgspec


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of one tensor lie.

    Attributes:
        dtype: numpy name of the element type (`float32`, `int64`, `bfloat16`, `uint8`).
        shape: elements per axis.
        pid: process that owns the shared-memory ring, 0 when the bytes are in the message.
        fd: descriptor number of the ring in that process.
        offset: bytes from the ring's start.
        nbytes: length in bytes.
        slot: ring slot that `Ack` gives back.
    """

    dtype: str
    shape: tuple[int, ...]
    pid: int
    fd: int
    offset: int
    nbytes: int
    slot: int


class SessionSpec(msgspec.Struct, frozen=True, array_like=True):
    """All a path needs to run, or to rebuild, one session.

    Attributes:
        session: router-unique number.
        epoch: path epoch; a higher one replaces everything known of the session.
        path: path identifier.
        tokens: prompt followed by the tokens generated so far (all are replayed).
        prompt_len: how many of `tokens` are prompt.
        max_tokens: new tokens allowed in all (generated ones included).
        eos: token ids that end the session.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        seed: 64-bit seed; sampling is a function of (logits, seed, position).
    """

    session: int
    epoch: int
    path: int
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    eos: list[int]
    temperature: float
    top_p: float
    seed: int


class StepRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one wave, as parallel arrays; one row per session.

    Attributes:
        sessions: session numbers.
        epochs: epoch of each.
        positions: first token position of the row (KV length before the step).
        counts: tokens in the row (1 for decode, a chunk for prefill).
        sample: whether the row ends at the newest known token, so that the last stage samples.
        opens: reservation in tokens if the row opens the session here, else 0.
        temperatures: per row.
        top_ps: per row.
        seeds: per row.
    """

    sessions: list[int]
    epochs: list[int]
    positions: list[int]
    counts: list[int]
    sample: list[bool]
    opens: list[int]
    temperatures: list[float]
    top_ps: list[float]
    seeds: list[int]
