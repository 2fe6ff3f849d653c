"""Decode steps of a Llama stage without Python per layer: a static step over a pool of KV rows.

A standby worker captures it as a CUDA graph before it has parameters: the graph reads them where the
arena will hold them. `PooledStage` wraps an eager stage; sessions that fit get a row of the pool, and a
wave of single tokens of such sessions is one replay. Everything else (prefill, mixed waves, longer
sessions) goes the eager way on the same KV state, so the two may alternate freely. On the CPU the same
step runs without a graph, which is how it is tested there.

The step always runs all rows. Those that are not in the wave write their keys to the pool's last
position, which no session may use, so rows at rest stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from keystage.models.base import ModelShape, Row, StageError, StageRole
from keystage.models.llama import LlamaStage
from keystage.models.rope import RotaryTable, frequencies, rotate_

_ALIGN_POSITIONS = 64
_CAPTURE_WARM_UPS = 2


class _Pool:
    """KV rows [rows, 2 * kv_heads, positions, head_dim] per layer; the last position is nobody's."""

    def __init__(self, stage: LlamaStage, rows: int, capacity: int) -> None:
        config, role = stage.config, stage.role
        self.rows = rows
        self.positions = -(-(capacity + 1) // _ALIGN_POSITIONS) * _ALIGN_POSITIONS
        self.capacity = self.positions - 1
        layers = role.end_layer - role.first_layer
        shape = (layers, rows, 2 * config.kv_heads, self.positions, config.head_dim)
        self.layers = list(torch.zeros(shape, device=stage.device, dtype=stage.dtype))

    def row(self, row: int) -> list[torch.Tensor]:
        return [layer[row] for layer in self.layers]


class DecodeStep:
    """One token for every row of the pool, with inputs and outputs at fixed addresses.

    Attributes:
        x: input of all rows: int64 ids [rows], or activations [rows, hidden].
        positions: int64 [rows], where each row's token goes.
        out: activations [rows, hidden] or logits float32 [rows, vocab].
    """

    def __init__(self, stage: LlamaStage, pool: _Pool) -> None:
        config = stage.config
        self._stage = stage
        self._pool = pool
        device = stage.device
        if stage.role.is_first:
            self.x = torch.zeros(pool.rows, dtype=torch.int64, device=device)
        else:
            self.x = torch.zeros(pool.rows, config.hidden_size, dtype=stage.dtype, device=device)
        self.positions = torch.full((pool.rows,), pool.capacity, dtype=torch.int64, device=device)
        # A table of its own: the stage's is replaced when it grows, a graph's addresses must stay.
        rope = RotaryTable(frequencies(config.head_dim, config.rope_theta, config.rope), device, stage.dtype)
        rope.grow(pool.positions)
        self._rope = rope
        self._all_rows = torch.arange(pool.rows, device=device)
        self._all_positions = torch.arange(pool.positions, device=device)
        self.out = torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def capture(self) -> None:
        """Records the step as a CUDA graph; on another device there is nothing to record."""
        if self._stage.device.type != "cuda":
            return
        side = torch.cuda.Stream(self._stage.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._stage.device))
        with torch.cuda.stream(side):
            for _ in range(_CAPTURE_WARM_UPS):
                self._compute()
        torch.cuda.current_stream(self._stage.device).wait_stream(side)
        torch.cuda.synchronize(self._stage.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.out = self._compute()
        self._graph = graph

    def run(self) -> None:
        """Computes `out` from `x` and `positions`."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.out = self._compute()

    def _compute(self) -> torch.Tensor:
        stage, pool = self._stage, self._pool
        config, parameters = stage.config, stage.parameters
        norm_shape, eps = (config.hidden_size,), config.norm_eps
        group = config.heads // config.kv_heads
        rows, rotated = pool.rows, config.heads + config.kv_heads
        hidden = self.x
        if parameters.embedding is not None:
            hidden = functional.embedding(self.x, parameters.embedding)
        cos, sin = self._rope.at(self.positions)
        unseen = self._all_positions > self.positions.unsqueeze(1)
        mask = torch.zeros(unseen.shape, dtype=stage.dtype, device=stage.device)
        mask = mask.masked_fill_(unseen, float("-inf")).view(rows, 1, 1, pool.positions)
        for layer, keep in zip(parameters.layers, pool.layers, strict=True):
            qkv = layer.qkv(functional.rms_norm(hidden, norm_shape, layer.attention_norm, eps))
            qkv = qkv.view(rows, rotated + config.kv_heads, config.head_dim)
            rotate_(qkv[:, :rotated], cos, sin)
            keep[self._all_rows, :, self.positions] = qkv[:, config.heads :]
            query = qkv[:, : config.heads].reshape(rows, config.kv_heads, group, config.head_dim)
            attended = functional.scaled_dot_product_attention(
                query, keep[:, : config.kv_heads], keep[:, config.kv_heads :], attn_mask=mask
            )
            hidden = hidden + layer.out(attended.reshape(rows, config.heads * config.head_dim))
            gate, up = layer.gate_up(functional.rms_norm(hidden, norm_shape, layer.mlp_norm, eps)).chunk(
                2, -1
            )
            hidden = hidden + layer.down(functional.silu(gate).mul_(up))
        if parameters.head is None:
            return hidden
        return parameters.head(functional.rms_norm(hidden, norm_shape, parameters.final_norm, eps)).float()


class PooledStage:
    """A Llama stage whose decode steps are replayed where they can be; see `LoadedStage`.

    Args:
        stage: the eager stage; its parameters may still be filled in later, in place.
        rows: sessions with a row of the pool.
        capacity: tokens of such a session, at least.
    """

    def __init__(self, stage: LlamaStage, rows: int, capacity: int) -> None:
        self._stage = stage
        self._pool = _Pool(stage, rows, min(capacity, stage.shape.context_length))
        self._step = DecodeStep(stage, self._pool)
        self._row_of: dict[int, int] = {}
        self._free = list(range(rows - 1, -1, -1))
        self.replays = 0

    @property
    def role(self) -> StageRole:
        """See `LoadedStage`."""
        return self._stage.role

    @property
    def shape(self) -> ModelShape:
        """See `LoadedStage`."""
        return self._stage.shape

    @property
    def device(self) -> torch.device:
        """See `LoadedStage`."""
        return self._stage.device

    @property
    def dtype(self) -> torch.dtype:
        """See `LoadedStage`."""
        return self._stage.dtype

    @property
    def kv_token_bytes(self) -> int:
        """See `LoadedStage`."""
        return self._stage.kv_token_bytes

    def capture(self) -> None:
        """Records the decode step; see `DecodeStep.capture`."""
        self._step.capture()

    def open(self, slot: int, capacity: int) -> None:
        """See `StageModel.open`; takes a row of the pool where one is free and long enough."""
        self.close(slot)
        if not self._free or capacity > self._pool.capacity:
            self._stage.open(slot, capacity)
            return
        row = self._free[-1]
        buffers = self._pool.row(row)
        for buffer in buffers:  # masked positions are multiplied by 0, and 0 times NaN is NaN
            buffer.zero_()
        self._stage.open(slot, capacity, buffers)
        self._row_of[slot] = self._free.pop()

    def close(self, slot: int) -> None:
        """See `StageModel.close`."""
        self._stage.close(slot)
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    @torch.inference_mode()
    def forward(self, x: torch.Tensor, rows: Sequence[Row], want: Sequence[int]) -> torch.Tensor:
        """See `StageModel.forward`."""
        if not rows or any(row.count != 1 or row.slot not in self._row_of for row in rows):
            return self._stage.forward(x, rows, want)
        self._stage.kv.spans(rows)  # raises where a row does not continue its slot
        step = self._step
        expected = (len(rows), *step.x.shape[1:])
        if tuple(x.shape) != expected:
            raise StageError(f"input of shape {tuple(x.shape)}, {expected} expected for these rows")
        if self._stage.role.is_first:
            self._stage.check_ids(int(x.min()), int(x.max()))
        places = [self._row_of[row.slot] for row in rows]
        positions = [self._pool.capacity] * self._pool.rows
        for row, place in zip(rows, places, strict=True):
            positions[place] = row.start
        index = torch.tensor(places, device=self.device)
        step.positions.copy_(torch.tensor(positions))
        step.x.index_copy_(0, index, x.to(self.device, step.x.dtype))
        step.run()
        self.replays += 1
        self._stage.kv.commit(rows)
        if not self._stage.role.is_last:
            return step.out.index_select(0, index)
        return step.out.index_select(0, index[list(want)])
