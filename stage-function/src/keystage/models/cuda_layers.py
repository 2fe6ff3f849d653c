"""The layers of a span, one after another, whatever attends: shared by graphs and prompts.

`Attend` is the only difference between a decode step (paged, captured) and a pass with prompts (torch's
variable-length attention). The sum of a block's output and the residual is left to the next norm, which
does both in one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from keystage.models.base import StageRole
from keystage.models.cuda_kernels import activate, norm, place
from keystage.models.cuda_pool import KeyValues
from keystage.models.decoder_config import DecoderConfig
from keystage.models.decoder_parameters import Layer, StageParameters
from keystage.models.rope import rotary_table

Attend = Callable[[torch.Tensor, KeyValues], torch.Tensor]
"""Attention of one layer.

Takes qkv [T, heads + 2 * kv_heads, head_dim], its keys and values placed, and the layer's KV state; gives
[T, heads * head_dim].
"""


@dataclass(frozen=True, slots=True)
class Segment:
    """One stage of a span.

    Attributes:
        role: which part of the model.
        parameters: what it multiplies with.
        kv: its layers' keys and values.
    """

    role: StageRole
    parameters: StageParameters
    kv: Sequence[KeyValues]


class Layers:
    """What a span computes between its input and its output.

    Args:
        config: of the model.
        device: CUDA device.
        dtype: type of parameters and activations.
    """

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None
        table = rotary_table(config, device, dtype)
        if table is not None:
            # Whole at once: a graph holds its address.
            table.grow(config.context_length)
            self._rope = table.whole

    def run(
        self,
        segments: Sequence[Segment],
        x: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Runs stages one after another.

        Args:
            segments: the stages, in order.
            x: ids [T] where the first stage has the embedding, else activations [T, hidden].
            positions: int32 [T].
            slots: int32 [T]: pool row of each token.
            attend: attention of one layer.

        Returns:
            Activations [T, hidden]; before the final norm if the last stage has one.
        """
        hidden = self._entered(segments[0].parameters, x, positions)
        delta: torch.Tensor | None = None
        for segment in segments:
            for layer, kv in zip(segment.parameters.layers, segment.kv, strict=True):
                delta = self._layer(layer, kv, hidden, delta, positions, slots, attend)
        return hidden if delta is None else hidden + delta

    def _entered(self, parameters: StageParameters, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if parameters.embedding is None:
            return x.clone()  # it becomes the residual, which grows in place
        hidden = functional.embedding(x, parameters.embedding)
        if parameters.positions is None:
            return hidden
        return hidden + functional.embedding(positions + self.config.position_offset, parameters.positions)

    def _layer(
        self,
        layer: Layer,
        kv: KeyValues,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """One layer; `hidden` takes `delta` in, the layer's own feed-forward output is returned."""
        config = self.config
        qkv = layer.qkv(self._normed(hidden, delta, layer.attention_norm, layer.attention_norm_bias))
        qkv = qkv.view(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        place(qkv, self._rope, positions, slots, kv, norms, config.norm_eps, config.heads)
        attended = layer.out(attend(qkv, kv))
        up = layer.up(self._normed(hidden, attended, layer.mlp_norm, layer.mlp_norm_bias))
        return layer.down(activate(up, config.activation, is_gated=config.is_gated))

    def _normed(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        is_rms = self.config.norm == "rms"
        return norm(hidden, delta, weight, bias, self.config.norm_eps, is_rms=is_rms)

    def logits(self, parameters: StageParameters, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: float32 [T, vocab] of activations [T, hidden]."""
        assert parameters.head is not None
        assert parameters.final_norm is not None
        normed = self._normed(hidden, None, parameters.final_norm, parameters.final_norm_bias)
        return parameters.head(normed).float()
