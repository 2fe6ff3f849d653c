"""The Llama family's config.json, checked and typed.

Read from the model by `keystage split`, and again from `pipeline.json` when a stage is built.
What is not implemented is refused here by name, so that no stage ever computes something else
than the model says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keystage.bundle.errors import SplitError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    Attributes:
        kind: `default`, `linear` or `llama3`.
        factor: stretch.
        low_freq_factor: llama3: wavelengths above original_context / low are stretched fully.
        high_freq_factor: llama3: wavelengths below original_context / high are left alone.
        original_context: llama3: context length of the pre-training.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and constants; names follow config.json where it has one."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope: RopeScaling
    is_tied: bool
    has_attention_bias: bool
    has_mlp_bias: bool

    @property
    def qkv_width(self) -> int:
        """Outputs of the fused q, k, v projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def parse(config: Mapping[str, Any]) -> LlamaConfig:
    """Reads a config.json.

    Raises:
        SplitError: a field is missing or impossible, or asks for what is not implemented.
    """
    for key, allowed in (
        ("hidden_act", (None, "silu", "swish")),
        ("partial_rotary_factor", (None, 1, 1.0)),
        ("quantization_config", (None,)),
        ("sliding_window", (None,)),
    ):
        if config.get(key) not in allowed:
            raise SplitError(f"config.json: {key} = {config[key]!r} is not supported for llama")
    heads = _count(config, "num_attention_heads")
    hidden_size = _count(config, "hidden_size")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise SplitError(f"config.json: {heads} heads are no multiple of {kv_heads} key-value heads")
    if config.get("head_dim") is None and hidden_size % heads:
        raise SplitError(f"config.json: hidden_size {hidden_size} is no multiple of {heads} heads")
    head_dim = _count(config, "head_dim", hidden_size // heads)
    if head_dim % 2:
        raise SplitError(f"config.json: head_dim must be even for rotary positions, got {head_dim}")
    theta, rope = _rope(config)
    return LlamaConfig(
        layers=_count(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_count(config, "vocab_size"),
        context_length=_count(config, "max_position_embeddings", 2048),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope=rope,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_attention_bias=bool(config.get("attention_bias", False)),
        has_mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Both forms of config.json: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(fields, Mapping):
        raise SplitError(f"config.json: rope_scaling must be an object, got {fields!r}")
    fields = {"rope_theta": config.get("rope_theta"), **fields}
    kind = fields.get("rope_type") or fields.get("type") or "default"
    theta = _number(fields, "rope_theta", 10000.0)
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", _number(fields, "factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            _number(fields, "factor"),
            _number(fields, "low_freq_factor"),
            _number(fields, "high_freq_factor"),
            _count(fields, "original_max_position_embeddings"),
        )
    raise SplitError(f"config.json: rope type {kind!r} is not supported: use default, linear or llama3")


def _count(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = fields.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SplitError(f"config.json: {key} must be a whole number of at least 1, got {value!r}")
    return value


def _number(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = fields.get(key)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise SplitError(f"config.json: {key} must be a number above 0, got {value!r}")
    return float(value)
