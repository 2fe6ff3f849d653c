"""The OPT family: its config.json and its names.

Learned positions whose table begins two rows early, layer norms with bias, an MLP without a gate.
The variants that norm after attention or embed into another width (OPT-350m) are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keystage.bundle.errors import SplitError
from keystage.models.config_fields import activation, count, flag, head_size, layers_in, refuse_others
from keystage.models.decoder_config import DecoderConfig
from keystage.models.decoder_family import DecoderFamily
from keystage.models.decoder_layout import DecoderLayout

_TABLE_OFFSET = 2
_NORM_EPS = 1e-5


def describe(config: Mapping[str, Any]) -> tuple[DecoderConfig, DecoderLayout]:
    """Reads a config.json.

    Raises:
        SplitError: a field is missing or impossible, or asks for what is not implemented.
    """
    allowed = {
        "do_layer_norm_before": (None, True),
        "_remove_final_layer_norm": (None, False),
        "layer_norm_elementwise_affine": (None, True),
        "quantization_config": (None,),
    }
    refuse_others(config, "opt", allowed)
    hidden_size, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    if (width := count(config, "word_embed_proj_dim", hidden_size)) != hidden_size:
        raise SplitError(
            f"config.json: word_embed_proj_dim = {width} is not supported for opt: "
            f"it must be hidden_size, {hidden_size}"
        )
    biased = flag(config, "enable_bias", default=True)
    found = DecoderConfig(
        layers=layers_in(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        mlp_size=count(config, "ffn_dim"),
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(hidden_size, heads),
        vocab_size=count(config, "vocab_size"),
        context_length=count(config, "max_position_embeddings", 2048),
        norm_eps=_NORM_EPS,
        norm="layer",
        activation=activation(config, "activation_function", "relu", "opt"),
        is_gated=False,
        rope=None,
        position_offset=_TABLE_OFFSET,
        is_tied=flag(config, "tie_word_embeddings", default=True),
    )
    return found, DecoderLayout(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        final_norm="model.decoder.final_layer_norm",
        head="lm_head",
        layer="model.decoder.layers.{}.",
        attention_norm="self_attn_layer_norm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up=("fc1",),
        down="fc2",
        has_qkv_bias=biased,
        has_out_bias=biased,
        has_mlp_bias=biased,
    )


def _is_derived(name: str) -> bool:
    del name
    return False


OPT = DecoderFamily("opt", ("OPTForCausalLM",), describe, _is_derived)
