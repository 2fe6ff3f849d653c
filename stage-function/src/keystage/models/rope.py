"""Rotary position embedding, with the frequency scalings of the Llama family.

theta_i = base^(-2i/d) for i < d/2; position p turns the pair (x_i, x_{i+d/2}) by p * theta_i.
`linear` divides every theta by a factor. `llama3` divides those whose wavelength exceeds
original_context / low_freq_factor, leaves those below original_context / high_freq_factor, and
blends between (Llama 3.1 release notes).
"""

from __future__ import annotations

import math

import torch

from keystage.models.llama_config import RopeScaling

_FIRST_POSITIONS = 2048


def frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Radians per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (theta**exponents)
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return plain


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / plain
    blend = (scaling.original_context / wavelengths - low) / (high - low)
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    is_long = wavelengths > scaling.original_context / low
    is_short = wavelengths < scaling.original_context / high
    return torch.where(is_long, plain / scaling.factor, torch.where(is_short, plain, blended))


class RotaryTable:
    """cos and sin per position, computed once and grown when a longer session opens.

    The sine of the first half is stored negated, so that a rotation is
    x * cos + swap_halves(x) * sin.
    """

    def __init__(self, inv_freq: torch.Tensor, device: torch.device, dtype: torch.dtype) -> None:
        self._inv_freq = inv_freq
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
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), -1).to(self._device, self._dtype)
        self._sin = torch.cat((-sin, sin), -1).to(self._device, self._dtype)
        self._positions = positions

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sin, each [T, 1, head_dim], for int64 positions [T] on the device."""
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
