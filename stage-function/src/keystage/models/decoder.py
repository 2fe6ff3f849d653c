"""A decoder stage in torch, with ragged batches and its own KV state: the eager one, for any device.

Built by `models.decoder_family` from a family's names, driven by the worker wave by wave. All matrix
multiplications run once over the flattened tokens of all rows; attention runs per row, because each
session keeps its keys and values in a buffer of its own (measured on CPU: gathering them into one
padded batch costs more than it saves). This module samples nothing, knows no family and no sessions,
only slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional

from keystage.models.base import ModelShape, Row, StageError, StageRole
from keystage.models.decoder_config import Activation, DecoderConfig
from keystage.models.decoder_parameters import Layer, StageParameters
from keystage.models.kv import KvSlots
from keystage.models.rope import RotaryTable, rotary_table, rotate_


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
}


class DecoderStage:
    """Layers [first, end) of a decoder, with the embedding and the head where they belong."""

    def __init__(
        self,
        config: DecoderConfig,
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
        self._slots = KvSlots(
            role.end_layer - role.first_layer,
            config.kv_heads,
            config.heads // config.kv_heads,
            config.head_dim,
            device,
            dtype,
            window=config.window,
        )
        self._rope: RotaryTable | None = rotary_table(config, device, dtype)
        self._activate = ACTIVATIONS[config.activation]

    @property
    def kv_token_bytes(self) -> int:
        """See `LoadedStage.kv_token_bytes`."""
        layers = self.role.end_layer - self.role.first_layer
        return 2 * layers * self._config.kv_heads * self._config.head_dim * self.dtype.itemsize

    @property
    def config(self) -> DecoderConfig:
        """Sizes and constants."""
        return self._config

    @property
    def parameters(self) -> StageParameters:
        """What it multiplies with; engines for one kind of device run on the same."""
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
        if self._rope is not None:
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
        positions = positions.to(self.device)
        turn = None if self._rope is None else self._rope.at(positions)
        learned = self._parameters.positions
        if learned is not None:
            hidden = hidden + functional.embedding(positions + self._config.position_offset, learned)
        config = self._config
        for index, layer in enumerate(self._parameters.layers):
            normed = self._normed(hidden, layer.attention_norm, layer.attention_norm_bias)
            qkv = layer.qkv(normed).view(tokens, config.heads + 2 * config.kv_heads, config.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                self._norm_heads(qkv, layer.q_norm, layer.k_norm)
            if turn is not None:
                rotate_(qkv[:, : config.heads + config.kv_heads], *turn)
            attended = qkv.new_empty(tokens, config.heads, config.head_dim)
            for span in spans:
                self._slots.attend(index, span, qkv, attended)
            hidden = hidden + layer.out(attended.view(tokens, config.heads * config.head_dim))
            hidden = hidden + self._mlp(layer, self._normed(hidden, layer.mlp_norm, layer.mlp_norm_bias))
        self._slots.commit(rows)
        return self._left(hidden, rows, want)

    def check_ids(self, least: int, greatest: int) -> None:
        """Refuses ids outside the vocabulary: on a GPU they would end the whole process."""
        if least < 0 or greatest >= self._config.vocab_size:
            raise StageError(
                f"token ids {least} to {greatest}, the vocabulary is 0 to {self._config.vocab_size - 1}"
            )

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

    def _left(self, hidden: torch.Tensor, rows: Sequence[Row], want: Sequence[int]) -> torch.Tensor:
        """The activation as it leaves: unchanged, or as logits of the wanted rows."""
        parameters = self._parameters
        if parameters.head is None:
            return hidden
        if not want:
            return torch.empty(0, self._config.vocab_size, device=self.device)
        ends: list[int] = []
        for row in rows:
            ends.append((ends[-1] if ends else -1) + row.count)
        newest = hidden[torch.tensor([ends[index] for index in want], device=self.device)]
        normed = self._normed(newest, parameters.final_norm, parameters.final_norm_bias)
        return parameters.head(normed).float()

    def _normed(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        config = self._config
        if config.norm == "rms":
            return functional.rms_norm(x, (config.hidden_size,), weight, config.norm_eps)
        return functional.layer_norm(x, (config.hidden_size,), weight, bias, config.norm_eps)

    def _norm_heads(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        """Norms every head of q and k in place; qkv: [T, heads + 2 * kv_heads, head_dim]."""
        heads, width, eps = self._config.heads, (self._config.head_dim,), self._config.norm_eps
        queries, keys = qkv[:, :heads], qkv[:, heads : heads + self._config.kv_heads]
        queries.copy_(functional.rms_norm(queries, width, q_norm, eps))
        keys.copy_(functional.rms_norm(keys, width, k_norm, eps))

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        if not self._config.is_gated:
            return layer.down(self._activate(layer.up(x)))
        gate, up = layer.up(x).chunk(2, -1)
        return layer.down(self._activate(gate).mul_(up))
