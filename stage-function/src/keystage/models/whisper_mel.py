"""From samples to Whisper's log-mel spectrogram, as `WhisperFeatureExtractor` of transformers makes it.

Runs in the first stage, before the encoder's convolutions. Power spectrum by a short-time Fourier
transform (Hann window of 400 samples, hop 160, mirrored at the ends), triangular bands on Slaney's
mel scale (linear to 1 kHz, logarithmic above; M. Slaney, Auditory Toolbox, 1998) normed to equal
area, decimal logarithm, cut 8 below the loudest value, then (x + 4) / 4. Always in float32.
"""

from __future__ import annotations

import functools
import math

import torch

from keystage.models.whisper_config import HOP_SAMPLES, SAMPLE_RATE, WINDOW_SAMPLES

_LINEAR_HZ = 1000.0
_MEL_HZ = 200.0 / 3.0
"""Width of a mel in the linear part."""
_LOG_STEP = math.log(6.4) / 27.0
"""Width of a mel in the logarithmic part, as the logarithm of a ratio of frequencies."""
_LINEAR_MELS = _LINEAR_HZ / _MEL_HZ


def log_mel(samples: torch.Tensor, mels: int, length: int) -> torch.Tensor:
    """The spectrogram of one input.

    Args:
        samples: float32 [S] at 16 kHz, -1 to 1; cut to `length` or filled up with silence.
        mels: bands.
        length: samples of the whole input, a multiple of 160.

    Returns:
        float32 [mels, length / 160] on the samples' device.
    """
    whole = torch.zeros(length, device=samples.device)
    heard = samples[:length]
    whole[: heard.numel()] = heard
    window = torch.hann_window(WINDOW_SAMPLES, device=samples.device)
    spectrum = torch.stft(whole, WINDOW_SAMPLES, HOP_SAMPLES, window=window, return_complex=True)
    power = spectrum[..., :-1].abs().square().contiguous()
    loudness = (_bands(mels).to(samples.device) @ power).clamp_(min=1e-10).log10_()
    return torch.maximum(loudness, loudness.max() - 8.0).add_(4.0).div_(4.0)


@functools.lru_cache(maxsize=4)
def _bands(mels: int) -> torch.Tensor:
    """Weights of the triangular bands, float32 [mels, 201]."""
    bins = WINDOW_SAMPLES // 2 + 1
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, bins, dtype=torch.float64)
    corners = _hertz(torch.linspace(0.0, _mel(SAMPLE_RATE / 2), mels + 2, dtype=torch.float64))
    slopes = corners[:, None] - frequencies
    widths = corners.diff()[:, None]
    rising, falling = -slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]
    weights = torch.minimum(rising, falling).clamp_(min=0.0)
    area = 2.0 / (corners[2:] - corners[:-2])
    return (weights * area[:, None]).float()


def _mel(hertz: float) -> float:
    if hertz < _LINEAR_HZ:
        return hertz / _MEL_HZ
    return _LINEAR_MELS + math.log(hertz / _LINEAR_HZ) / _LOG_STEP


def _hertz(mel: torch.Tensor) -> torch.Tensor:
    bent = _LINEAR_HZ * torch.exp(_LOG_STEP * (mel - _LINEAR_MELS))
    return torch.where(mel < _LINEAR_MELS, mel * _MEL_HZ, bent)
