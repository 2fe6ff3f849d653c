"""From named tensors to the matrices a decoder stage multiplies with.

Between `models.loading`, which reads a stage's file, and `models.decoder`, which runs it. q, k, v
become one matrix, gate and up another. Large tensors are taken in one order for all families:
embedding, positions, then layer by layer qkv, out, up, down, then the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from keystage.models import decoder_layout
from keystage.models.base import StageRole
from keystage.models.decoder_config import DecoderConfig
from keystage.models.decoder_layout import DecoderLayout
from keystage.models.linear import Linear, linear
from keystage.models.named_tensors import NamedTensors
from keystage.models.shared import Keep


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, ready to run.

    Attributes:
        attention_norm: [hidden].
        qkv: hidden to q, k, v side by side.
        out: heads to hidden.
        mlp_norm: [hidden].
        up: hidden to gate and up side by side, or to up alone where there is no gate.
        down: MLP to hidden.
        attention_norm_bias: [hidden], with layer norm.
        mlp_norm_bias: [hidden], with layer norm.
        q_norm: [head_dim], where every head of q has a norm.
        k_norm: [head_dim], where every head of k has a norm.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    up: Linear
    down: Linear
    attention_norm_bias: torch.Tensor | None = None
    mlp_norm_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StageParameters:
    """A stage, ready to run; what belongs to an end of the model is None in other stages.

    Attributes:
        embedding: [vocab, hidden].
        positions: [context + offset, hidden], where positions are learned.
        layers: in order.
        final_norm: [hidden].
        final_norm_bias: [hidden], with layer norm.
        head: hidden to logits.
    """

    embedding: torch.Tensor | None
    positions: torch.Tensor | None
    layers: list[Layer]
    final_norm: torch.Tensor | None
    final_norm_bias: torch.Tensor | None
    head: Linear | None


def gather(
    config: DecoderConfig,
    layout: DecoderLayout,
    role: StageRole,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    share: Keep | None = None,
) -> StageParameters:
    """Checks the tensors of a stage and fuses them; `share`: see `loading.build_stage`.

    Raises:
        BundleError: a tensor is missing or has another shape.
    """
    expected = decoder_layout.stage_tensors(config, layout, role)
    named = NamedTensors(expected, tensors, device, dtype, share)
    embedding = named.table(f"{layout.embedding}.weight") if role.is_first else None
    positions = named.table(f"{layout.positions}.weight") if role.is_first and layout.positions else None
    layers = [_layer(config, layout, index, named) for index in range(role.first_layer, role.end_layer)]
    final_norm, final_norm_bias = _norm(config, named, layout.final_norm) if role.is_last else (None, None)
    head: Linear | None = None
    if role.is_last and (name := f"{layout.head}.weight") in named:
        head = named.linear([name])
    elif role.is_last:
        assert embedding is not None
        head = linear(embedding, None, packed=False)
    return StageParameters(embedding, positions, layers, final_norm, final_norm_bias, head)


def _layer(config: DecoderConfig, layout: DecoderLayout, index: int, named: NamedTensors) -> Layer:
    def fused(parts: Sequence[str], biased: bool) -> Linear:
        names = layout.full(index, parts)
        bias = named.fused([f"{name}.bias" for name in names]) if biased else None
        return named.linear([f"{name}.weight" for name in names], bias)

    def part(name: str) -> str:
        return layout.full(index, [name])[0]

    attention_norm, attention_norm_bias = _norm(config, named, part(layout.attention_norm))
    mlp_norm, mlp_norm_bias = _norm(config, named, part(layout.mlp_norm))
    return Layer(
        attention_norm=attention_norm,
        qkv=fused(layout.qkv, layout.has_qkv_bias),
        out=fused([layout.out], layout.has_out_bias),
        mlp_norm=mlp_norm,
        up=fused(layout.up, layout.has_mlp_bias),
        down=fused([layout.down], layout.has_mlp_bias),
        attention_norm_bias=attention_norm_bias,
        mlp_norm_bias=mlp_norm_bias,
        q_norm=named.vector(f"{part(layout.q_norm)}.weight") if config.has_qk_norm else None,
        k_norm=named.vector(f"{part(layout.k_norm)}.weight") if config.has_qk_norm else None,
    )


def _norm(config: DecoderConfig, named: NamedTensors, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    bias = named.vector(f"{name}.bias") if config.norm == "layer" else None
    return named.vector(f"{name}.weight"), bias
