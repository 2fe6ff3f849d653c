"""A WAV file's samples, in one channel, at the rate that the model hears.

Before it: `router.transcriptions_form` has the file. After it: windows of samples go to the engine as a
session's input. Taken are PCM of 8 (unsigned), 16, 24 and 32 bits and floats of 32 and 64 bits, plain or as
WAVE_FORMAT_EXTENSIBLE; channels are averaged. One window is converted at a time, so that memory does not
grow with the length. Format: Microsoft, Multimedia Programming Interface and Data Specifications 1.0.
"""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import numpy.typing as npt

from keystage.router.openai_errors import FieldRefused, UnsupportedMedia
from keystage.router.transcriptions_resample import Resampler

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_WIDTHS = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}
_TAKEN = "taken are WAV files of 8, 16, 24 or 32 bit PCM or of 32 or 64 bit floats"
_CHANNELS_MOST = 32
_RATES = (4_000, 384_000)


@dataclasses.dataclass(frozen=True, slots=True)
class Sound:
    """The samples of a file, as they lie in it.

    Attributes:
        rate: samples a second and channel.
        channels: channels, interleaved.
        bits: bits of a sample.
        is_float: whether samples are floats.
        data: whole blocks of one sample per channel.
    """

    rate: int
    channels: int
    bits: int
    is_float: bool
    data: memoryview

    @property
    def blocks(self) -> int:
        """Samples per channel."""
        return self.data.nbytes // (self.channels * self.bits // 8)

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.blocks / self.rate

    def mono(self, first: int, end: int) -> npt.NDArray[np.float32]:
        """Samples [first, end) of all channels' mean, -1 to 1; silence before and after the file.

        Raises:
            FieldRefused: a float that is not finite.
        """
        low, high = max(first, 0), min(end, self.blocks)
        samples = np.zeros(end - first, np.float32)
        if low < high:
            width = self.channels * self.bits // 8
            values = _decoded(self.data[low * width : high * width], self.bits, self.is_float)
            mean = values.reshape(-1, self.channels).mean(1, dtype=np.float32)
            if not np.isfinite(mean).all():
                raise FieldRefused("invalid_value", "file: a sample is not finite", param="file")
            samples[low - first : high - first] = mean
        return samples

    def resampled(self, first: int, end: int, rate: int) -> npt.NDArray[np.float32]:
        """Samples [first, end) as they would be at another rate, counted at that rate."""
        if rate == self.rate:
            return self.mono(first, end)
        resampler = Resampler(self.rate, rate)
        low, high = resampler.needs(first, end)
        return resampler.resample(self.mono(low, high), first, end)


def read_wav(file: bytes | bytearray) -> Sound:
    """Finds the samples of a WAV file.

    Raises:
        UnsupportedMedia: it is none, or its samples are of another kind.
        FieldRefused: it is cut short or says what cannot be.
    """
    if len(file) < 12 or file[:4] != b"RIFF" or file[8:12] != b"WAVE":
        raise UnsupportedMedia(
            f"file begins with {bytes(file[:12])!r}, which is no WAV; {_TAKEN}", param="file"
        )
    chunks = _chunks(memoryview(file))
    head, data = chunks.get(b"fmt "), chunks.get(b"data")
    if head is None or data is None or len(head) < 16:
        raise FieldRefused("invalid_value", "file: a WAV needs its parts 'fmt ' and 'data'", param="file")
    kind, channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", head)
    if kind == _EXTENSIBLE and len(head) >= 26:
        (kind,) = struct.unpack_from("<H", head, 24)
    if bits not in _WIDTHS.get(kind, ()):
        raise UnsupportedMedia(
            f"file holds samples of format {kind} with {bits} bits; {_TAKEN}", param="file"
        )
    for word, value, least, most in (
        ("channels", channels, 1, _CHANNELS_MOST),
        ("samples a second", rate, *_RATES),
    ):
        if not least <= value <= most:
            message = f"file: {value} {word}, {least} to {most} are taken"
            raise FieldRefused("invalid_value", message, param="file")
    width = channels * bits // 8
    if align != width:
        message = f"file: blocks of {align} bytes, {channels} channels of {bits} bits need {width}"
        raise FieldRefused("invalid_value", message, param="file")
    whole = len(data) // width * width
    if not whole:
        raise FieldRefused("invalid_value", "file holds no samples", param="file")
    return Sound(rate, channels, bits, kind == _FLOAT, data[:whole])


def _chunks(file: memoryview) -> dict[bytes, memoryview]:
    """The file's parts by name, the first of each; one whose length was never filled in goes to the end."""
    found: dict[bytes, memoryview] = {}
    place = 12
    while place + 8 <= len(file):
        name, length = struct.unpack_from("<4sI", file, place)
        if name == b"data" and length == 0:
            length = len(file)
        found.setdefault(name, file[place + 8 : place + 8 + length])
        place += 8 + length + length % 2
    return found


def _decoded(data: memoryview, bits: int, is_float: bool) -> npt.NDArray[np.float32]:
    if is_float:
        return np.frombuffer(data, f"<f{bits // 8}").astype(np.float32)
    if bits == 8:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if bits == 24:
        widened = np.zeros((data.nbytes // 3, 4), np.uint8)
        widened[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return widened.view("<i4").reshape(-1).astype(np.float32) / np.float32(1 << 31)
    return np.frombuffer(data, f"<i{bits // 8}").astype(np.float32) / np.float32(1 << (bits - 1))
