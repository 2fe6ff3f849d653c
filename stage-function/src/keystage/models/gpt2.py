"""The GPT-2 family: its config.json and its names.

Learned positions, layer norms with bias, an MLP without a gate, q, k and v in one matrix. Its
matrices are stored [in, out] and turned when a bundle is written. Older files hold masks that follow
from the context length; they are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keystage.models.config_fields import activation, count, flag, head_size, layers_in, number, refuse_others
from keystage.models.decoder_config import DecoderConfig
from keystage.models.decoder_family import DecoderFamily
from keystage.models.decoder_layout import DecoderLayout


def describe(config: Mapping[str, Any]) -> tuple[DecoderConfig, DecoderLayout]:
    """Reads a config.json.

    Raises:
        SplitError: a field is missing or impossible, or asks for what is not implemented.
    """
    allowed = {
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
        "reorder_and_upcast_attn": (None, False),
        "add_cross_attention": (None, False),
        "quantization_config": (None,),
    }
    refuse_others(config, "gpt2", allowed)
    hidden_size, heads = count(config, "n_embd"), count(config, "n_head")
    found = DecoderConfig(
        layers=layers_in(config, "n_layer"),
        hidden_size=hidden_size,
        mlp_size=count(config, "n_inner", 4 * hidden_size),
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(hidden_size, heads),
        vocab_size=count(config, "vocab_size"),
        context_length=count(config, "n_positions", 1024),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        norm="layer",
        activation=activation(config, "activation_function", "gelu_new", "gpt2"),
        is_gated=False,
        rope=None,
        is_tied=flag(config, "tie_word_embeddings", default=True),
    )
    return found, DecoderLayout(
        embedding="transformer.wte",
        positions="transformer.wpe",
        final_norm="transformer.ln_f",
        head="lm_head",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        mlp_norm="ln_2",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        has_qkv_bias=True,
        has_out_bias=True,
        has_mlp_bias=True,
        is_transposed=True,
    )


def _is_derived(name: str) -> bool:
    """The causal mask and its value, which older versions stored."""
    return name.endswith((".attn.bias", ".attn.masked_bias"))


GPT2 = DecoderFamily("gpt2", ("GPT2LMHeadModel",), describe, _is_derived)
