"""Rotary position embedding, with the frequency scalings that config.json may ask for.

theta_i = base^(-2i/d) for i < d/2; position p turns the pair (x_i, x_{i+d/2}) by p * theta_i.
`linear` divides every theta by a factor. `llama3` divides those whose wavelength exceeds
original_context / low_freq_factor, leaves those below original_context / high_freq_factor, and
blends between (Llama 3.1 release notes). `yarn` blends by the dimension's index, between those that
turn beta_fast and beta_slow times over the original context, and multiplies cosine and sine by a factor
(YaRN, arXiv 2309.00071, section 3).
"""

from __future__ import annotations

import math

import torch

from keystage.models.decoder_config import DecoderConfig, RopeScaling

_FIRST_POSITIONS = 2048


def frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Radians per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (theta**exponents)
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn(plain, head_dim, theta, scaling)
    return plain


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / plain
    blend = (scaling.original_context / wavelengths - low) / (high - low)
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    is_long = wavelengths > scaling.original_context / low
    is_short = wavelengths < scaling.original_context / high
    return torch.where(is_long, plain / scaling.factor, torch.where(is_short, plain, blended))


def _yarn(plain: torch.Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    def index_of(turns: float) -> float:
        """The dimension that turns so often over the original context; it need not be whole."""
        wavelength = scaling.original_context / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0.0
    indices = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = ((indices - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


def rotary_table(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> RotaryTable | None:
    """The table of a decoder, None where its positions are learned."""
    if config.rope is None:
        return None
    inv_freq = frequencies(config.head_dim, config.rope_theta, config.rope)
    return RotaryTable(inv_freq, device, dtype, config.rope.attention_factor)


class RotaryTable:
    """cos and sin per position, computed once and grown when a longer session opens.

    The sine of the first half is stored negated, so that a rotation is
    x * cos + swap_halves(x) * sin.

    Args:
        inv_freq: radians per position, float32 [head_dim / 2].
        device: where the table lies.
        dtype: its type.
        factor: what cosine and sine are multiplied with.
    """

    def __init__(
        self, inv_freq: torch.Tensor, device: torch.device, dtype: torch.dtype, factor: float = 1.0
    ) -> None:
        self._inv_freq = inv_freq
        self._factor = factor
        self._device = device
        self._dtype = dtype
        self._positions = 0
        self._cos = self._sin = torch.empty(0)
        self.grow(_FIRST_POSITIONS)

    def grow(self, positions: int) -> None:
        """Makes the table hold at least this many positions."""
        if positions <= self._positions:
            return
        positions = max(positions, 2 * self._positions)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), self._inv_freq)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        self._cos = torch.cat((cos, cos), -1).to(self._device, self._dtype)
        self._sin = torch.cat((-sin, sin), -1).to(self._device, self._dtype)
        self._positions = positions

    @property
    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine as far as the table goes, each [positions, head_dim]."""
        return self._cos, self._sin

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine, each [T, 1, head_dim], for int64 positions [T] on the device."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turns x in place.

    Args:
        x: [T, heads, head_dim], may be a view.
        cos: [T, 1, head_dim].
        sin: [T, 1, head_dim], first half negated.
    """
    first, second = x.chunk(2, -1)
    swapped = torch.cat((second, first), -1)
    x.mul_(cos).addcmul_(swapped, sin)
