"""Sound files become samples at the model's rate: kinds of samples, channels, rates, refusals."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.signal

from keystage.router.engine import Refusal
from keystage.router.openai_errors import FieldRefused, UnsupportedMedia
from keystage.router.transcriptions_resample import Resampler
from keystage.router.transcriptions_wav import read_wav

SHIPPED = Path(scipy.io.__file__).parent / "tests" / "data"
EXTENSIBLE_TAIL = bytes.fromhex("000000001000800000aa00389b71")


def chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def file_of(
    data: bytes, kind: int, channels: int, rate: int, bits: int, *, extensible: bool = False
) -> bytes:
    width = channels * bits // 8
    head = struct.pack("<HHIIHH", 0xFFFE if extensible else kind, channels, rate, rate * width, width, bits)
    if extensible:
        head += struct.pack("<HHIH", 22, bits, 0, kind) + EXTENSIBLE_TAIL
    body = b"WAVE" + chunk(b"LIST", b"odd") + chunk(b"fmt ", head) + chunk(b"data", data)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def tone(hertz: float, rate: int, seconds: float = 1.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float64)


def encoded(samples: np.ndarray, kind: int, bits: int) -> bytes:
    if kind == 3:
        return samples.astype(f"<f{bits // 8}").tobytes()
    if bits == 8:
        return (np.round(samples * 128) + 128).astype(np.uint8).tobytes()
    whole = np.round(samples * (1 << (bits - 1))).astype("<i4")
    if bits == 24:
        return whole.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    return whole.astype(f"<i{bits // 8}").tobytes()


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(("kind", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
def test_every_kind_of_sample_and_channels_averaged(kind: int, bits: int, extensible: bool) -> None:
    left, right = tone(440, 16_000), tone(700, 16_000)
    both = np.stack([left, right], 1).reshape(-1)
    found = read_wav(file_of(encoded(both, kind, bits), kind, 2, 16_000, bits, extensible=extensible))
    assert (found.blocks, found.seconds, found.channels) == (16_000, 1.0, 2)
    steps = 1 / 128 if bits == 8 else 1e-4 if bits == 16 else 1e-6
    np.testing.assert_allclose(found.mono(0, 16_000), (left + right) / 2, atol=steps)
    np.testing.assert_array_equal(found.mono(-3, 2)[:3], 0)
    np.testing.assert_array_equal(found.mono(15_999, 16_010)[1:], 0)


def test_the_standard_library_s_files_are_read_in_any_window() -> None:
    samples = (tone(300, 8000) * 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as sink:
        sink.setparams((1, 2, 8000, 0, "NONE", ""))
        sink.writeframes(samples.tobytes())
    sound = read_wav(file.getvalue())
    whole = sound.resampled(0, 16_000, 16_000)
    parts = [sound.resampled(first, first + 4000, 16_000) for first in range(0, 16_000, 4000)]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)
    np.testing.assert_allclose(whole[200:-200], tone(300, 16_000)[200:-200], atol=1e-3)


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_resampling_keeps_what_is_heard_and_folds_nothing_back(rate: int) -> None:
    resampler = Resampler(rate, 16_000)
    low, high = resampler.needs(0, 16_000)

    def resampled(hertz: float) -> np.ndarray:
        given = np.zeros(high - low, np.float32)
        given[-low : -low + rate] = tone(hertz, rate)[:high]
        return resampler.resample(given, 0, 16_000)[800:-800]

    kept = 0.4 * min(rate, 16_000)
    np.testing.assert_allclose(resampled(kept), tone(kept, 16_000)[800:-800], atol=2e-5)
    if rate > 16_000:
        assert np.abs(resampled(9500)).max() < 1e-4
        reference = scipy.signal.resample_poly(tone(1000, rate), 16_000, rate)[800:-800]
        np.testing.assert_allclose(resampled(1000), reference, atol=5e-3)


def test_a_length_that_was_never_filled_in_goes_to_the_end() -> None:
    file = bytearray(file_of(encoded(tone(440, 8000), 1, 16), 1, 1, 8000, 16))
    place = file.index(b"data")
    for length in (0, 0xFFFFFFFF):
        struct.pack_into("<I", file, place + 4, length)
        assert read_wav(file).blocks == 8000


@pytest.mark.parametrize(
    ("file", "kind", "message"),
    [
        (b"fLaC" + bytes(20), UnsupportedMedia, r"begins with b'fLaC.* taken are WAV files of 8, 16"),
        (b"", UnsupportedMedia, "which is no WAV"),
        (b"RIFF\0\0\0\0WAVE", FieldRefused, "needs its parts 'fmt ' and 'data'"),
        (file_of(bytes(8), 7, 1, 8000, 8), UnsupportedMedia, "format 7 with 8 bits; taken are"),
        (file_of(bytes(8), 1, 1, 8000, 12), UnsupportedMedia, "format 1 with 12 bits"),
        (file_of(bytes(8), 1, 33, 8000, 8), FieldRefused, "33 channels, 1 to 32 are taken"),
        (file_of(bytes(8), 1, 1, 3999, 8), FieldRefused, "3999 samples a second, 4000 to 384000"),
        (file_of(b"", 1, 1, 8000, 8), FieldRefused, "holds no samples"),
        (file_of(bytes(3), 1, 2, 8000, 16), FieldRefused, "holds no samples"),
    ],
)
def test_what_is_no_sound_is_refused_by_name(file: bytes, kind: type[Refusal], message: str) -> None:
    with pytest.raises(kind, match=message) as refused:
        read_wav(file)
    assert refused.value.param in ("file", None)
    assert refused.value.status == (415 if kind is UnsupportedMedia else 400)


def test_blocks_that_do_not_fit_and_samples_that_are_not_finite_are_refused() -> None:
    file = bytearray(file_of(bytes(8), 1, 1, 8000, 16))
    struct.pack_into("<H", file, file.index(b"fmt ") + 20, 3)
    with pytest.raises(FieldRefused, match="blocks of 3 bytes, 1 channels of 16 bits need 2"):
        read_wav(file)
    sound = read_wav(file_of(struct.pack("<2f", 0.0, float("nan")), 3, 1, 8000, 32))
    with pytest.raises(FieldRefused, match="a sample is not finite"):
        sound.mono(0, 2)


@pytest.mark.parametrize("name", sorted(path.name for path in SHIPPED.glob("*.wav")))
def test_files_from_elsewhere_are_read_or_refused_by_name(name: str) -> None:
    try:
        samples = read_wav((SHIPPED / name).read_bytes()).resampled(0, 100, 16_000)
    except (UnsupportedMedia, FieldRefused) as refusal:
        said = str(refusal)
    else:
        said = "file of finite samples" if np.isfinite(samples).all() else ""
    assert said.startswith("file")
