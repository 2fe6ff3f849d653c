"""Bodies that are images: what is taken, how a file is cut, and what is refused before it costs memory."""

from __future__ import annotations

import io
import json
import struct
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from keystage.models.wide_resnet_config import parse
from keystage.router.images import MOST_PIXELS, is_file, read
from keystage.router.openai_errors import Malformed, UnsupportedMedia

CONFIG = parse({"layers": [1, 1, 1, 1], "num_classes": 7, "image_size": 32, "resize": 40})


def file_of(pixels: Any, kind: str = "PNG", mode: str | None = None) -> bytes:
    stream = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(stream, kind)
    return stream.getvalue()


def npy_of(array: Any, version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version, allow_pickle=False)
    return stream.getvalue()


def tensor_of(dtype: str, shape: tuple[int, ...], data: bytes, name: str = "image") -> bytes:
    head = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    return len(head).to_bytes(8, "little") + head + data


@pytest.mark.parametrize("mode", [None, "L", "RGBA", "P"])
def test_a_file_of_any_mode_becomes_the_middle_square_in_three_colours(mode: str | None) -> None:
    pixels = np.full((40, 60, 3), 200, np.uint8)
    pixels[4:36, 14:46] = 90  # the square that is kept, without the border that is not
    picture = read(file_of(pixels, mode=mode), CONFIG)
    assert (picture.dtype, picture.shape) == ("uint8", (3, 32, 32))
    most = 51 if mode == "P" else 1  # the steps of a palette, dithered
    assert abs(np.frombuffer(picture.data, "u1").astype(int) - 90).max() <= most


def test_a_file_of_another_size_is_resized_as_the_network_was_trained() -> None:
    pixels = np.linspace(0, 255, 120 * 90 * 3).reshape(120, 90, 3).astype(np.uint8)
    picture = read(file_of(pixels, "JPEG"), CONFIG)
    resized = Image.fromarray(pixels).resize((40, round(120 * 40 / 90)), Image.Resampling.BILINEAR)
    expected = np.asarray(resized)[11:43, 4:36].transpose(2, 0, 1)
    found = np.frombuffer(picture.data, "u1").reshape(3, 32, 32)
    assert abs(found.astype(int) - expected).mean() < 4


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_arrays_are_taken_as_they_are(dtype: Any, version: tuple[int, int]) -> None:
    array = np.arange(3 * 33 * 64).reshape(3, 33, 64).astype(dtype)
    name = {np.uint8: "U8", np.float32: "F32"}[dtype]
    for body in (npy_of(array, version), tensor_of(name, array.shape, array.tobytes())):
        picture = read(body, CONFIG)
        assert (picture.dtype, picture.shape) == (array.dtype.name, array.shape)
        assert picture.data == array.tobytes()


def claimed_png(width: int, height: int) -> bytes:
    """A PNG whose header claims a size; there is no picture behind it."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    head = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + head + struct.pack(">I", 4) + b"IDAT" + bytes(8)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (claimed_png(100_000, 100_000), "exceeds limit"),
        (claimed_png(12_000, 12_000), "exceeds limit"),
        (claimed_png(9000, 9000), f"9000 x 9000 pixels; at most {MOST_PIXELS} are taken"),
        (file_of(np.zeros((40, 40, 3), np.uint8))[:-30], "cannot be read"),
        (b"\xff\xd8\xff", "cannot be read"),
        (b"\x93NUMPY\x01\x00", "npy body of 8 bytes that cannot be read"),
        (b"\x93NUMPY\x09\x00" + b" " * 80, r"npy body of version \(9, 0\)"),
        (npy_of(np.zeros((3, 32, 32), np.float64)), "type float64 in C order"),
        (npy_of(np.asfortranarray(np.zeros((3, 32, 32), np.uint8))), "type uint8 in Fortran order"),
        (npy_of(np.zeros((3, 32, 32), np.uint8))[:-1], "has 3072 bytes, not 3071"),
        (npy_of(np.zeros((3, 32, 32), np.uint8)).replace(b"(3, 32, 32)", b"(9**9, 3, )"), "cannot be read"),
        (npy_of(np.zeros((32, 32, 3), np.uint8)), r"shape \[32, 32, 3\]: \[3, H, W\] is taken"),
        (npy_of(np.zeros((3, 31, 32), np.uint8)), "H and W from 32 to 64"),
        (npy_of(np.zeros((3, 32, 65), np.uint8)), "H and W from 32 to 64"),
        (tensor_of("F16", (3, 32, 32), bytes(6144)), "one tensor 'image' of type U8 or F32"),
        (tensor_of("U8", (3, 32, 32), bytes(3072), "picture"), "one tensor 'image'"),
        (tensor_of("U8", (3, 32, 32), bytes(3071)), "has 3072 bytes, not 3071"),
        (tensor_of("F32", (3, 32, 32), bytes(3072)), "needs 12288 bytes, has 3072"),
        ((2**40).to_bytes(8, "little") + b"{}", "truncated or no safetensors"),
        ((2).to_bytes(8, "little") + b"{}", "one tensor 'image'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(body: bytes, message: str) -> None:
    with pytest.raises(Malformed, match=message):
        read(body, CONFIG)


@pytest.mark.parametrize("body", [b"", b"{", b"GIF89a", b'{"prompt": "a"}', b"BM" + bytes(60)])
def test_other_kinds_are_refused_with_what_is_taken(body: bytes) -> None:
    with pytest.raises(UnsupportedMedia, match="image/png, image/jpeg, application/x-npy"):
        read(body, CONFIG)


def test_without_pillow_files_are_refused_by_its_name_and_arrays_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = file_of(np.zeros((40, 40, 3), np.uint8))
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert is_file(body)
    with pytest.raises(UnsupportedMedia, match="need Pillow"):
        read(body, CONFIG)
    assert read(npy_of(np.zeros((3, 32, 32), np.uint8)), CONFIG).shape == (3, 32, 32)
