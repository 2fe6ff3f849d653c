"""Samples at another rate: a windowed sinc evaluated at the wanted times (polyphase), in numpy.

Output n stands at input time n * down / up, where up / down is the ratio of the rates in lowest terms. It is
the sum over the input samples around it, weighted by a sinc that cuts at 95 % of the lower rate's half and a
Kaiser window of beta 9 over 32 zero crossings on each side (more than 80 dB down where frequencies would
fold). Weights repeat every `up` outputs; those of one phase are applied to a strided view. Any part of the
output can be made alone, from the input that it needs. Source: J. O. Smith, Digital Audio Resampling.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_CROSSINGS = 32
_BETA = 9.0
_CUT = 0.95


class Resampler:
    """From one rate to another.

    Args:
        source: samples a second that come in.
        target: samples a second that go out.
    """

    def __init__(self, source: int, target: int) -> None:
        common = math.gcd(source, target)
        self._up, self._down = target // common, source // common
        self._scale = _CUT * min(1.0, self._up / self._down)
        self._reach = math.ceil(_CROSSINGS / self._scale)

    def needs(self, first: int, end: int) -> tuple[int, int]:
        """Input samples [low, high) that outputs [first, end) are made of; low may be negative."""
        low, high = first * self._down // self._up, (end - 1) * self._down // self._up
        return low - self._reach + 1, high + self._reach + 1

    def resample(self, samples: npt.NDArray[np.float32], first: int, end: int) -> npt.NDArray[np.float32]:
        """Outputs [first, end).

        Args:
            samples: what `needs` says, in order.
            first: index of the first output.
            end: one past the last output.
        """
        outputs = np.empty(end - first, np.float32)
        spans = np.lib.stride_tricks.sliding_window_view(samples, 2 * self._reach)
        origin = first * self._down // self._up
        for phase in range(min(self._up, end - first)):
            base, rest = divmod((first + phase) * self._down, self._up)
            count = len(range(phase, end - first, self._up))
            begin = base - origin
            mine = spans[begin : begin + (count - 1) * self._down + 1 : self._down]
            outputs[phase :: self._up] = mine @ self._weights(rest / self._up)
        return outputs

    def _weights(self, fraction: float) -> npt.NDArray[np.float32]:
        """Weights of the input samples around a time that lies a fraction behind a sample."""
        distance = np.arange(1 - self._reach, self._reach + 1) - fraction
        shape = np.i0(_BETA * np.sqrt(np.maximum(0.0, 1.0 - (distance / self._reach) ** 2)))
        weights = np.sinc(self._scale * distance) * shape
        return np.asarray(weights / weights.sum(), np.float32)
