"""Pictures and recordings for pipelines that see or hear: made here, so that a replay needs no files.

After `lengths` (which has nothing to say about them) and before `target`, which wraps them into bodies. A
few different ones are made per run and sent in turn: bodies stay in memory until the report, and a picture
is a hundred times as large as a prompt. Pure: the same seed gives the same bytes.
"""

from __future__ import annotations

import functools
import io
import wave

import numpy as np

from keystage.loadgen import arrivals

VARIETY = 24
"""Different pictures or recordings of a run."""

IMAGE_SIZE = 224
"""Pixels of a side: what image classifiers are trained on."""

SAMPLE_RATE = 16_000
CLIP_S = (2.0, 12.0)
"""Shortest and longest recording; a voice command, a few sentences."""

_CLIP_STREAM = 5
_SYLLABLE_S = 0.2


@functools.lru_cache(maxsize=2 * VARIETY)
def image(seed: int, index: int) -> bytes:
    """A picture as a NumPy file, uint8 [3, 224, 224]: coloured squares and noise.

    Args:
        seed: of the run.
        index: of the request; taken modulo `VARIETY` by the caller.
    """
    source = arrivals.stream(seed, _CLIP_STREAM + index)
    coarse = source.randint(0, 200, size=(3, 14, 14))
    side = IMAGE_SIZE // coarse.shape[1]
    pixels = coarse.repeat(side, axis=1).repeat(side, axis=2) + source.randint(
        0, 56, size=(3, IMAGE_SIZE, IMAGE_SIZE)
    )
    out = io.BytesIO()
    np.save(out, pixels.astype(np.uint8), allow_pickle=False)
    return out.getvalue()


@functools.lru_cache(maxsize=2 * VARIETY)
def recording(seed: int, index: int) -> bytes:
    """A WAV file, 16-bit mono at 16 kHz: tones that come and go as syllables do, and noise.

    Args:
        seed: of the run.
        index: of the request; taken modulo `VARIETY` by the caller.
    """
    source = arrivals.stream(seed, _CLIP_STREAM + index)
    syllables = max(1, round(source.uniform(*CLIP_S) / _SYLLABLE_S))
    count = round(_SYLLABLE_S * SAMPLE_RATE)
    at_s = np.arange(count) / SAMPLE_RATE
    swell = np.sin(np.pi * np.arange(count) / count) ** 2
    parts = []
    for _ in range(syllables):
        pitch_hz = source.uniform(90.0, 250.0)
        loud = source.uniform(size=6) / np.arange(1, 7)
        tone = sum(a * np.sin(2 * np.pi * pitch_hz * (k + 1) * at_s) for k, a in enumerate(loud))
        parts.append(swell * tone)
    signal = 0.2 * np.concatenate(parts) + 0.003 * source.standard_normal(syllables * count)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((np.clip(signal, -1, 1) * 32767).astype("<i2").tobytes())
    return out.getvalue()
