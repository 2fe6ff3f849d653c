"""Whether what a GGUF file says of its own lengths can be true, before `gguf` reads it.

The package takes a length as it stands: an array of 2^60 numbers is read, one by one, long after the file has
ended. This walks over metadata and tensor descriptions once, with no memory taken for them, and refuses what
does not fit into the file.

Layout (GGUF version 2 and 3): magic, u32 version, u64 tensors, u64 entries; an entry is a text, u32 type and
a value; a tensor is a text, u32 axes, u64 each, u32 type, u64 offset. A text is u64 bytes and as many bytes,
an array u32 type, u64 elements and the elements.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from keystage.bundle.errors import SplitError

MOST_AXES = 8
MOST_DEPTH = 4
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_LEAST_ENTRY_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8


class _Walk:
    """A place in the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self.at = path, data, 4
        (version,) = struct.unpack_from("<I", data, 4) if len(data) >= 24 else (0,)
        self._order = ">" if version & 0xFFFF == 0 else "<"
        self.number("I")

    @property
    def left(self) -> int:
        """Bytes up to the end of the file."""
        return len(self._data) - self.at

    def skip(self, nbytes: int, what: str) -> None:
        """Goes on by so many bytes, which must be there."""
        if nbytes > self.left:
            raise SplitError(
                f"{self._path}: truncated or no GGUF file: {what} of {nbytes} bytes, {self.left} are left"
            )
        self.at += nbytes

    def number(self, form: str) -> int:
        """The next unsigned number, u32 (`I`) or u64 (`Q`)."""
        size = struct.calcsize(f"={form}")
        self.skip(size, "a number")
        (value,) = struct.unpack_from(self._order + form, self._data, self.at - size)
        return int(value)

    def count(self, what: str, least_bytes: int) -> int:
        """The next u64, a number of things that take so many bytes each at least."""
        value = self.number("Q")
        if value * least_bytes > self.left:
            raise SplitError(
                f"{self._path}: truncated or no GGUF file: {value} {what}, {self.left} bytes are left"
            )
        return value

    def text(self) -> None:
        """Passes a text."""
        self.skip(self.number("Q"), "a text")

    def value(self, kind: int, depth: int = 0) -> None:
        """Passes a value of a type."""
        if kind == _STRING:
            self.text()
        elif kind == _ARRAY and depth < MOST_DEPTH:
            inner = self.number("I")
            count = self.count("elements of an array", _SIZES.get(inner, 8))
            if inner in _SIZES:
                self.skip(count * _SIZES[inner], "an array")
            else:
                for _ in range(count):
                    self.value(inner, depth + 1)
        elif kind in _SIZES:
            self.skip(_SIZES[kind], "a number")
        else:
            raise SplitError(f"{self._path}: no GGUF file: a value of type {kind}, in {depth} arrays")


def check(path: Path) -> None:
    """Walks over the head of a file.

    Raises:
        SplitError: something lies beyond the file's end, or is of no known type.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    if size < 24:
        raise SplitError(f"{path}: truncated or no GGUF file: {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        walk = _Walk(path, data)
        tensors = walk.number("Q")
        entries = walk.count("entries", _LEAST_ENTRY_BYTES)
        for _ in range(entries):
            walk.text()
            walk.value(walk.number("I"))
        if tensors * _LEAST_TENSOR_BYTES > walk.left:
            raise SplitError(
                f"{path}: truncated or no GGUF file: {tensors} tensors, {walk.left} bytes are left"
            )
        for _ in range(tensors):
            walk.text()
            axes = walk.number("I")
            if axes > MOST_AXES:
                raise SplitError(f"{path}: a tensor of {axes} axes, at most {MOST_AXES} are read")
            walk.skip(axes * 8 + 4 + 8, "a tensor's description")
