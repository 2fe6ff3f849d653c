"""BERT's config.json, checked and typed: the encoder's sizes, and what its last stage answers.

Read by `keystage split` and again from `pipeline.json` when a stage is built. `BertModel` gives
embeddings: how tokens are pooled stands in a sentence-transformers folder beside config.json, from
where `bundle.sentence` brings it under the key `sentence_transformers`. `BertForMaskedLM` fills masks. What
is not implemented is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from keystage.bundle.errors import SplitError
from keystage.models.config_fields import (
    activation,
    architectures,
    count,
    head_size,
    layers_in,
    number,
    refuse_others,
)
from keystage.models.decoder_config import Activation

Pooling: TypeAlias = Literal["mean", "cls", "max"]
EMBEDDER = "BertModel"
MASK_FILLER = "BertForMaskedLM"
SENTENCE_KEY = "sentence_transformers"
TOP_TOKENS = 100
"""Tokens named for a masked place: all of BERT's 30,522 logits would be 122 kB for each."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes and constants.

    Attributes:
        layers: encoder layers.
        hidden_size: width.
        mlp_size: width inside the MLP.
        heads: attention heads.
        head_dim: elements of a head.
        vocab_size: token ids.
        token_types: rows of the table of token types; only the first is used.
        positions: rows of the table of positions.
        context_length: tokens of an item at most, `positions` or fewer.
        norm_eps: of the layer norms.
        activation: of the MLP.
        fills_masks: whether the last stage names tokens instead of giving an embedding.
        pooling: how the tokens of an item become one embedding.
        is_normalized: whether the embedding is brought to length 1.
        is_tied: whether the head's matrix is the embedding's.
    """

    layers: int
    hidden_size: int
    mlp_size: int
    heads: int
    head_dim: int
    vocab_size: int
    token_types: int
    positions: int
    context_length: int
    norm_eps: float
    activation: Activation
    fills_masks: bool
    pooling: Pooling
    is_normalized: bool
    is_tied: bool


def parse(config: Mapping[str, Any]) -> BertConfig:
    """Reads a config.json.

    Raises:
        SplitError: a field is missing or impossible, or asks for what is not implemented.
    """
    refuse_others(
        config,
        "bert",
        {
            "position_embedding_type": (None, "absolute"),
            "is_decoder": (None, False),
            "add_cross_attention": (None, False),
            "quantization_config": (None,),
        },
    )
    hidden_size = count(config, "hidden_size")
    heads = count(config, "num_attention_heads")
    positions = count(config, "max_position_embeddings", 512)
    sentence = config.get(SENTENCE_KEY) or {}
    if not isinstance(sentence, Mapping):
        raise SplitError(f"config.json: {SENTENCE_KEY} must be an object, got {sentence!r}")
    pooling = sentence.get("pooling", "mean")
    if pooling not in get_args(Pooling):
        known = ", ".join(get_args(Pooling))
        raise SplitError(f"config.json: pooling {pooling!r} is not supported for bert: use {known}")
    return BertConfig(
        layers=layers_in(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        mlp_size=count(config, "intermediate_size"),
        heads=heads,
        head_dim=head_size(hidden_size, heads),
        vocab_size=count(config, "vocab_size"),
        token_types=count(config, "type_vocab_size", 2),
        positions=positions,
        context_length=min(
            positions, count({"max_tokens": sentence.get("max_tokens") or positions}, "max_tokens")
        ),
        norm_eps=number(config, "layer_norm_eps", 1e-12),
        activation=activation(config, "hidden_act", "gelu", "bert"),
        fills_masks=MASK_FILLER in architectures(config),
        pooling=cast("Pooling", pooling),
        is_normalized=bool(sentence.get("normalize", True)),
        is_tied=config.get("tie_word_embeddings") is not False,
    )
