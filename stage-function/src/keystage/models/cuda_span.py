"""Consecutive stages of a decoder on one GPU, run as one: graphs for decoding, torch for prompts.

Made by `worker.cuda_executor` from stages that are loaded already (`decoder.DecoderStage`), driven wave
by wave. A wave of single tokens is one launch of a `DecodeGraph`; a wave with prompts goes layer by layer,
its single tokens through the same paged attention, its prompts through torch's variable-length attention
over keys gathered from their blocks. Stages of one worker share their graphs, so a boundary between
them costs nothing; nothing here waits for the device except where a result is asked for.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from keystage.models.base import ModelShape, Row, StageError, StageRole
from keystage.models.cuda_attention import PagedAttention
from keystage.models.cuda_graph import DecodeGraph, Enter, GraphMemory
from keystage.models.cuda_layers import Attend, Layers, Segment
from keystage.models.cuda_pool import CudaPool, KeyValues
from keystage.models.decoder import DecoderStage
from keystage.models.decoder_parameters import StageParameters

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes of graphs: a wave pads to the next one, which costs little while weights are what is read."""

# From 2.12 on torch wants to be told that queries share key-value heads; before, it sees for itself.
_SHARED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class CudaSpan:
    """Stages first..last of one model on one GPU.

    Args:
        stages: in order, one after another in the model.
        blocks: KV blocks that sessions may have in all.

    Attributes:
        replays: waves that were one launch.
        passes: waves that were not.
    """

    def __init__(self, stages: Sequence[DecoderStage], blocks: int) -> None:
        first, last = stages[0], stages[-1]
        for before, after in itertools.pairwise(stages):
            assert before.role.end_layer == after.role.first_layer, "stages do not follow each other"
        self._config = config = first.config
        self.role = StageRole(
            first.role.first_layer, last.role.end_layer, first.role.is_first, last.role.is_last
        )
        self.shape: ModelShape = first.shape
        self.device, self.dtype = first.device, first.dtype
        self.kv_token_bytes = sum(stage.kv_token_bytes for stage in stages)
        layers = self.role.end_layer - self.role.first_layer
        self.pool = CudaPool(
            layers, config.kv_heads, config.head_dim, blocks, config.context_length, self.device, self.dtype
        )
        self._segments: list[Segment] = []
        for stage in stages:
            own = self._layers_of(stage.role)
            self._segments.append(Segment(stage.role, stage.parameters, self.pool.layers[own]))
        self._layers = Layers(config, self.device, self.dtype)
        self._graphs: dict[tuple[int, int, int], DecodeGraph] = {}
        self._memory: GraphMemory | None = None
        self.replays = self.passes = 0

    # ------------------------------------------------------------ sessions

    def open(self, slot: int, capacity: int) -> None:
        """See `StageModel.open`; blocks are taken as the session grows."""
        if not 1 <= capacity <= self._config.context_length:
            raise StageError(
                f"slot {slot}: capacity must be 1 to {self._config.context_length} tokens, got {capacity}"
            )
        self.pool.open(slot, capacity)

    def close(self, slot: int) -> None:
        """See `StageModel.close`."""
        self.pool.close(slot)

    def reserve(self, slot: int, tokens: int) -> bool:
        """See `CudaPool.reserve`."""
        return self.pool.reserve(slot, tokens)

    @torch.inference_mode()
    def read(self, slot: int, stage: int) -> torch.Tensor | None:
        """KV state of a session in the span's `stage`-th stage; see `CudaPool.read`."""
        return self.pool.read(slot, stage, self._layers_of(self._segments[stage].role))

    @torch.inference_mode()
    def write(self, slot: int, stage: int, state: torch.Tensor) -> bool:
        """Takes what `read` gave elsewhere; see `CudaPool.write`."""
        return self.pool.write(slot, stage, self._layers_of(self._segments[stage].role), state)

    def _layers_of(self, role: StageRole) -> slice:
        """A stage's layers among the span's."""
        first = self.role.first_layer
        return slice(role.first_layer - first, role.end_layer - first)

    # ------------------------------------------------------------ steps

    def capture(self, first: int = 0, last: int = -1, most_rows: int = BUCKETS[-1]) -> None:
        """Records decode steps ahead, in every batch size up to `most_rows`.

        Args:
            first: index of the first stage within the span.
            last: index of the last, -1: the span's.
            most_rows: largest batch.
        """
        # Large ones first: the smaller ones then fit into their memory.
        for rows in reversed([size for size in BUCKETS if size < 2 * most_rows]):
            self._graph(*self._range(first, last), rows)

    def rehearse(self) -> None:
        """Computes one decode step of nobody, which loads its kernels, and records nothing.

        Unlike `capture` it may run while other threads use the device: recording fails when they do.
        """
        DecodeGraph(self._layers, self._segments, self.pool, 1, is_recorded=False)

    def _graph(self, first: int, last: int, rows: int) -> DecodeGraph:
        graph = self._graphs.get((first, last, rows))
        if graph is None:
            graph = DecodeGraph(self._layers, self._segments[first : last + 1], self.pool, rows, self._memory)
            self._memory = graph.memory
            self._graphs[first, last, rows] = graph
        return graph

    def graph_for(self, rows: Sequence[Row], first: int = 0, last: int = -1) -> DecodeGraph | None:
        """The graph that can do a wave, recorded now if it never was; None: it has prompts, or is larger.

        A stage that was forked under load starts without graphs and records what it meets.
        """
        if not 0 < len(rows) <= BUCKETS[-1] or any(row.count != 1 for row in rows):
            return None
        size = next(size for size in BUCKETS if size >= len(rows))
        return self._graph(*self._range(first, last), size)

    def start(
        self,
        graph: DecodeGraph,
        x: Sequence[int] | Enter,
        shape: tuple[int, ...],
        rows: Sequence[Row],
        first: int = 0,
    ) -> None:
        """Queues a wave as one launch; its result is asked of the graph.

        Args:
            graph: from `graph_for`.
            x: ids, or what brings the activations; see `DecodeGraph.start`.
            shape: of what `x` is.
            rows: who steps.
            first: index of the first stage within the span, as for `graph_for`.

        Raises:
            StageError: see `CudaPool.check`; ids or shape that do not fit.
        """
        ids = None if callable(x) else x
        self._check_input(ids, shape, len(rows), is_first=self._segments[first].role.is_first)
        self.pool.check(rows, first)
        graph.start(rows, x)
        self.pool.commit(rows, first)
        self.replays += 1

    @torch.inference_mode()
    def forward(
        self,
        x: torch.Tensor,
        rows: Sequence[Row],
        want: Sequence[int],
        first: int = 0,
        last: int = -1,
    ) -> torch.Tensor:
        """See `StageModel.forward`; layer by layer where no graph does.

        Args:
            x: as there.
            rows: as there.
            want: as there.
            first: index of the first stage within the span.
            last: index of the last, -1: the span's.
        """
        begin, end = self._range(first, last)
        segments = self._segments[begin : end + 1]
        graph = self.graph_for(rows, first, last)
        if graph is not None:
            is_first = segments[0].role.is_first
            source: Sequence[int] | Enter = x.tolist() if is_first else lambda target: _copied(target, x)
            self.start(graph, source, tuple(x.shape), rows, begin)
            if graph.hidden is not None:
                return graph.hidden[: len(rows)].clone()
            assert graph.logits is not None
            return graph.logits[list(want)]
        tokens = sum(row.count for row in rows)
        ids = x.tolist() if segments[0].role.is_first and x.ndim == 1 else None
        self._check_input(ids, tuple(x.shape), tokens, is_first=segments[0].role.is_first)
        self.pool.check(rows, begin)
        is_last = segments[-1].role.is_last
        if not tokens:
            width = self._config.vocab_size if is_last else self._config.hidden_size
            return torch.empty(0, width, device=self.device, dtype=torch.float32 if is_last else self.dtype)
        starts = np.cumsum([0, *(row.count for row in rows)])
        positions = np.concatenate([np.arange(row.start, row.start + row.count) for row in rows])
        slots = np.concatenate([self.pool.places(row.slot, row.start, row.count) for row in rows])
        numbers = torch.from_numpy(np.stack([positions, slots]).astype(np.int32)).to(self.device)
        x = x.to(self.device, torch.int32 if segments[0].role.is_first else self.dtype)
        hidden = self._layers.run(segments, x, numbers[0], numbers[1], self._attend(rows, starts))
        self.pool.commit(rows, begin)
        self.passes += 1
        if not is_last:
            return hidden
        newest = torch.tensor([int(starts[index + 1]) - 1 for index in want], device=self.device)
        if not len(want):
            return torch.empty(0, self._config.vocab_size, device=self.device)
        return self._layers.logits(segments[-1].parameters, hidden[newest])

    @property
    def parameters(self) -> list[StageParameters]:
        """What its stages multiply with."""
        return [segment.parameters for segment in self._segments]

    def _range(self, first: int, last: int) -> tuple[int, int]:
        return first, last % len(self._segments)

    def _check_input(
        self, ids: Sequence[int] | None, shape: tuple[int, ...], tokens: int, *, is_first: bool
    ) -> None:
        expected = (tokens,) if is_first else (tokens, self._config.hidden_size)
        if shape != expected:
            raise StageError(f"input of shape {shape}, {expected} expected for these rows")
        if ids and (min(ids) < 0 or max(ids) >= self._config.vocab_size):
            # On a GPU an id outside the table would end the whole process.
            raise StageError(
                f"token ids {min(ids)} to {max(ids)}, the vocabulary is 0 to {self._config.vocab_size - 1}"
            )

    # ------------------------------------------------------------ attention of a mixed wave

    def _attend(self, rows: Sequence[Row], starts: np.ndarray[Any, Any]) -> Attend:
        """Attention for rows of any lengths: single tokens over blocks, prompts over gathered keys."""
        single = [i for i, row in enumerate(rows) if row.count == 1]
        prompts = [i for i, row in enumerate(rows) if row.count > 1]
        parts = []
        if single:
            parts.append(self._of_tokens([rows[i] for i in single], [int(starts[i]) for i in single]))
        if prompts:
            spans = [(int(starts[i]), int(starts[i + 1])) for i in prompts]
            parts.append(self._of_prompts([rows[i] for i in prompts], spans))

        def attend(qkv: torch.Tensor, kv: KeyValues) -> torch.Tensor:
            out = qkv.new_empty(qkv.shape[0], self._config.heads * self._config.head_dim)
            for where, part in parts:
                out[where] = part(qkv[where], kv)
            return out

        return attend

    def _of_tokens(self, rows: Sequence[Row], at: Sequence[int]) -> tuple[slice | torch.Tensor, Attend]:
        config = self._config
        # For as many rows as a graph has: its kernels are built already.
        size = next((size for size in BUCKETS if size >= len(rows)), len(rows))
        attention = PagedAttention(
            size, config.heads, config.kv_heads, config.head_dim, config.window, self.device
        )
        tables = [self.pool.table(row.slot) for row in rows]
        table = np.zeros((len(rows), max(map(len, tables))), dtype=np.int32)
        for i, blocks in enumerate(tables):
            table[i, : len(blocks)] = blocks
        on_device = torch.from_numpy(table).to(self.device)
        lengths = torch.tensor([row.start + 1 for row in rows], dtype=torch.int32, device=self.device)
        return self._where(at), lambda qkv, kv: attention(qkv, kv, on_device, lengths)

    def _where(self, at: Sequence[int]) -> slice | torch.Tensor:
        """Tokens as a slice where they lie side by side, else as an index."""
        if at[-1] - at[0] == len(at) - 1:
            return slice(at[0], at[-1] + 1)
        return torch.tensor(at, device=self.device)

    def _of_prompts(
        self, rows: Sequence[Row], spans: Sequence[tuple[int, int]]
    ) -> tuple[slice | torch.Tensor, Attend]:
        config = self._config
        where = self._where([token for begin, end in spans for token in range(begin, end)])
        ends = [row.start + row.count for row in rows]
        places = torch.from_numpy(
            np.concatenate([self.pool.places(row.slot, 0, end) for row, end in zip(rows, ends, strict=True)])
        ).to(self.device)
        counts = [row.count for row in rows]
        queried, held = (
            torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32, device=self.device)
            for sizes in (counts, ends)
        )
        window = (config.window - 1 if config.window else -1, 0)

        def attend(qkv: torch.Tensor, kv: KeyValues) -> torch.Tensor:
            query = qkv[:, : config.heads]
            keys, values = kv[0][places], kv[1][places]
            found: object
            if self.dtype is torch.float32:
                found = _exact(query, keys, values, counts, ends, config.window)
            else:
                found = varlen_attn(
                    query, keys, values, queried, held, max(counts), max(ends), window_size=window,
                    **_SHARED_HEADS,
                )  # fmt: skip
            assert isinstance(found, torch.Tensor)
            return found.reshape(query.shape[0], -1)

        return where, attend


def _copied(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _exact(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    counts: Sequence[int],
    ends: Sequence[int],
    window: int,
) -> torch.Tensor:
    """Prompts in float32, one after another: the variable-length kernels take half precision only."""
    found: list[torch.Tensor] = []
    token = held = 0
    for count, end in zip(counts, ends, strict=True):
        at = torch.arange(end - count, end, device=query.device)[:, None]
        key_at = torch.arange(end, device=query.device)[None, :]
        mask = (key_at <= at) & ((key_at > at - window) if window else True)
        one = functional.scaled_dot_product_attention(
            query[token : token + count].transpose(0, 1)[None],
            keys[held : held + end].transpose(0, 1)[None],
            values[held : held + end].transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        found.append(one[0].transpose(0, 1))
        token, held = token + count, held + end
    return torch.cat(found)
