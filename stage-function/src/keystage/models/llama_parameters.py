"""From named tensors to the matrices a Llama stage multiplies with.

Between `models.loading`, which reads a stage's file, and `models.llama`, which runs it. q, k, v
become one matrix, gate and up another; where they already lie side by side, in the order of
`llama_layout`, the fused matrix is a view and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from keystage.bundle.errors import BundleError
from keystage.models import llama_layout
from keystage.models.base import StageRole
from keystage.models.linear import Linear, is_packable, linear
from keystage.models.llama_config import LlamaConfig
from keystage.models.shared import Keep


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, ready to run."""

    attention_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class StageParameters:
    """A stage, ready to run; embedding, final_norm and head only where the stage holds them."""

    embedding: torch.Tensor | None
    layers: list[Layer]
    final_norm: torch.Tensor | None
    head: Linear | None


class _Named:
    """The tensors of a stage, checked and moved as they are taken."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        share: Keep | None,
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._dtype = dtype
        self._share = share
        # Without packed matrices the shared file is used as it is, and nothing need be copied from it.
        self._detach = share is None or is_packable(device, dtype)
        self._sources = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}

    def take(self, name: str, *, own: bool = False) -> torch.Tensor:
        """One tensor on the device in the stage's type; `own` detaches it from the read buffer."""
        tensor = self._tensors[name]
        copy = own and self._detach and tensor.device == self._device
        return tensor.to(self._device, self._dtype, copy=copy)

    def fused(self, names: Sequence[str]) -> torch.Tensor:
        """Tensors below one another along axis 0, as a view where they lie so in memory."""
        parts = [self._tensors[name] for name in names]
        joined = _adjacent(parts)
        return (torch.cat(parts) if joined is None else joined).to(self._device, self._dtype)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """The multiplication; its matrix is shared where children may need it."""
        return linear(weight, bias, keep=self.keep)

    def keep(self, tensor: torch.Tensor) -> None:
        """Shares a tensor if it is one that the stage has made."""
        if self._share is None or tensor.device.type != "cpu":
            return
        if tensor.is_mkldnn or tensor.untyped_storage().data_ptr() not in self._sources:
            self._share(tensor)


def _adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view over tensors that lie one after another in one storage, or None."""
    first = parts[0]
    end = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.is_contiguous() and part.dtype == first.dtype and part.storage_offset() == end):
            return None
        end += part.numel()
    rows = sum(part.shape[0] for part in parts)
    shape = (rows, *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def gather(
    config: LlamaConfig,
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
    for expected in llama_layout.stage_tensors(config, role):
        tensor = tensors.get(expected.name)
        if tensor is None:
            raise BundleError(f"parameter {expected.name} is missing")
        if tuple(tensor.shape) != expected.shape:
            raise BundleError(
                f"parameter {expected.name}: shape {list(expected.shape)} expected, "
                f"{list(tensor.shape)} found"
            )
    named = _Named(tensors, device, dtype, share)
    embedding = named.take(llama_layout.EMBEDDING, own=True) if role.is_first else None
    if embedding is not None:
        named.keep(embedding)
    layers = [_layer(config, index, named) for index in range(role.first_layer, role.end_layer)]
    final_norm = named.take(llama_layout.FINAL_NORM, own=True) if role.is_last else None
    return StageParameters(embedding, layers, final_norm, _head(role, tensors, named, embedding))


def _layer(config: LlamaConfig, index: int, named: _Named) -> Layer:
    prefix = f"model.layers.{index}."

    def fused(parts: Sequence[str], biased: bool) -> Linear:
        weight = named.fused([f"{prefix}{part}.weight" for part in parts])
        bias = named.fused([f"{prefix}{part}.bias" for part in parts]) if biased else None
        return named.linear(weight, bias)

    return Layer(
        attention_norm=named.take(f"{prefix}input_layernorm.weight", own=True),
        qkv=fused([f"self_attn.{part}_proj" for part in "qkv"], config.has_attention_bias),
        out=fused(["self_attn.o_proj"], config.has_attention_bias),
        mlp_norm=named.take(f"{prefix}post_attention_layernorm.weight", own=True),
        gate_up=fused(["mlp.gate_proj", "mlp.up_proj"], config.has_mlp_bias),
        down=fused(["mlp.down_proj"], config.has_mlp_bias),
    )


def _head(
    role: StageRole, tensors: Mapping[str, torch.Tensor], named: _Named, embedding: torch.Tensor | None
) -> Linear | None:
    if not role.is_last:
        return None
    if llama_layout.HEAD in tensors:
        return named.linear(named.fused([llama_layout.HEAD]))
    assert embedding is not None
    return linear(embedding, None, packed=False)
