"""Reading and writing safetensors files piece by piece, without mapping them into memory.

Mapped pages count as resident memory and are slow on network file systems, so parameters are
read with plain sequential reads. The writer keeps the order it is given: parameters that are
used together lie side by side in the file, and a loader can view them as one matrix.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
then the data. This module knows bytes only, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from keystage.bundle.dtypes import FLOAT_NAMES, ITEM_BYTES, SAFETENSORS_NAMES
from keystage.bundle.errors import BundleError
from keystage.wire.unreadable import UNREADABLE

_ALIGN_BYTES = 64
_MAX_HEADER_BYTES = 100_000_000
_SAYABLE = 1 << 63


class TensorEntry(msgspec.Struct, frozen=True):
    """Header entry of one tensor; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(msgspec.Struct, frozen=True):
    """Parsed header.

    Attributes:
        data_start: offset of the first data byte in the file.
        tensors: entries by name.
    """

    data_start: int
    tensors: dict[str, TensorEntry]


def parse_header(path: Path) -> Header:
    """Reads and checks the header of a safetensors file.

    Raises:
        BundleError: missing, truncated, or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise BundleError(
                    f"{path}: truncated or no safetensors file: "
                    f"header of {length} bytes, file of {size} bytes"
                )
            raw = file.read(length)
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror or error}") from error
    return Header(8 + length, _entries(path, raw, size - 8 - length))


def header_in(name: Path, content: memoryview) -> Header:
    """Reads and checks the header of a safetensors file that is in memory.

    Args:
        name: for messages.
        content: the whole file.

    Raises:
        BundleError: truncated, or no safetensors file.
    """
    size = len(content)
    length = int.from_bytes(content[:8], "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise BundleError(
            f"{name}: truncated or no safetensors file: header of {length} bytes, content of {size} bytes"
        )
    return Header(8 + length, _entries(name, bytes(content[8 : 8 + length]), size - 8 - length))


def _entries(path: Path, raw: bytes, data_bytes: int) -> dict[str, TensorEntry]:
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        entries = {n: msgspec.json.decode(field, type=TensorEntry) for n, field in fields.items()}
    except UNREADABLE as error:
        raise BundleError(f"{path}: garbled safetensors header: {error}") from error
    for name, entry in entries.items():
        start, end = entry.data_offsets
        if not 0 <= start <= end <= data_bytes:
            raise BundleError(
                f"{path}: truncated: tensor {name} lies at data bytes {start} to {end}, "
                f"the file holds {data_bytes}"
            )
        item = ITEM_BYTES.get(FLOAT_NAMES.get(entry.dtype, ""), 0)
        needed = item * math.prod(entry.shape)
        if item and end - start != needed:
            # Python refuses to write numbers of more than 4,300 digits, which a shape's product may have.
            said = str(needed) if -_SAYABLE < needed < _SAYABLE else f"more than {_SAYABLE}"
            raise BundleError(
                f"{path}: tensor {name} of shape {str(list(entry.shape))[:200]} in {entry.dtype} "
                f"needs {said} bytes, has {end - start}"
            )
    return entries


def read_range(path: Path, start: int, buffer: memoryview) -> None:
    """Fills `buffer` from a file, from byte `start` on.

    Raises:
        BundleError: the file is missing or ends early.
    """
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while done < len(buffer):
                got = file.readinto(buffer[done:])
                if not got:
                    raise BundleError(
                        f"{path}: truncated: {start + len(buffer)} bytes expected, {start + done} found"
                    )
                done += got
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror or error}") from error


def header_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> bytes:
    """Header of a file that holds `shapes` in this order, all of one type, without gaps.

    Args:
        shapes: tensor name to shape, in file order.
        dtype: `float32`, `bfloat16` or `float16`.

    Returns:
        Length prefix and JSON, padded so that the data starts on a 64-byte border.
    """
    entries: dict[str, TensorEntry] = {}
    start = 0
    for name, shape in shapes.items():
        end = start + ITEM_BYTES[dtype] * math.prod(shape)
        entries[name] = TensorEntry(SAFETENSORS_NAMES[dtype], shape, (start, end))
        start = end
    raw = msgspec.json.encode(entries)
    raw += b" " * (-(len(raw) + 8) % _ALIGN_BYTES)
    return len(raw).to_bytes(8, "little") + raw
