"""Whisper's config.json, checked and typed.

Read from the model by `keystage split`, and again from `pipeline.json` when a stage is built. What
generation_config.json says of tokens that are never chosen stands in the same object, under
`generation`; config.json's own fields serve where it is missing. What is not implemented is refused
here by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keystage.bundle.errors import SplitError
from keystage.models.base import ModelShape
from keystage.models.config_fields import count, head_size, layers_in, refuse_others, shown

SAMPLE_RATE = 16_000
"""Samples a second of what the model hears."""
HOP_SAMPLES = 160
"""Samples from one column of the spectrogram to the next; two columns make a frame."""
WINDOW_SAMPLES = 400
"""Samples of one column's Fourier window."""


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    """Sizes and constants.

    Attributes:
        encoder_layers: layers over frames; they come first when layers are counted.
        decoder_layers: layers over tokens, each with attention to the frames.
        hidden_size: width of frames and tokens.
        encoder_heads: attention heads of an encoder layer.
        decoder_heads: attention heads of a decoder layer.
        encoder_mlp_size: width between an encoder layer's two matrices.
        decoder_mlp_size: the same of a decoder layer.
        mels: bands of the spectrogram.
        frames: frames of a session; its tokens' positions begin behind them.
        token_positions: tokens at most, prompt included.
        vocab_size: number of token ids.
        suppressed: token ids that are never chosen.
        suppressed_first: token ids that are not chosen as the first new token.
    """

    encoder_layers: int
    decoder_layers: int
    hidden_size: int
    encoder_heads: int
    decoder_heads: int
    encoder_mlp_size: int
    decoder_mlp_size: int
    mels: int
    frames: int
    token_positions: int
    vocab_size: int
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]

    @property
    def layers(self) -> int:
        """Layers in all, the encoder's first."""
        return self.encoder_layers + self.decoder_layers

    @property
    def samples(self) -> int:
        """Samples that make a session's frames; shorter inputs are filled up with silence."""
        return 2 * self.frames * HOP_SAMPLES


def parse(config: Mapping[str, Any]) -> WhisperConfig:
    """Reads a config.json.

    Raises:
        SplitError: a field is missing or impossible, or asks for what is not implemented.
    """
    refuse_others(
        config,
        "whisper",
        {
            "activation_function": (None, "gelu"),
            "tie_word_embeddings": (None, True),
            "quantization_config": (None,),
            "scale_embedding": (None, False),
        },
    )
    hidden_size = count(config, "d_model")
    heads = [count(config, f"{part}_attention_heads") for part in ("encoder", "decoder")]
    for number in heads:
        head_size(hidden_size, number)
    vocab_size = count(config, "vocab_size")
    return WhisperConfig(
        encoder_layers=layers_in(config, "encoder_layers"),
        decoder_layers=layers_in(config, "decoder_layers"),
        hidden_size=hidden_size,
        encoder_heads=heads[0],
        decoder_heads=heads[1],
        encoder_mlp_size=count(config, "encoder_ffn_dim"),
        decoder_mlp_size=count(config, "decoder_ffn_dim"),
        mels=count(config, "num_mel_bins", 80),
        frames=count(config, "max_source_positions", 1500),
        token_positions=count(config, "max_target_positions", 448),
        vocab_size=vocab_size,
        suppressed=_tokens(config, "suppress_tokens", vocab_size),
        suppressed_first=_tokens(config, "begin_suppress_tokens", vocab_size),
    )


def shape_of(config: WhisperConfig) -> ModelShape:
    """The sizes that do not depend on the family: positions are frames, then tokens."""
    return ModelShape(
        config.layers,
        config.hidden_size,
        config.vocab_size,
        config.frames + config.token_positions,
        prefix=config.frames,
    )


def _tokens(config: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    """A list of token ids, from generation_config.json where it says one."""
    generation = config.get("generation") or {}
    if not isinstance(generation, Mapping):
        raise SplitError(f"generation_config.json must be an object, got {shown(generation)}")
    value = generation.get(key, config.get(key)) or []
    if not isinstance(value, (list, tuple)) or not all(isinstance(token, int) for token in value):
        raise SplitError(f"{key} must be a list of token ids, got {shown(value)}")
    beyond = [token for token in value if token >= vocab_size]
    if beyond:
        raise SplitError(f"{key} names token {beyond[0]}, the vocabulary has {vocab_size}")
    return tuple(token for token in value if token >= 0)  # -1 stands for none
