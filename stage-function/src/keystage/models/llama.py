"""The Llama family and what shares its shape: Llama, Mistral, Qwen2 and Qwen3, their config.json and names.

Rotary positions, RMS norms, a gated MLP. The four differ in where biases are, in norms over the heads
of q and k, in a sliding window, and in what config.json leaves out. What is not implemented is refused
by name, so that no stage ever computes something else than the model says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keystage.bundle.errors import SplitError
from keystage.models.config_fields import (
    architectures,
    count,
    flag,
    head_size,
    layers_in,
    number,
    refuse_others,
    rope,
)
from keystage.models.decoder_config import DecoderConfig
from keystage.models.decoder_family import DecoderFamily
from keystage.models.decoder_layout import DecoderLayout


@dataclass(frozen=True, slots=True)
class _Member:
    """In what an architecture of the family differs.

    Attributes:
        qkv_bias: whether q, k, v have a bias; None: `attention_bias` says so, for the output too.
        has_mlp_bias_field: whether `mlp_bias` is a field of its config.json.
        has_qk_norm: whether heads of q and k have a norm.
        window: where a sliding window is said: nowhere, in one field, or layer by layer.
        context_length: where config.json leaves it out.
        kv_heads: where config.json leaves them out; 0: as many as heads.
        head_dim: where config.json leaves it out; 0: hidden_size / heads.
    """

    qkv_bias: bool | None = None
    has_mlp_bias_field: bool = False
    has_qk_norm: bool = False
    window: Literal["none", "field", "layers"] = "none"
    context_length: int = 2048
    kv_heads: int = 0
    head_dim: int = 0


_LLAMA = _Member(has_mlp_bias_field=True)
_MEMBERS: Mapping[str, _Member] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _Member(qkv_bias=False, window="field", context_length=4096 * 32, kv_heads=8),
    "Qwen2ForCausalLM": _Member(qkv_bias=True, window="layers", context_length=32768, kv_heads=32),
    "Qwen3ForCausalLM": _Member(
        has_qk_norm=True, window="layers", context_length=32768, kv_heads=32, head_dim=128
    ),
}


def describe(config: Mapping[str, Any]) -> tuple[DecoderConfig, DecoderLayout]:
    """Reads a config.json.

    Raises:
        SplitError: a field is missing or impossible, or asks for what is not implemented.
    """
    named = [name for name in architectures(config) if name in _MEMBERS]
    member = _MEMBERS[named[0]] if named else _LLAMA
    refuse_others(config, "llama", {"quantization_config": (None,), "hidden_act": (None, "silu", "swish")})
    found = _sizes(config, member)
    has_attention_bias = member.qkv_bias is None and flag(config, "attention_bias", default=False)
    return found, DecoderLayout(
        embedding="model.embed_tokens",
        final_norm="model.norm",
        head="lm_head",
        layer="model.layers.{}.",
        attention_norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        q_norm="self_attn.q_norm" if member.has_qk_norm else "",
        k_norm="self_attn.k_norm" if member.has_qk_norm else "",
        has_qkv_bias=has_attention_bias or member.qkv_bias is True,
        has_out_bias=has_attention_bias,
        has_mlp_bias=member.has_mlp_bias_field and flag(config, "mlp_bias", default=False),
    )


def _sizes(config: Mapping[str, Any], member: _Member) -> DecoderConfig:
    heads, hidden_size = count(config, "num_attention_heads"), count(config, "hidden_size")
    kv_heads = count(config, "num_key_value_heads", member.kv_heads or heads)
    if heads % kv_heads:
        raise SplitError(f"config.json: {heads} heads are no multiple of {kv_heads} key-value heads")
    if config.get("head_dim") is None and not member.head_dim:
        head_dim = head_size(hidden_size, heads)
    else:
        head_dim = count(config, "head_dim", member.head_dim)
    if head_dim % 2:
        raise SplitError(f"config.json: head_dim must be even for rotary positions, got {head_dim}")
    context_length = count(config, "max_position_embeddings", member.context_length)
    theta, scaling = rope(config, context_length)
    layers = layers_in(config, "num_hidden_layers")
    return DecoderConfig(
        layers=layers,
        hidden_size=hidden_size,
        mlp_size=count(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=count(config, "vocab_size"),
        context_length=context_length,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope=scaling,
        rope_theta=theta,
        has_qk_norm=member.has_qk_norm,
        window=_window(config, member, layers),
        is_tied=flag(config, "tie_word_embeddings", default=False),
    )


def _window(config: Mapping[str, Any], member: _Member, layers: int) -> int:
    """The sliding window of all layers, 0 for none.

    Raises:
        SplitError: the layers differ, or the architecture knows no window.
    """
    if member.window == "none":
        refuse_others(config, "llama", {"sliding_window": (None,)})
        return 0
    if config.get("sliding_window") is None:
        return 0
    window = count(config, "sliding_window")
    if member.window == "field":
        return window
    is_used = flag(config, "use_sliding_window", default=False)
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise SplitError(f"config.json: max_window_layers must be a whole number, got {first!r}")
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        slides = [kind == "sliding_attention" for kind in kinds[:layers]]
    else:
        slides = [is_used and index >= first for index in range(layers)]
    if not any(slides):
        return 0
    if is_used and all(slides):
        return window
    raise SplitError(
        f"config.json: a sliding window in {sum(slides)} of {layers} layers is not supported for llama: "
        f"use_sliding_window = {is_used}, max_window_layers = {first}"
    )


def _is_derived(name: str) -> bool:
    """Rotary tables, which older versions stored."""
    return name.endswith(".rotary_emb.inv_freq")


LLAMA = DecoderFamily("llama", tuple(_MEMBERS), describe, _is_derived)
