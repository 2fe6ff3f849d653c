"""From named tensors to what a BERT stage multiplies with.

Between `models.loading`, which reads a stage's file, and `models.bert`, which runs it. Large tensors
are taken in one order: embedding, positions, token types, then layer by layer qkv, out, up, down,
then the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from keystage.models import bert_layout
from keystage.models.base import StageRole
from keystage.models.bert_config import BertConfig
from keystage.models.linear import Linear, linear
from keystage.models.named_tensors import NamedTensors
from keystage.models.shared import Keep


@dataclass(frozen=True, slots=True)
class Norm:
    """A layer norm's weight and bias, [width] each."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """One encoder layer.

    Attributes:
        qkv: hidden to q, k, v side by side.
        out: heads to hidden.
        attention_norm: after the attention's residual.
        up: hidden to MLP.
        down: MLP to hidden.
        mlp_norm: after the MLP's residual.
    """

    qkv: Linear
    out: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    mlp_norm: Norm


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What makes token ids activations: tables [rows, hidden], and a norm."""

    words: torch.Tensor
    positions: torch.Tensor
    token_types: torch.Tensor
    norm: Norm


@dataclass(frozen=True, slots=True)
class MaskHead:
    """What makes activations logits of tokens."""

    transform: Linear
    norm: Norm
    decode: Linear


@dataclass(frozen=True, slots=True)
class StageParameters:
    """A stage, ready to run; what belongs to an end of the model is None in other stages."""

    embeddings: Embeddings | None
    layers: list[Layer]
    head: MaskHead | None


def gather(
    config: BertConfig,
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
    named = NamedTensors(bert_layout.stage_tensors(config, role), tensors, device, dtype, share)
    embeddings = _embeddings(bert_layout.prefix(config), named) if role.is_first else None
    layers = [
        _layer(bert_layout.layer_prefix(config, layer), named)
        for layer in range(role.first_layer, role.end_layer)
    ]
    is_filling = role.is_last and config.fills_masks
    head = _head(named, None if embeddings is None else embeddings.words) if is_filling else None
    return StageParameters(embeddings, layers, head)


def _norm(named: NamedTensors, name: str) -> Norm:
    return Norm(named.vector(f"{name}.weight"), named.vector(f"{name}.bias"))


def _dense(named: NamedTensors, name: str) -> Linear:
    return named.linear([f"{name}.weight"], named.vector(f"{name}.bias"))


def _embeddings(start: str, named: NamedTensors) -> Embeddings:
    return Embeddings(
        named.table(start + bert_layout.EMBEDDING),
        named.table(start + bert_layout.POSITIONS),
        named.table(start + bert_layout.TYPES),
        _norm(named, start + bert_layout.EMBEDDING_NORM),
    )


def _layer(start: str, named: NamedTensors) -> Layer:
    parts = [f"{start}attention.self.{part}" for part in ("query", "key", "value")]
    bias = named.fused([f"{part}.bias" for part in parts])
    return Layer(
        qkv=named.linear([f"{part}.weight" for part in parts], bias),
        out=_dense(named, f"{start}attention.output.dense"),
        attention_norm=_norm(named, f"{start}attention.output.LayerNorm"),
        up=_dense(named, f"{start}intermediate.dense"),
        down=_dense(named, f"{start}output.dense"),
        mlp_norm=_norm(named, f"{start}output.LayerNorm"),
    )


def _head(named: NamedTensors, embedding: torch.Tensor | None) -> MaskHead:
    transform = _dense(named, bert_layout.TRANSFORM)
    norm = _norm(named, bert_layout.TRANSFORM_NORM)
    bias = named.vector(bert_layout.HEAD_BIAS)
    if bert_layout.HEAD in named:
        return MaskHead(transform, norm, named.linear([bert_layout.HEAD], bias))
    assert embedding is not None
    return MaskHead(transform, norm, linear(embedding, bias, packed=False))
