"""The Llama family: a stage in torch, with ragged batches and its own KV state.

Loaded by `models.loading`, driven by the worker wave by wave. All matrix multiplications run once
over the flattened tokens of all rows; attention runs per row, because each session keeps its keys
and values in a buffer of its own (measured on CPU: gathering them into one padded batch costs more
than it saves). This module samples nothing and knows no sessions, only slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from keystage.models import llama_config, llama_layout
from keystage.models.base import ModelShape, Row, StageError, StageRole, StageTensor
from keystage.models.kv import KvSlots
from keystage.models.llama_config import LlamaConfig
from keystage.models.llama_parameters import Layer, StageParameters, gather
from keystage.models.rope import RotaryTable, frequencies, rotate_
from keystage.models.shared import Keep


class LlamaStage:
    """Layers [first, end) of a Llama model, with the embedding and the head where they belong."""

    def __init__(
        self,
        config: LlamaConfig,
        role: StageRole,
        parameters: StageParameters,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._parameters = parameters
        self.role = role
        self.shape = ModelShape(config.layers, config.hidden_size, config.vocab_size, config.context_length)
        self.device = device
        self.dtype = dtype
        group = config.heads // config.kv_heads
        self._slots = KvSlots(
            role.end_layer - role.first_layer, config.kv_heads, group, config.head_dim, device, dtype
        )
        self._rope = RotaryTable(frequencies(config.head_dim, config.rope_theta, config.rope), device, dtype)

    @property
    def kv_token_bytes(self) -> int:
        """See `LoadedStage.kv_token_bytes`."""
        layers = self.role.end_layer - self.role.first_layer
        return 2 * layers * self._config.kv_heads * self._config.head_dim * self.dtype.itemsize

    @property
    def config(self) -> LlamaConfig:
        """Sizes and constants."""
        return self._config

    @property
    def parameters(self) -> StageParameters:
        """What it multiplies with; `llama_decode` runs on the same."""
        return self._parameters

    @property
    def kv(self) -> KvSlots:
        """KV state of its sessions."""
        return self._slots

    @torch.inference_mode()
    def open(self, slot: int, capacity: int, buffers: list[torch.Tensor] | None = None) -> None:
        """See `StageModel.open`; `buffers`: see `KvSlots.open`."""
        if not 1 <= capacity <= self._config.context_length:
            raise StageError(
                f"slot {slot}: capacity must be 1 to {self._config.context_length} tokens, got {capacity}"
            )
        self._rope.grow(capacity)
        self._slots.open(slot, capacity, buffers)

    def close(self, slot: int) -> None:
        """See `StageModel.close`."""
        self._slots.close(slot)

    @torch.inference_mode()
    def forward(self, x: torch.Tensor, rows: Sequence[Row], want: Sequence[int]) -> torch.Tensor:
        """See `StageModel.forward`."""
        spans = self._slots.spans(rows)
        tokens = sum(row.count for row in rows)
        hidden = self._entered(x, tokens)
        if not tokens:
            return self._left(hidden, rows, [])
        positions = torch.cat([torch.arange(row.start, row.start + row.count) for row in rows])
        cos, sin = self._rope.at(positions.to(self.device))
        config = self._config
        queried = config.heads * config.head_dim
        for index, layer in enumerate(self._parameters.layers):
            qkv = layer.qkv(self._normed(hidden, layer.attention_norm))
            qkv = qkv.view(tokens, config.heads + 2 * config.kv_heads, config.head_dim)
            rotate_(qkv[:, : config.heads + config.kv_heads], cos, sin)
            attended = qkv.new_empty(tokens, config.heads, config.head_dim)
            for span in spans:
                self._slots.attend(index, span, qkv, attended)
            hidden = hidden + layer.out(attended.view(tokens, queried))
            hidden = hidden + self._mlp(layer, self._normed(hidden, layer.mlp_norm))
        self._slots.commit(rows)
        return self._left(hidden, rows, want)

    def _entered(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """Checks the input and turns ids into embeddings."""
        expected = (tokens,) if self.role.is_first else (tokens, self._config.hidden_size)
        if tuple(x.shape) != expected:
            raise StageError(f"input of shape {tuple(x.shape)}, {expected} expected for these rows")
        embedding = self._parameters.embedding
        if embedding is None:
            return x.to(self.device, self.dtype)
        if tokens:
            self.check_ids(int(x.min()), int(x.max()))
        return functional.embedding(x.to(self.device, torch.int64), embedding)

    def check_ids(self, least: int, greatest: int) -> None:
        """Refuses ids outside the vocabulary: on a GPU they would end the whole process."""
        if least < 0 or greatest >= self._config.vocab_size:
            raise StageError(
                f"token ids {least} to {greatest}, the vocabulary is 0 to {self._config.vocab_size - 1}"
            )

    def _left(self, hidden: torch.Tensor, rows: Sequence[Row], want: Sequence[int]) -> torch.Tensor:
        """The activation as it leaves: unchanged, or as logits of the wanted rows."""
        head = self._parameters.head
        if head is None:
            return hidden
        if not want:
            return torch.empty(0, self._config.vocab_size, device=self.device)
        ends: list[int] = []
        for row in rows:
            ends.append((ends[-1] if ends else -1) + row.count)
        newest = hidden[torch.tensor([ends[index] for index in want], device=self.device)]
        return head(self._normed(newest, self._parameters.final_norm)).float()

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return functional.rms_norm(x, (self._config.hidden_size,), weight, self._config.norm_eps)

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(x).chunk(2, -1)
        return layer.down(functional.silu(gate).mul_(up))


class LlamaFamily:
    """`keystage.models.base.Family` for `LlamaForCausalLM`."""

    name = "llama"
    architectures = ("LlamaForCausalLM",)

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """See `Family.shape`."""
        parsed = llama_config.parse(config)
        return ModelShape(parsed.layers, parsed.hidden_size, parsed.vocab_size, parsed.context_length)

    def stage_tensors(self, config: Mapping[str, Any], role: StageRole) -> list[StageTensor]:
        """See `Family.stage_tensors`."""
        return llama_layout.stage_tensors(llama_config.parse(config), role)

    def end_parameters(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """See `Family.end_parameters`."""
        parsed = llama_config.parse(config)
        matrix = parsed.vocab_size * parsed.hidden_size
        return matrix, matrix + parsed.hidden_size

    def is_derived(self, config: Mapping[str, Any], name: str) -> bool:
        """See `Family.is_derived`."""
        return llama_layout.is_derived(llama_config.parse(config), name)

    def build(
        self,
        config: Mapping[str, Any],
        role: StageRole,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        share: Keep | None = None,
    ) -> LlamaStage:
        """See `Family.build`."""
        parsed = llama_config.parse(config)
        return LlamaStage(parsed, role, gather(parsed, role, tensors, device, dtype, share), device, dtype)
