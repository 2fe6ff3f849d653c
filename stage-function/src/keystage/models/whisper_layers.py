"""What a Whisper stage computes: convolutions, encoder layers over frames, decoder layers over tokens.

Stateless; `models.whisper` knows the sessions and hands in their buffers. All tokens of a wave go
through a decoder layer's matrices at once; attention runs per session, as in `models.decoder`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from keystage.models.kv import KvSlots, Span
from keystage.models.whisper_config import WhisperConfig
from keystage.models.whisper_parameters import DecoderLayer, EncoderLayer, Entrance, Norm

_EPS = 1e-5
_FP16_BOUND = torch.finfo(torch.float16).max - 1000


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Layer norm over the last axis."""
    return functional.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, _EPS)


def frames_of(spectra: torch.Tensor, entrance: Entrance) -> torch.Tensor:
    """Frames as they enter the first encoder layer.

    Args:
        spectra: [B, mels, 2 * frames].
        entrance: the first stage's own parameters.

    Returns:
        [B, frames, hidden].
    """
    first, second = entrance.convolutions
    x = functional.gelu(functional.conv1d(spectra, first.weight, first.bias, padding=1))
    x = functional.gelu(functional.conv1d(x, second.weight, second.bias, stride=2, padding=1))
    return x.transpose(1, 2) + entrance.frame_positions


def encode(frames: torch.Tensor, layer: EncoderLayer, heads: int) -> torch.Tensor:
    """One encoder layer: every frame attends to every frame of its session; [B, frames, hidden]."""
    batch, count, hidden = frames.shape
    qkv = layer.qkv(normed(frames, layer.attention_norm).reshape(batch * count, hidden))
    query, keys, values = qkv.view(batch, count, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
    found = functional.scaled_dot_product_attention(query, keys, values)
    attended = layer.out(found.transpose(1, 2).reshape(batch * count, hidden))
    frames = frames + attended.view(batch, count, hidden)
    inner = functional.gelu(layer.up(normed(frames, layer.mlp_norm).reshape(batch * count, hidden)))
    frames = frames + layer.down(inner).view(batch, count, hidden)
    if frames.dtype is torch.float16:
        frames = frames.clamp(-_FP16_BOUND, _FP16_BOUND)
    return frames


def frame_state(frames: torch.Tensor, layer: DecoderLayer, heads: int) -> torch.Tensor:
    """Keys and values of one session's frames in a decoder layer, [2 * heads, frames, head_dim]."""
    count, hidden = frames.shape
    return layer.frame_kv(frames).view(count, 2 * heads, hidden // heads).transpose(0, 1).contiguous()


def decode(
    tokens: torch.Tensor,
    layer: DecoderLayer,
    index: int,
    spans: Sequence[Span],
    state: KvSlots,
    frames: Sequence[torch.Tensor],
    config: WhisperConfig,
) -> torch.Tensor:
    """One decoder layer over the tokens of all rows.

    Args:
        tokens: [T, hidden].
        layer: its parameters.
        index: its place among the stage's decoder layers.
        spans: the rows, positions counted from the first token.
        state: keys and values of the tokens.
        frames: per row, what `frame_state` made of its session's frames in this layer.
        config: sizes.
    """
    count, hidden = tokens.shape
    heads = config.decoder_heads
    qkv = layer.qkv(normed(tokens, layer.attention_norm)).view(count, 3 * heads, hidden // heads)
    attended = torch.empty_like(qkv[:, :heads])
    for span in spans:
        state.attend(index, span, qkv, attended)
    tokens = tokens + layer.out(attended.view(count, hidden))
    query = layer.frame_query(normed(tokens, layer.frame_norm)).view(count, heads, hidden // heads)
    for span, seen in zip(spans, frames, strict=True):
        place = slice(span.first, span.first + span.count)
        mine = query[place].transpose(0, 1)
        found = functional.scaled_dot_product_attention(mine, seen[:heads], seen[heads:])
        attended[place] = found.transpose(0, 1)
    tokens = tokens + layer.frame_out(attended.view(count, hidden))
    inner = functional.gelu(layer.up(normed(tokens, layer.mlp_norm)))
    return tokens + layer.down(inner)
