"""What a decoder is, in sizes and constants: the same few words for every looping text family.

A family module (`models.llama`, `models.opt`, `models.gpt2`) reads a config.json into this;
`models.decoder` and the engine for GPUs run whatever it says and know no family. Pure: nothing here
reads files or imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

RopeKind: TypeAlias = Literal["default", "linear", "llama3", "yarn"]
Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    Attributes:
        kind: `default`, `linear`, `llama3` or `yarn`.
        factor: stretch.
        low_freq_factor: llama3: wavelengths above original_context / low are stretched fully.
        high_freq_factor: llama3: wavelengths below original_context / high are left alone.
        original_context: llama3, yarn: context length of the pre-training, tokens.
        beta_fast: yarn: dimensions that turn more often than this over it are left alone.
        beta_slow: yarn: dimensions that turn less often than this over it are stretched fully.
        is_truncated: yarn: whether the bounds between those dimensions are whole numbers.
        attention_factor: yarn: what cosine and sine are multiplied with.
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and constants of a decoder with norms before attention and before the MLP.

    Attributes:
        layers: number of layers.
        hidden_size: width of the activation.
        mlp_size: width inside the MLP.
        heads: query heads.
        kv_heads: key-value heads; each serves heads / kv_heads query heads.
        head_dim: elements of a head.
        vocab_size: number of token ids.
        context_length: token positions.
        norm_eps: added to the variance in every norm.
        norm: `rms` (scale only) or `layer` (mean taken off, scale and bias).
        activation: inside the MLP; `gelu_tanh` is the approximation by tanh.
        is_gated: down(act(gate x) * up x), gate and up being one matrix [2 * mlp_size, hidden];
            else down(act(up x)).
        rope: rotary positions; None: learned ones, added to the embedding.
        rope_theta: base of the rotary frequencies.
        position_offset: row of the learned table that holds position 0.
        has_qk_norm: RMS norm of every head of q and k before the rotation.
        window: a token sees this many newest tokens, itself included; 0: all.
        is_tied: the head is the embedding's matrix.
    """

    layers: int
    hidden_size: int
    mlp_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    activation: Activation = "silu"
    is_gated: bool = True
    rope: RopeScaling | None = RopeScaling()
    rope_theta: float = 10000.0
    position_offset: int = 0
    has_qk_norm: bool = False
    window: int = 0
    is_tied: bool = False

    @property
    def qkv_width(self) -> int:
        """Outputs of the fused q, k, v projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def up_width(self) -> int:
        """Outputs of the first projection of the MLP, gate included."""
        return (2 if self.is_gated else 1) * self.mlp_size
