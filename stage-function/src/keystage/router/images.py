"""Bodies that are images: PNG and JPEG files, and arrays as npy or safetensors.

Before it: `router.classes` has the whole body. What a body is shows in its first bytes, whatever its
Content-Type says. A file is cut as the network was trained: the shorter side is brought to `resize` pixels
and the middle square of `image_size` taken; the first stage takes off the mean. An array is taken as it
is: uint8 from 0 to 255, or float32 normalised already. Pillow is an extra, and without it files are refused.
"""

from __future__ import annotations

import dataclasses
import io
import math
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keystage.bundle.errors import BundleError
from keystage.bundle.safetensors_file import header_in
from keystage.models.wide_resnet_config import WideResNetConfig
from keystage.router.openai_errors import Malformed, UnsupportedMedia

if TYPE_CHECKING:
    from PIL.Image import Image

TYPES = ("image/png", "image/jpeg", "application/x-npy", "application/x-safetensors")
"""What is taken, by the names that go into an Accept or Content-Type header."""
MOST_PIXELS = 32 * 1024 * 1024
"""Of a file: 96 MiB once decoded. A small file can claim a picture that no machine holds."""
_PNG, _JPEG, _NPY = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"\x93NUMPY"
_SAYABLE = 1 << 63
"""Python refuses to write numbers of more than 4,300 digits, which a shape's product may have."""
_DTYPES = {"U8": "uint8", "F32": "float32"}


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """One item: bytes of [3, H, W] in C order.

    Attributes:
        dtype: `uint8` or `float32`.
        shape: elements per axis.
        data: the bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def is_file(body: bytes) -> bool:
    """Whether the body must be decoded, which takes milliseconds."""
    return body.startswith((_PNG, _JPEG))


def read(body: bytes, config: WideResNetConfig) -> Picture:
    """Reads a body.

    Raises:
        UnsupportedMedia: it is of none of the known kinds, or needs Pillow and that is not installed.
        Malformed: it is of one and cannot be read, or has a wrong type or size.
    """
    if is_file(body):
        return _file(body, config)
    if body.startswith(_NPY):
        picture = _npy(body)
    elif len(body) > 9 and body[8:9] == b"{":
        picture = _safetensors(body)
    else:
        raise UnsupportedMedia(
            f"a body of {len(body)} bytes that begins with {body[:8]!r}: {', '.join(TYPES)} are taken"
        )
    low, high = config.least_side, config.most_side
    shape = picture.shape
    if len(shape) != 3 or shape[0] != 3 or not all(low <= side <= high for side in shape[1:]):
        raise Malformed(f"an array of shape {list(shape)}: [3, H, W] is taken, H and W from {low} to {high}")
    return picture


def _file(body: bytes, config: WideResNetConfig) -> Picture:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UnsupportedMedia(
            f"PNG and JPEG files need Pillow (pip install pillow), which is not installed here; "
            f"{', '.join(TYPES[2:])} are taken"
        ) from None
    try:
        with Image.open(io.BytesIO(body), formats=("PNG", "JPEG")) as opened:
            width, height = opened.size
            if not 1 <= width * height <= MOST_PIXELS:
                raise Malformed(f"an image of {width} x {height} pixels; at most {MOST_PIXELS} are taken")
            cut = _cut(opened.convert("RGB"), config)
    except UnidentifiedImageError:
        raise Malformed(f"an image file of {len(body)} bytes that cannot be read") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Malformed(f"an image file of {len(body)} bytes: {error}") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise Malformed(f"an image file of {len(body)} bytes that cannot be read: {error}") from error
    pixels = np.ascontiguousarray(np.asarray(cut, dtype=np.uint8).transpose(2, 0, 1))
    return Picture("uint8", pixels.shape, pixels.tobytes())


def _cut(image: Image, config: WideResNetConfig) -> Image:
    from PIL.Image import Resampling

    width, height = image.size
    side, wanted = min(width, height), config.image_size
    # First the middle square, then the size: the same pixels, and a long strip does not grow.
    kept = side * wanted / max(config.resize, wanted)
    left, top = (width - kept) / 2, (height - kept) / 2
    box = (left, top, left + kept, top + kept)
    return image.resize((wanted, wanted), Resampling.BILINEAR, box=box)


def _npy(body: bytes) -> Picture:
    stream = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(stream)
        reader: Any = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if reader is None:
            raise Malformed(f"an npy body of version {version}: 1.0 and 2.0 are taken")
        shape, is_fortran, dtype = reader(stream)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise Malformed(f"an npy body of {len(body)} bytes that cannot be read: {error}") from error
    if is_fortran or dtype not in (np.dtype("u1"), np.dtype("<f4")):
        order = "Fortran" if is_fortran else "C"
        raise Malformed(f"an npy body of type {dtype} in {order} order: uint8 or float32 in C order is taken")
    return _picture(dtype.name, shape, body[stream.tell() :])


def _safetensors(body: bytes) -> Picture:
    try:
        header = header_in(Path("body"), memoryview(body))
    except BundleError as error:
        raise Malformed(str(error)) from error
    entry = header.tensors.get("image")
    if entry is None or len(header.tensors) != 1 or entry.dtype not in _DTYPES:
        found = {name: tensor.dtype for name, tensor in header.tensors.items()}
        raise Malformed(f"one tensor 'image' of type U8 or F32 is taken, not {str(found)[:200]}")
    start, end = (header.data_start + offset for offset in entry.data_offsets)
    return _picture(_DTYPES[entry.dtype], entry.shape, body[start:end])


def _picture(dtype: str, shape: tuple[int, ...], data: bytes) -> Picture:
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if not -_SAYABLE < expected < _SAYABLE:
        raise Malformed(f"an array {dtype} of a shape of more than {_SAYABLE} bytes")
    if len(data) != expected:
        raise Malformed(f"an array {dtype} {list(shape)} has {expected} bytes, not {len(data)}")
    return Picture(dtype, tuple(shape), data)
