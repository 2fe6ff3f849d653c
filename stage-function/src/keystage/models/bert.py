"""BERT as a single-pass family: embeddings of texts, or the tokens that fill a mask.

Loaded by `models.loading`, driven by the worker batch by batch. An item is int64 token ids [T] at first
and an activation [T, hidden] between stages. A `BertModel` ends in one embedding, float32 [hidden].
A `BertForMaskedLM` names tokens only at the places it is asked for: its first stage may be given int64
[2, T], ids and a 1 where a token is wanted (all places without that row); the mark travels as one more
column of the activation, so that the last stage multiplies with the vocabulary at these places alone.
It answers float32 [places, 2, k]: log probabilities of the k likeliest tokens, and their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from keystage.models import bert_config, bert_layout
from keystage.models.base import Execution, ModelShape, StageError, StageRole, StageTensor
from keystage.models.bert_config import TOP_TOKENS, BertConfig
from keystage.models.bert_parameters import Layer, Norm, StageParameters, gather
from keystage.models.ragged import RaggedBatch
from keystage.models.shared import Keep

MOST_ITEMS = 4096
"""Whatever the worker takes: a larger batch only makes the matrices taller."""
_SAMPLE_TOKENS = 24


class BertStage:
    """Layers [first, end) of a BERT, with the embeddings and the head where they belong."""

    def __init__(
        self,
        config: BertConfig,
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
        self.most_items = MOST_ITEMS
        self.input_name = "ids" if role.is_first else "hidden"
        self.output_name = "hidden"
        if role.is_last:
            self.output_name = "tokens" if config.fills_masks else "embedding"

    @torch.inference_mode()
    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `SinglePassStage.forward`."""
        if not inputs:
            return []
        batch = RaggedBatch([self._tokens_of(item) for item in inputs], self.device)
        hidden, wanted = self._entered(batch, batch.ordered(inputs))
        for layer in self._parameters.layers:
            hidden = self._layer(layer, hidden, batch)
        if not self.role.is_last:
            if wanted is not None:
                hidden = torch.cat([hidden, wanted[:, None].to(hidden)], 1)
            return batch.restored(torch.split(hidden, batch.counts))
        if self._config.fills_masks:
            assert wanted is not None
            return batch.restored(self._likeliest(hidden, wanted, batch))
        return batch.restored(self._embedded(hidden, batch).unbind())

    def samples(self, items: int, tokens: int = 0) -> list[torch.Tensor]:
        """See `SinglePassStage.samples`: by choice items of a dozen and two dozen tokens."""
        generator = torch.Generator().manual_seed(items)
        lengths = [tokens or _SAMPLE_TOKENS // (1 + item % 2) for item in range(items)]
        counts = [min(self._config.context_length, length) for length in lengths]
        if self.role.is_first:
            return [torch.randint(self._config.vocab_size, (count,), generator=generator) for count in counts]
        made = [torch.randn(count, self._width, generator=generator) for count in counts]
        if self._config.fills_masks:
            for activation in made:
                activation[:, -1] = 1.0
        return [activation.to(self.device, self.dtype) for activation in made]

    @property
    def _width(self) -> int:
        """Columns of an activation."""
        return self._config.hidden_size + self._config.fills_masks

    def _tokens_of(self, item: torch.Tensor) -> int:
        """Checks an input and gives its number of tokens."""
        shape, most = tuple(item.shape), self._config.context_length
        if self.role.is_first:
            is_marked = len(shape) == 2 and shape[0] == 2 and self._config.fills_masks
            expected = "[T] or [2, T]" if self._config.fills_masks else "[T]"
            fits = (len(shape) == 1 or is_marked) and item.dtype is torch.int64
            tokens = shape[-1] if shape else 0
            kind: torch.dtype = torch.int64
        else:
            expected, kind = f"[T, {self._width}]", self.dtype
            fits = len(shape) == 2 and shape[1] == self._width and item.dtype is self.dtype
            tokens = shape[0] if shape else 0
        if not fits or not 1 <= tokens <= most:
            raise StageError(
                f"an item of type {_named(item.dtype)} and shape {list(shape)}: {_named(kind)} {expected} is "
                f"expected, T from 1 to {most}"
            )
        return tokens

    def _entered(
        self, batch: RaggedBatch, items: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Activations [tokens, hidden], and for masks [tokens] that are not 0 where a token is wanted."""
        embeddings = self._parameters.embeddings
        if embeddings is None:
            joined = (items[0] if len(items) == 1 else torch.cat(list(items))).to(self.device)
            if not self._config.fills_masks:
                return joined, None
            return joined[:, :-1].contiguous(), joined[:, -1]
        rows = [item if item.dim() == 2 else item[None] for item in items]
        ids = torch.cat([row[0] for row in rows])
        least, greatest = int(ids.min()), int(ids.max())
        if least < 0 or greatest >= self._config.vocab_size:
            raise StageError(
                f"token ids {least} to {greatest}, the vocabulary is 0 to {self._config.vocab_size - 1}"
            )
        hidden = functional.embedding(ids.to(self.device), embeddings.words)
        hidden = hidden + functional.embedding(batch.positions(), embeddings.positions)
        hidden = self._normed(hidden + embeddings.token_types[0], embeddings.norm)
        if not self._config.fills_masks:
            return hidden, None
        return hidden, torch.cat([row[1] if len(row) == 2 else torch.ones_like(row[0]) for row in rows])

    def _layer(self, layer: Layer, hidden: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        config = self._config
        qkv = layer.qkv(hidden).view(batch.tokens, 3, config.heads, config.head_dim)
        hidden = self._normed(hidden + layer.out(batch.attend(qkv)), layer.attention_norm)
        return self._normed(hidden + layer.down(self._activated(layer.up(hidden))), layer.mlp_norm)

    def _embedded(self, hidden: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """One embedding an item, float32 [items, hidden]."""
        if self._config.pooling == "cls":
            pooled = hidden[batch.starts()].float()
        else:
            # `unsafe` leaves out a check of the lengths, for which a device would be waited for.
            pooled = torch.segment_reduce(
                hidden.float(), self._config.pooling, lengths=batch.lengths(), unsafe=True
            )
        return functional.normalize(pooled, dim=-1) if self._config.is_normalized else pooled

    def _likeliest(
        self, hidden: torch.Tensor, wanted: torch.Tensor, batch: RaggedBatch
    ) -> list[torch.Tensor]:
        """The likeliest tokens of every wanted place, item by item."""
        head = self._parameters.head
        assert head is not None
        marks = (wanted != 0).cpu()
        places = [int(part.sum()) for part in torch.split(marks, batch.counts)]
        chosen = hidden[marks.nonzero().view(-1).to(hidden.device)]
        transformed = self._normed(self._activated(head.transform(chosen)), head.norm)
        log_probabilities = functional.log_softmax(head.decode(transformed).float(), -1)
        found = log_probabilities.topk(min(TOP_TOKENS, self._config.vocab_size))
        return list(torch.split(torch.stack([found.values, found.indices.float()], 1), places))

    def _normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return functional.layer_norm(
            x, (self._config.hidden_size,), norm.weight, norm.bias, self._config.norm_eps
        )

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        match self._config.activation:
            case "gelu":
                return functional.gelu(x)
            case "gelu_tanh":
                return functional.gelu(x, approximate="tanh")
            case "relu":
                return functional.relu(x)
            case "silu":
                return functional.silu(x)


class BertFamily:
    """`keystage.models.single_pass.SinglePassFamily` for BERT."""

    name = "bert"
    architectures = (bert_config.EMBEDDER, bert_config.MASK_FILLER)
    execution: Execution = "single-pass"

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """See `Family.shape`."""
        found = bert_config.parse(config)
        return ModelShape(found.layers, found.hidden_size, found.vocab_size, found.context_length)

    def stage_tensors(self, config: Mapping[str, Any], role: StageRole) -> list[StageTensor]:
        """See `Family.stage_tensors`."""
        return bert_layout.stage_tensors(bert_config.parse(config), role)

    def end_parameters(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """See `Family.end_parameters`."""
        found = bert_config.parse(config)
        first = sum(_elements(tensor) for tensor in bert_layout.first_tensors(found))
        last = sum(_elements(tensor) for tensor in bert_layout.last_tensors(found, holds_embedding=False))
        return first, last

    def is_derived(self, config: Mapping[str, Any], name: str) -> bool:
        """See `Family.is_derived`."""
        return bert_layout.is_derived(bert_config.parse(config), name)

    def activation_elements(self, config: Mapping[str, Any], end_layer: int) -> int:
        """See `SinglePassFamily.activation_elements`."""
        del end_layer
        found = bert_config.parse(config)
        return found.context_length * (found.hidden_size + found.fills_masks)

    def build(
        self,
        config: Mapping[str, Any],
        role: StageRole,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        share: Keep | None = None,
    ) -> BertStage:
        """See `Family.build`."""
        found = bert_config.parse(config)
        return BertStage(found, role, gather(found, role, tensors, device, dtype, share), device, dtype)


BERT = BertFamily()


def _elements(tensor: StageTensor) -> int:
    return torch.Size(tensor.shape).numel()


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
