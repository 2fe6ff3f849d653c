"""A decode step as a CUDA graph: a token a session, for a fixed number of rows, in one launch.

Captured by `cuda_span` for a few batch sizes; a smaller wave pads its rows, which then write to a row of
the pool that nobody reads. What changes between steps is in one pinned buffer, which the graph copies in
itself, as it copies tokens out; so a step costs the host some numpy and one launch. Activations come from
wherever they lie into a buffer of the graph, and stay on the device until somebody copies them.

On a device that is no GPU a step is computed anew each time: Triton's interpreter runs the same kernels
on a CPU, by which everything around them is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from keystage.models.base import Row
from keystage.models.blocks import BLOCK_TOKENS
from keystage.models.cuda_attention import PagedAttention
from keystage.models.cuda_layers import Layers, Segment
from keystage.models.cuda_pool import CudaPool

GraphMemory: TypeAlias = Any
"""Handle of graph memory; torch names its type privately."""

Enter: TypeAlias = Callable[[torch.Tensor], None]
"""Queues a copy of activations into a tensor of the device."""


class Replay(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Queues it once more."""

    def pool(self) -> GraphMemory:
        """Its memory."""


class _Again:
    """Computes where nothing can be captured."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute

    @torch.inference_mode()
    def replay(self) -> None:
        self._compute()

    def pool(self) -> GraphMemory:
        return None


_WARM_UPS = 2
_VECTORS = 4
"""Ids, positions, pool rows and lengths: one number a row each, before the block tables."""


class DecodeGraph:
    """One token for each of `rows` sessions through some stages.

    Args:
        layers: what is computed.
        segments: the stages.
        pool: KV state.
        rows: sessions of a step, padding included.
        memory: pool of graph memory that all graphs of a span share, None: a new one.
        is_recorded: False: every step is computed anew.

    Attributes:
        rows: see above.
        logits: float32 [rows, vocab] after the last stage, None: these stages do not end the model.
        hidden: activations [rows, hidden] otherwise; of the newest step, which may not have ended.
        memory: see above; of this graph.
    """

    def __init__(
        self,
        layers: Layers,
        segments: Sequence[Segment],
        pool: CudaPool,
        rows: int,
        memory: GraphMemory | None = None,
        *,
        is_recorded: bool = True,
    ) -> None:
        self.rows = rows
        self._layers, self._segments, self._pool = layers, segments, pool
        config = layers.config
        device, dtype = pool.layers[0][0].device, pool.layers[0][0].dtype
        self._is_first = segments[0].parameters.embedding is not None
        self._is_last = segments[-1].parameters.head is not None
        self._attention = PagedAttention(
            rows, config.heads, config.kv_heads, config.head_dim, config.window, device
        )
        size = rows * (_VECTORS + pool.width)
        is_gpu = device.type == "cuda"
        self._numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._staged = torch.zeros(size, dtype=torch.int32, pin_memory=is_gpu)
        host = self._staged.numpy()
        self._vectors: npt.NDArray[np.int32] = host[: _VECTORS * rows].reshape(_VECTORS, rows)
        self._table: npt.NDArray[np.int32] = host[_VECTORS * rows :].reshape(rows, pool.width)
        shape = (rows, config.hidden_size)
        self._x = torch.zeros(shape, dtype=dtype, device=device)
        self.logits: torch.Tensor | None = None
        self.hidden: torch.Tensor | None = None
        self._peaks_out = torch.zeros(rows, pin_memory=is_gpu)
        self._tokens_out = torch.zeros(rows, dtype=torch.int64, pin_memory=is_gpu)
        self._done: Any = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]
        self._pad(0)
        self._graph = self._captured(device, memory, is_recorded=is_recorded)
        self.memory = self._graph.pool()

    @torch.inference_mode()
    def _captured(self, device: torch.device, memory: GraphMemory | None, *, is_recorded: bool) -> Replay:
        if device.type != "cuda" or not is_recorded:
            self._compute()
            return _Again(self._compute)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._compute()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            self._compute()
        return graph

    def _compute(self) -> None:
        self._numbers.copy_(self._staged, non_blocking=True)
        rows = self.rows
        ids, positions, slots, lengths = self._numbers[: _VECTORS * rows].view(_VECTORS, rows)
        table = self._numbers[_VECTORS * rows :].view(rows, self._pool.width)
        hidden = self._layers.run(
            self._segments,
            ids if self._is_first else self._x,
            positions,
            slots,
            lambda qkv, kv: self._attention(qkv, kv, table, lengths),
        )
        if not self._is_last:
            self.hidden = hidden
            return
        self.logits = self._layers.logits(self._segments[-1].parameters, hidden)
        peaks, tokens = self.logits.max(-1)
        self._peaks_out.copy_(peaks, non_blocking=True)
        self._tokens_out.copy_(tokens, non_blocking=True)

    @torch.inference_mode()
    def start(self, rows: Sequence[Row], x: Sequence[int] | Enter) -> None:
        """Queues a step; at most `rows` rows of one token each, their room reserved.

        Args:
            rows: who steps.
            x: a token id a row, or what brings activations [len(rows), hidden]; their source stays as
                it is until the step has ended.
        """
        count = len(rows)
        self.wait()  # the step before reads what is written now
        ids, positions, slots, lengths = self._vectors
        if callable(x):
            x(self._x[:count])
        else:
            ids[:count] = x
        for i, row in enumerate(rows):
            table = self._pool.table(row.slot)
            start = row.start
            positions[i] = start
            slots[i] = table[start // BLOCK_TOKENS] * BLOCK_TOKENS + start % BLOCK_TOKENS
            lengths[i] = start + 1
            self._table[i, : len(table)] = table
        self._pad(count)
        self._graph.replay()
        if self._done is not None:
            self._done.record()

    def wait(self) -> None:
        """Returns when the newest step has ended, at once where there was none."""
        if self._done is not None:
            self._done.synchronize()

    def _pad(self, count: int) -> None:
        """Rows from `count` on are nobody's: one position, in the spare row of the pool."""
        _, positions, slots, lengths = self._vectors
        positions[count:] = 0
        slots[count:] = self._pool.spare_row
        lengths[count:] = 1
        self._table[count:, 0] = self._pool.spare_row // BLOCK_TOKENS

    def greedy(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Likeliest token of each row, and its logit; valid until the next step."""
        self.wait()
        return self._tokens_out.numpy()[:count], self._peaks_out.numpy()[:count]
