"""KV blocks: which blocks of a worker's pool hold which session's token positions. Pure.

A block holds `BLOCK_TOKENS` positions of every stage that the worker hosts, so one table per session
serves all of them. Before it: the executor, which reserves before a wave runs. After it: attention
kernels that read the tables (on a GPU), or nobody: on the CPU the blocks are accounting, and the
kernel pages a session's contiguous buffer lazily. Nothing here decides who gets blocks: the owner of
a path does (`worker.waves`).
"""

from __future__ import annotations

BLOCK_TOKENS = 16
"""Positions of a block: small enough that half a block lost per session is little (8 of some hundred
positions), large enough that a table of a 4,096-token session has 256 entries."""


def blocks_for(tokens: int) -> int:
    """Blocks that hold the positions [0, tokens)."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """Blocks numbered 0 to `blocks` - 1, handed out by slot; freed ones first, the last freed before others.

    Args:
        blocks: how many there are.
    """

    def __init__(self, blocks: int) -> None:
        self.total = max(0, blocks)
        self._fresh = 0
        """Blocks from here on were never handed out: a pool of a million costs nothing to make."""
        self._freed: list[int] = []
        self._tables: dict[int, list[int]] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self.total - self._fresh + len(self._freed)

    def reserve(self, slot: int, tokens: int) -> list[int] | None:
        """Extends a slot's blocks so that they hold the positions [0, tokens).

        Returns:
            All blocks of the slot, in the order of their positions, or None when too few are free:
            then nothing has changed. A slot never shrinks here.
        """
        table = self._tables.get(slot)
        need = blocks_for(tokens) - (len(table) if table is not None else 0)
        if need > self.free_blocks:
            return None
        if table is None:
            table = self._tables[slot] = []
        for _ in range(need):
            if self._freed:
                table.append(self._freed.pop())
            else:
                table.append(self._fresh)
                self._fresh += 1
        return table

    def free(self, slot: int) -> int:
        """Takes all blocks of a slot back; returns how many, 0 for an unknown slot."""
        table = self._tables.pop(slot, None)
        if table is None:
            return 0
        self._freed.extend(reversed(table))
        return len(table)

    def table(self, slot: int) -> list[int]:
        """Blocks of a slot, empty for an unknown one; not to be changed."""
        return self._tables.get(slot, [])

    @property
    def slots(self) -> list[int]:
        """Slots that hold blocks, or asked for none yet."""
        return list(self._tables)
