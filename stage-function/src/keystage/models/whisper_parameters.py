"""From named tensors to what a Whisper stage multiplies with.

Between `models.loading`, which reads a stage's file, and `models.whisper`, which runs it. q, k, v
become one matrix; k, which has no bias, gets zeros in the fused one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from keystage.models import whisper_layout as layout
from keystage.models.base import StageRole
from keystage.models.linear import Linear, linear
from keystage.models.named_tensors import NamedTensors
from keystage.models.shared import Keep
from keystage.models.whisper_config import WhisperConfig


class Norm(NamedTuple):
    """A layer norm."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer over frames."""

    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer over tokens; `frame_*` is its attention to the frames."""

    attention_norm: Norm
    qkv: Linear
    out: Linear
    frame_norm: Norm
    frame_kv: Linear
    frame_query: Linear
    frame_out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Entrance:
    """What the first stage holds beside its layers.

    Attributes:
        convolutions: weight [out, in, 3] and bias of both.
        frame_positions: [frames, hidden].
        embedding: [vocab, hidden].
        token_positions: [token positions, hidden].
    """

    convolutions: tuple[Norm, Norm]
    frame_positions: torch.Tensor
    embedding: torch.Tensor
    token_positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class StageParameters:
    """A stage, ready to run; what is not the stage's is None."""

    entrance: Entrance | None
    encoder: list[EncoderLayer]
    encoder_norm: Norm | None
    decoder: list[DecoderLayer]
    final_norm: Norm | None
    head: Linear | None


def gather(
    config: WhisperConfig,
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
    named = NamedTensors(layout.stage_tensors(config, role), tensors, device, dtype, share)
    entrance = _entrance(named) if role.is_first else None
    encoder: list[EncoderLayer] = []
    decoder: list[DecoderLayer] = []
    for layer in range(role.first_layer, role.end_layer):
        prefix = layout.layer_prefix(config, layer)
        if layer < config.encoder_layers:
            encoder.append(_encoder_layer(named, prefix))
        else:
            decoder.append(_decoder_layer(named, prefix))
    ends_encoder = role.first_layer < config.encoder_layers <= role.end_layer
    encoder_norm = _norm(named, layout.ENCODER_NORM) if ends_encoder else None
    if not role.is_last:
        return StageParameters(entrance, encoder, encoder_norm, decoder, None, None)
    # A stage that is the first one too multiplies with the embedding itself.
    head = named.linear([layout.HEAD]) if entrance is None else linear(entrance.embedding, None, packed=False)
    return StageParameters(entrance, encoder, encoder_norm, decoder, _norm(named, layout.FINAL_NORM), head)


def _entrance(named: NamedTensors) -> Entrance:
    first, second = (_norm(named, name) for name in layout.CONVOLUTIONS)
    return Entrance(
        (first, second),
        named.vector(layout.FRAME_POSITIONS),
        named.table(layout.EMBEDDING),
        named.vector(layout.TEXT_POSITIONS),
    )


def _norm(named: NamedTensors, name: str) -> Norm:
    return Norm(named.vector(f"{name}.weight"), named.vector(f"{name}.bias"))


def _encoder_layer(named: NamedTensors, prefix: str) -> EncoderLayer:
    return EncoderLayer(
        attention_norm=_norm(named, f"{prefix}self_attn_layer_norm"),
        qkv=_fused(named, f"{prefix}self_attn", "qkv"),
        out=_biased(named, f"{prefix}self_attn.out_proj"),
        mlp_norm=_norm(named, f"{prefix}final_layer_norm"),
        up=_biased(named, f"{prefix}fc1"),
        down=_biased(named, f"{prefix}fc2"),
    )


def _decoder_layer(named: NamedTensors, prefix: str) -> DecoderLayer:
    return DecoderLayer(
        attention_norm=_norm(named, f"{prefix}self_attn_layer_norm"),
        qkv=_fused(named, f"{prefix}self_attn", "qkv"),
        out=_biased(named, f"{prefix}self_attn.out_proj"),
        frame_norm=_norm(named, f"{prefix}encoder_attn_layer_norm"),
        frame_kv=_fused(named, f"{prefix}encoder_attn", "kv"),
        frame_query=_biased(named, f"{prefix}encoder_attn.q_proj"),
        frame_out=_biased(named, f"{prefix}encoder_attn.out_proj"),
        mlp_norm=_norm(named, f"{prefix}final_layer_norm"),
        up=_biased(named, f"{prefix}fc1"),
        down=_biased(named, f"{prefix}fc2"),
    )


def _biased(named: NamedTensors, name: str) -> Linear:
    return named.linear([f"{name}.weight"], named.vector(f"{name}.bias"))


def _fused(named: NamedTensors, name: str, parts: str) -> Linear:
    """The projections `parts` of an attention as one matrix."""
    values = named.vector(f"{name}.v_proj.bias")
    biases = {"v": values, "k": torch.zeros_like(values)}
    if "q" in parts:
        biases["q"] = named.vector(f"{name}.q_proj.bias")
    bias = torch.cat([biases[part] for part in parts])
    return named.linear([f"{name}.{part}_proj.weight" for part in parts], bias)
