"""KV state of a span of stages on one GPU: one pool of blocks for all its layers, and who has which.

`cuda_span` asks for room before a wave and hands the pool's tensors to its kernels. All stages of a
worker see the same tokens of a session, so one table a session serves all layers. Which blocks are free
is decided in `blocks`; nothing here computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from keystage.models.base import Row, StageError
from keystage.models.blocks import BLOCK_TOKENS, BlockPool

KeyValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, each [pool rows, kv_heads, head_dim]."""


class CudaPool:
    """Blocks of KV state for every layer of a span.

    Args:
        layers: layers of the span.
        kv_heads: key-value heads.
        head_dim: elements of a head.
        blocks: blocks that sessions may have.
        context_length: positions of a session at most.
        device: CUDA device.
        dtype: type of keys and values.

    Attributes:
        layers: keys and values per layer.
        width: blocks of the longest session.
        spare_row: pool row where the rows that pad a step put their keys; nobody reads it.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        context_length: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        rows = (blocks + 1) * BLOCK_TOKENS
        # Zeros: a row that was never written is multiplied by a weight of 0, and 0 times NaN is NaN.
        state = torch.zeros(layers, 2, rows, kv_heads, head_dim, device=device, dtype=dtype)
        self._state = state
        self.layers: list[KeyValues] = [(layer[0], layer[1]) for layer in state]
        self.width = -(-context_length // BLOCK_TOKENS)
        self.spare_row = blocks * BLOCK_TOKENS
        self._blocks = BlockPool(blocks)
        self._capacity: dict[int, int] = {}
        self._lengths: dict[int, dict[int, int]] = {}
        """Tokens held by slot and first stage of a pass: a wave may run the stages of a span in parts."""
        self._tables: dict[int, npt.NDArray[np.int32]] = {}

    @property
    def free_and_total(self) -> tuple[int, int]:
        """Blocks free, and in all."""
        return self._blocks.free_blocks, self._blocks.total

    def open(self, slot: int, capacity: int) -> None:
        """A session of at most `capacity` tokens; an open slot is replaced."""
        self.close(slot)
        self._capacity[slot] = capacity
        self._lengths[slot] = {}

    def close(self, slot: int) -> None:
        """Frees a session's blocks; an unknown slot is ignored."""
        self._blocks.free(slot)
        self._capacity.pop(slot, None)
        self._lengths.pop(slot, None)
        self._tables.pop(slot, None)

    def reserve(self, slot: int, tokens: int) -> bool:
        """Positions below `tokens` exist from now on; False: too few blocks, and nothing has changed."""
        table = self._tables.get(slot)
        if table is not None and len(table) * BLOCK_TOKENS >= tokens:
            return True
        blocks = self._blocks.reserve(slot, tokens)
        if blocks is None:
            return False
        self._tables[slot] = np.array(blocks, dtype=np.int32)
        return True

    def table(self, slot: int) -> npt.NDArray[np.int32]:
        """Blocks of a session, in order."""
        return self._tables[slot]

    def check(self, rows: Sequence[Row], first: int) -> None:
        """Refuses rows that do not continue their sessions, and makes room for the others.

        Args:
            rows: the rows of a pass.
            first: index of the stage at which it begins.

        Raises:
            StageError: unknown or repeated slot, wrong start, full slot, empty row, too few blocks.
        """
        if len({row.slot for row in rows}) != len(rows):
            raise StageError(f"a slot appears twice among rows {[row.slot for row in rows]}")
        for row in rows:
            if row.slot not in self._lengths:
                raise StageError(f"slot {row.slot} is not open")
            length = self._lengths[row.slot].get(first, 0)
            end = row.start + row.count
            if row.count < 1:
                raise StageError(f"slot {row.slot}: a row needs at least 1 token, got {row.count}")
            if row.start not in (0, length):
                raise StageError(
                    f"slot {row.slot}: row starts at position {row.start}, the slot holds {length} tokens"
                )
            if end > self._capacity[row.slot]:
                raise StageError(
                    f"slot {row.slot}: {end} tokens do not fit a capacity of {self._capacity[row.slot]}"
                )
            if not self.reserve(row.slot, end):
                raise StageError(
                    f"slot {row.slot}: {end} tokens need more than the {self._blocks.free_blocks} free KV "
                    f"blocks of {self._blocks.total}"
                )

    def commit(self, rows: Sequence[Row], first: int) -> None:
        """Records the rows' tokens as held, after a pass from stage `first` on has been queued."""
        for row in rows:
            self._lengths[row.slot][first] = row.start + row.count

    def places(self, slot: int, start: int, count: int) -> npt.NDArray[np.int32]:
        """Pool rows of positions [start, start + count) of a session."""
        at = np.arange(start, start + count, dtype=np.int32)
        return np.asarray(self._tables[slot][at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS)

    # ------------------------------------------------------------ state that is copied

    def read(self, slot: int, stage: int, layers: slice) -> torch.Tensor | None:
        """A copy of what a session holds in some layers, as `kv.KvSlots.read` gives it.

        Args:
            slot: the session.
            stage: index within the span of the stage that has the layers.
            layers: which of the span's.

        Returns:
            [layers, 2 * kv_heads, positions, head_dim], keys first; None for an unknown slot or an empty one.
        """
        held = [(first, tokens) for first, tokens in self._lengths.get(slot, {}).items() if first <= stage]
        count = max(held)[1] if held else 0
        if not count:
            return None
        state = self._state[layers][:, :, self._at(slot, count)]
        depth, _, _, heads, dim = state.shape
        return state.permute(0, 1, 3, 2, 4).reshape(depth, 2 * heads, count, dim)

    def write(self, slot: int, stage: int, layers: slice, state: torch.Tensor) -> bool:
        """Puts what `read` gave elsewhere into the blocks of an open slot; False when it does not fit.

        Args:
            slot: the session; it has held nothing yet.
            stage: as for `read`.
            layers: as for `read`.
            state: on this pool's device.
        """
        target = self._state[layers]
        depth, _, _, heads, dim = target.shape
        count = state.shape[2] if state.ndim == 4 else 0
        if not count or tuple(state.shape) != (depth, 2 * heads, count, dim):
            return False
        if slot not in self._lengths or count > self._capacity[slot] or not self.reserve(slot, count):
            return False
        target[:, :, self._at(slot, count)] = state.reshape(depth, 2, heads, count, dim).permute(
            0, 1, 3, 2, 4
        )
        self._lengths[slot][stage] = count
        return True

    def rewind(self, slot: int, tokens: int) -> bool:
        """Forgets what a session holds from position `tokens` on; False for an unknown slot."""
        lengths = self._lengths.get(slot)
        if lengths is None:
            return False
        self._lengths[slot] = {first: min(held, tokens) for first, held in lengths.items()}
        return True

    def _at(self, slot: int, count: int) -> torch.Tensor:
        places = self.places(slot, 0, count).astype(np.int64)
        return torch.from_numpy(places).to(self._state.device)
