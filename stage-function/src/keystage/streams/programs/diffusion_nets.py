"""The nets of the diffusion program: text encoder, diffusion transformer, image decoder.

Ordinary torch modules without any notion of requests; `programs.diffusion` makes stream modules of them. The
transformer is a DiT (Peebles and Xie, arXiv 2212.09748) with adaptive layer norms from time and pooled text,
and cross-attention to the text. Weights are random by seed: what it computes has the cost of the real thing,
not its beauty.

On a CPU in float32 a row's result does not depend, to the last bit, on who shares the batch (with one number
of threads). Measured with torch 2.13: attention, norms and multiplications of many rows a request have that
property; a multiplication of one row a request does not (up to 2e-6), nor does a convolution (1e-6). So the
former run in passes of a fixed number of rows (`RowLinear`), the latter request by request. On a GPU, where
that would cost something, nothing of the kind is done, and images may differ by rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class DiffusionShape:
    """Sizes of a diffusion model.

    Attributes:
        latent_size: height and width of the latent.
        width: of the transformer.
        layers: of the transformer.
        heads: of the transformer.
        text_width: of the text encoder.
        text_layers: of the text encoder.
        text_heads: of the text encoder.
        text_tokens: bytes of a prompt that are read.
        decoder_width: channels of the image decoder.
        doublings: of the image decoder: the image has latent_size * 2^doublings points a side.
        latent_channels: of the latent.
        patch: side of the square of latent points that makes a token.
    """

    latent_size: int
    width: int
    layers: int
    heads: int
    text_width: int
    text_layers: int
    text_heads: int
    text_tokens: int
    decoder_width: int
    doublings: int
    latent_channels: int = 4
    patch: int = 2

    @property
    def tokens(self) -> int:
        """Tokens of a latent."""
        return (self.latent_size // self.patch) ** 2


SHAPES: Mapping[str, DiffusionShape] = {
    "tiny": DiffusionShape(8, 32, 2, 2, 32, 1, 2, 16, 8, 1),
    "small": DiffusionShape(16, 192, 6, 3, 128, 2, 2, 32, 32, 3),
    "dit-b": DiffusionShape(32, 768, 12, 12, 768, 12, 12, 77, 64, 3),
    "dit-xl": DiffusionShape(32, 1152, 28, 16, 768, 12, 12, 77, 128, 3),
}
"""`dit-b` and `dit-xl`: DiT-B/2 and DiT-XL/2 at 256 x 256, with a text encoder of the size of CLIP-L's."""


_ROWS = 8


class RowLinear(nn.Linear):
    """For one row a request: on a CPU always so many rows at once, filled up with zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, in] to [B, out]."""
        if x.device.type != "cpu":
            return super().forward(x)
        parts = []
        for start in range(0, len(x), _ROWS):
            rows = x[start : start + _ROWS]
            filled = functional.pad(rows, (0, 0, 0, _ROWS - len(rows)))
            parts.append(super().forward(filled)[: len(rows)])
        return torch.cat(parts)


class Attention(nn.Module):
    """Attention of queries from one sequence to keys and values of another, or of the same."""

    def __init__(self, width: int, source_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(source_width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, source: torch.Tensor, is_visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attends.

        Args:
            x: [B, T, width].
            source: [B, S, source_width].
            is_visible: bool [B, S], None for all.

        Returns:
            [B, T, width].
        """
        query = self._heads(self.query(x))
        key, value = map(self._heads, self.key_value(source).chunk(2, -1))
        mask = None if is_visible is None else is_visible[:, None, None, :]
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        result: torch.Tensor = self.out(found.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))


class TextLayer(nn.Module):
    """One layer of the text encoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, width, heads)
        self.mlp = _mlp(width)

    def forward(self, x: torch.Tensor, is_visible: torch.Tensor) -> torch.Tensor:
        """[B, T, width] and bool [B, T] to [B, T, width]."""
        normed = self.norm(x)
        x = x + self.attention(normed, normed, is_visible)
        result: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class TextEncoder(nn.Module):
    """Bytes of a prompt to vectors."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, shape.text_width)
        self.positions = nn.Parameter(torch.empty(shape.text_tokens, shape.text_width))
        self.layers = nn.ModuleList(
            TextLayer(shape.text_width, shape.text_heads) for _ in range(shape.text_layers)
        )
        self.norm = nn.LayerNorm(shape.text_width)

    def forward(self, ids: torch.Tensor, is_visible: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] and bool [B, T] to [B, T, text_width]; T is text_tokens, padded with 256."""
        x = self.embedding(ids) + self.positions
        for layer in self.layers:
            x = layer(x, is_visible)
        result: torch.Tensor = self.norm(x)
        return result


class DenoiserLayer(nn.Module):
    """One layer of the transformer: what time and text say shifts, scales and gates it."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__()
        width = shape.width
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width, width, shape.heads)
        self.text_attention = Attention(width, shape.text_width, shape.heads)
        self.mlp = _mlp(width)
        self.modulation = RowLinear(width, 6 * width)

    def forward(
        self, x: torch.Tensor, condition: torch.Tensor, text: torch.Tensor, is_visible: torch.Tensor
    ) -> torch.Tensor:
        """Of x [B, T, width], condition [B, width], text [B, S, text_width], is_visible bool [B, S]."""
        changes = self.modulation(functional.silu(condition))[:, None].chunk(6, -1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = changes
        normed = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(normed, normed)
        x = x + self.text_attention(self.norm(x), text, is_visible)
        result: torch.Tensor = x + mlp_gate * self.mlp(self.norm(x) * (1 + mlp_scale) + mlp_shift)
        return result


class Denoiser(nn.Module):
    """The diffusion transformer: predicts the velocity of a latent (Salimans and Ho, arXiv 2202.00512)."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__()
        self.shape = shape
        points = shape.latent_channels * shape.patch**2
        self.enter = nn.Linear(points, shape.width)
        self.positions = nn.Parameter(torch.empty(shape.tokens, shape.width))
        self.time = nn.Sequential(
            RowLinear(shape.width, shape.width), nn.SiLU(), RowLinear(shape.width, shape.width)
        )
        self.pooled = RowLinear(shape.text_width, shape.width)
        self.layers = nn.ModuleList(DenoiserLayer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, elementwise_affine=False)
        self.leave = nn.Linear(shape.width, points)

    def forward(
        self, latent: torch.Tensor, times: torch.Tensor, text: torch.Tensor, is_visible: torch.Tensor
    ) -> torch.Tensor:
        """Predicts.

        Args:
            latent: [B, channels, size, size].
            times: float32 [B] in (0, 1]; rows may be at different times.
            text: [B, S, text_width].
            is_visible: bool [B, S].

        Returns:
            As `latent`.
        """
        patch, side = self.shape.patch, self.shape.latent_size // self.shape.patch
        x = self.enter(functional.pixel_unshuffle(latent, patch).flatten(2).transpose(1, 2)) + self.positions
        weights = is_visible.to(text.dtype)[..., None]
        pooled = (text * weights).sum(1) / weights.sum(1).clamp(min=1)
        condition = self.time(waves(times, self.shape.width).to(latent.dtype)) + self.pooled(pooled)
        for layer in self.layers:
            x = layer(x, condition, text, is_visible)
        points = self.leave(self.norm(x)).transpose(1, 2)
        return functional.pixel_shuffle(points.reshape(*points.shape[:2], side, side), patch)


def waves(times: torch.Tensor, width: int) -> torch.Tensor:
    """Cosines and sines of 1000 t at geometrically falling frequencies: float32 [B, width]."""
    half = width // 2
    steps = torch.arange(half, device=times.device, dtype=torch.float32) / half
    angles = 1000 * times[:, None] * torch.exp(-math.log(10000) * steps)
    return torch.cat((angles.cos(), angles.sin()), -1)


class ImageDecoder(nn.Module):
    """A latent to an image, by convolutions and doublings."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__()
        width = shape.decoder_width
        self.enter = nn.Conv2d(shape.latent_channels, width, 3, padding=1)
        self.levels = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(shape.doublings))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(shape.doublings))
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        """[B, channels, size, size] to [B, 3, image, image] in 0..1."""
        if latent.device.type == "cpu" and len(latent) > 1:
            return torch.cat([self(latent[row : row + 1]) for row in range(len(latent))])
        x = self.enter(latent)
        for level, norm in zip(self.levels, self.norms, strict=True):
            x = functional.silu(norm(level(functional.interpolate(x, scale_factor=2.0))))
        result: torch.Tensor = self.leave(x).sigmoid()
        return result


def seeded(net: nn.Module, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random parameters for a net, the same for a seed on every machine.

    Matrices have a standard deviation of 1 / sqrt(inputs), gains of norms lie around 1, the rest around 0.

    Args:
        net: its shapes are taken; it may be on the meta device.
        seed: any whole number.
        dtype: of the parameters.
    """
    found: dict[str, torch.Tensor] = {}
    for name, like in net.state_dict().items():
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
        values = torch.randn(like.shape, generator=generator)
        if like.ndim > 1:
            values *= math.prod(like.shape[1:]) ** -0.5
        else:
            values = values * 0.02 + (1.0 if name.endswith("weight") else 0.0)
        found[name] = values.to(dtype)
    return found
