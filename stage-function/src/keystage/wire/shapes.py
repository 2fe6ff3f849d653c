"""What messages are made of: a base, a tensor's place, a session, the rows of a wave. Part of `wire.api`."""

from __future__ import annotations

import msgspec

UNBOUNDED = 2**31 - 1
"""A number of KV blocks that says: nobody has told yet."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of every message; the tag is the class name."""


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of one tensor lie.

    Attributes:
        dtype: numpy name of the element type (`float32`, `int64`, `bfloat16`, `uint8`).
        shape: elements per axis.
        pid: process that owns the shared-memory ring, 0 when the bytes are in the message.
        fd: descriptor number of the ring in that process.
        offset: bytes from the ring's start.
        nbytes: length in bytes.
        slot: ring slot that `Ack` gives back; below 0: of the producer's device memory, where the bytes lie
            at `offset` instead of in its ring.
        handle: by which that memory can be mapped; with a slot of the ring: an offer to use it next time,
            which the `Ack` answers.
        checksum: of its bytes (`wire.checksums`), -1: its producer gives none.
    """

    dtype: str
    shape: tuple[int, ...]
    pid: int
    fd: int
    offset: int
    nbytes: int
    slot: int
    handle: bytes = b""
    checksum: int = -1


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
        input: what the first stage works on beside the tokens, for families that have such.
        whole: tokens at the front that go in one row of their own, whatever a wave's budget; 0: none.
        kept: positions whose KV state every worker of the path has, from the epoch before; 0: a replay.
        is_timed: its waves bring the times they took at the stages along with its tokens, for a trace.
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
    input: bytes = b""
    whole: int = 0
    kept: int = 0
    is_timed: bool = False


class StepRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one wave, as parallel arrays; one row per session.

    Attributes:
        sessions: session numbers.
        epochs: epoch of each.
        positions: first token position of the row (KV length before the step).
        counts: tokens in the row (1 for decode, a chunk for prefill).
        sample: whether the row ends at the newest known token, so that the last stage samples.
        opens: most positions the session can ever need if the row opens it here, else 0. A row that opens
            at a position above 0 goes on with KV state of an epoch before.
        temperatures: per row.
        top_ps: per row.
        seeds: per row.
        holds: positions whose KV blocks each row needs; empty: those up to its last token.
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
    holds: list[int] = msgspec.field(default_factory=list)

    def held_after(self, row: int) -> int:
        """Positions for which a stage must have KV blocks before it runs the row."""
        return self.holds[row] if self.holds else self.positions[row] + self.counts[row]
