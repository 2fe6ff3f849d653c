"""What a worker says of itself every second. Part of `wire.api`."""

from __future__ import annotations

import msgspec

from keystage.wire.shapes import Message


class Heartbeat(Message, frozen=True, array_like=True, tag=True):
    """The engine loop is alive; sent every second, dead after five without.

    Attributes:
        replica: the worker.
        state: worker state name.
        held_slots: sessions or items it holds.
        held_kv_tokens: KV positions in blocks that are taken.
        busy_s: cumulative seconds of compute, per hosted stage.
        batches: cumulative batches or waves, per hosted stage.
        rows: cumulative rows (sessions stepped or items), per hosted stage.
        kv_blocks: KV blocks in all, 0 for single-pass.
        kv_blocks_free: KV blocks nobody holds.
        preemptions: cumulative preemptions on the paths it owns.
        tokens: cumulative tokens, per hosted stage; of items one each. Empty: it does not count them.
    """

    replica: str
    state: str
    held_slots: int
    held_kv_tokens: int
    busy_s: list[float]
    batches: list[int]
    rows: list[int]
    kv_blocks: int = 0
    kv_blocks_free: int = 0
    preemptions: int = 0
    tokens: list[int] = msgspec.field(default_factory=list)
