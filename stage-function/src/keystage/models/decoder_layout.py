"""Names, shapes and file order of a decoder's parameters, from a family's own names for them.

The order in a stage's file is chosen so that q, k, v (and gate, up) lie side by side: a loader
views them as one matrix, without a copy, and runs one multiplication for them. Family modules say
the names, `bundle.plan` and `models.decoder_parameters` ask for the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keystage.models.base import StageRole, StageTensor
from keystage.models.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class DecoderLayout:
    """How a family names a decoder's parameters; parts are named without `.weight` and `.bias`.

    Attributes:
        embedding: the token embedding.
        final_norm: the norm before the head.
        head: the head.
        layer: what a layer's parts begin with; `{}` stands for its index.
        attention_norm: part of a layer, as all below: the norm before attention.
        qkv: q, k and v, or the one matrix that holds the three below one another.
        out: the projection after attention.
        mlp_norm: the norm before the MLP.
        up: gate and up, or the one matrix of an MLP without a gate.
        down: the MLP's last projection.
        positions: the table of learned positions, empty for none.
        q_norm: the norm of q's heads, empty for none.
        k_norm: the norm of k's heads, empty for none.
        has_qkv_bias: whether q, k, v have a bias.
        has_out_bias: whether the projection after attention has one.
        has_mlp_bias: whether the MLP's projections have one.
        is_transposed: the model stores the matrices of its layers [in, out].
    """

    embedding: str
    final_norm: str
    head: str
    layer: str
    attention_norm: str
    qkv: tuple[str, ...]
    out: str
    mlp_norm: str
    up: tuple[str, ...]
    down: str
    positions: str = ""
    q_norm: str = ""
    k_norm: str = ""
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    is_transposed: bool = False

    def full(self, layer: int, parts: Sequence[str]) -> list[str]:
        """Names of parts of a layer, with what they begin with."""
        return [self.layer.format(layer) + part for part in parts]


def stage_tensors(config: DecoderConfig, layout: DecoderLayout, role: StageRole) -> list[StageTensor]:
    """Parameters of a stage, in file order.

    With tied embeddings the first and the last stage both hold the matrix, the last one under the
    head's name; a single stage that is both holds it once.
    """
    tensors: list[StageTensor] = []
    matrix = (config.vocab_size, config.hidden_size)
    if role.is_first:
        tensors.append(_tensor(f"{layout.embedding}.weight", matrix))
        if layout.positions:
            rows = config.context_length + config.position_offset
            tensors.append(_tensor(f"{layout.positions}.weight", (rows, config.hidden_size)))
    for layer in range(role.first_layer, role.end_layer):
        tensors += _layer(config, layout, layer)
    if role.is_last:
        tensors += _norm(config, layout.final_norm)
        if not config.is_tied:
            tensors.append(_tensor(f"{layout.head}.weight", matrix))
        elif not role.is_first:
            tensors.append(StageTensor(f"{layout.head}.weight", f"{layout.embedding}.weight", matrix))
    return tensors


def end_parameters(config: DecoderConfig, layout: DecoderLayout) -> tuple[int, int]:
    """Parameters of the embedding and positions, and of the final norm and head (a tied one included)."""
    matrix = config.vocab_size * config.hidden_size
    positions = (config.context_length + config.position_offset) * config.hidden_size
    norm = (2 if config.norm == "layer" else 1) * config.hidden_size
    return matrix + (positions if layout.positions else 0), matrix + norm


def _layer(config: DecoderConfig, layout: DecoderLayout, layer: int) -> list[StageTensor]:
    hidden, queried = config.hidden_size, config.heads * config.head_dim
    keyed = config.kv_heads * config.head_dim
    qkv = [queried, keyed, keyed] if len(layout.qkv) > 1 else [config.qkv_width]
    up = [config.up_width // len(layout.up)] * len(layout.up)
    named = layout.full

    def matrices(parts: Sequence[str], rows: Sequence[int], columns: int) -> list[StageTensor]:
        names = named(layer, parts)
        return [
            _tensor(f"{name}.weight", (height, columns), is_transposed=layout.is_transposed)
            for name, height in zip(names, rows, strict=True)
        ]

    def biases(has: bool, parts: Sequence[str], rows: Sequence[int]) -> list[StageTensor]:
        names = named(layer, parts) if has else []
        return [
            _tensor(f"{name}.bias", (height,))
            for name, height in zip(names, rows if has else [], strict=True)
        ]

    tensors = _norm(config, *named(layer, [layout.attention_norm]))
    tensors += matrices(layout.qkv, qkv, hidden) + matrices([layout.out], [hidden], queried)
    tensors += biases(layout.has_qkv_bias, layout.qkv, qkv)
    tensors += biases(layout.has_out_bias, [layout.out], [hidden])
    if config.has_qk_norm:
        norms = named(layer, [layout.q_norm, layout.k_norm])
        tensors += [_tensor(f"{name}.weight", (config.head_dim,)) for name in norms]
    tensors += _norm(config, *named(layer, [layout.mlp_norm]))
    tensors += matrices(layout.up, up, hidden) + matrices([layout.down], [hidden], config.mlp_size)
    tensors += biases(layout.has_mlp_bias, layout.up, up)
    return tensors + biases(layout.has_mlp_bias, [layout.down], [hidden])


def _norm(config: DecoderConfig, name: str) -> list[StageTensor]:
    parts = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return [_tensor(f"{name}.{part}", (config.hidden_size,)) for part in parts]


def _tensor(name: str, shape: tuple[int, ...], *, is_transposed: bool = False) -> StageTensor:
    return StageTensor(name, name, shape, is_transposed)
