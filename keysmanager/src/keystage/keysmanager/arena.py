"""One block of device memory that holds a stage's parameters, and where in it each one lies.

Between a segment (a stage's file, byte for byte) and `models.loading.build_stage`. The arena holds the
file's data without its header, so that stages of one shape class have the same offsets although their
headers differ in length. Parameters are views: filling the arena again is all it takes to become
another stage. No copying happens here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keystage.bundle.dtypes import FLOAT_NAMES, ITEM_BYTES
from keystage.bundle.errors import BundleError
from keystage.bundle.safetensors_file import header_bytes, header_in

if TYPE_CHECKING:
    import torch

_ALIGN_BYTES = 2 * 1024 * 1024
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lies: its name and shape, its type (`float32`, ...), bytes from the data's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A stage's file seen as places.

    Attributes:
        data_start: bytes of the header before the data.
        data_bytes: bytes of data.
        places: in file order.
    """

    data_start: int
    data_bytes: int
    places: tuple[Place, ...]


def layout_of(view: memoryview, name: str = "segment") -> Layout:
    """Reads the layout from a file in memory.

    Args:
        view: the file.
        name: for messages.

    Raises:
        BundleError: no safetensors file, or it holds no floating type.
    """
    header = header_in(Path(name), view)
    places: list[Place] = []
    for tensor, entry in header.tensors.items():
        if entry.dtype not in FLOAT_NAMES:
            raise BundleError(f"{name}: tensor {tensor} has type {entry.dtype}, a floating type is expected")
        places.append(Place(tensor, FLOAT_NAMES[entry.dtype], entry.shape, entry.data_offsets[0]))
    return Layout(header.data_start, len(view) - header.data_start, tuple(places))


def layout_for(shapes: dict[str, tuple[int, ...]], dtype: str) -> Layout:
    """The layout that `bundle.stage_file` gives parameters of these shapes, in this order."""
    places: list[Place] = []
    offset = 0
    for name, shape in shapes.items():
        places.append(Place(name, dtype, shape, offset))
        size = ITEM_BYTES[dtype]
        for side in shape:
            size *= side
        offset += size
    return Layout(len(header_bytes(shapes, dtype)), offset, tuple(places))


def check_equal(expected: Layout, found: Layout) -> None:
    """Makes sure that a segment fits an arena that was laid out for another stage of its class.

    Raises:
        BundleError: names the first parameter that differs.
    """
    if len(expected.places) != len(found.places):
        raise BundleError(
            f"segment holds {len(found.places)} parameters, this arena has places for {len(expected.places)}"
        )
    pairs = zip(_relative(expected.places), _relative(found.places), strict=True)
    for want, have in pairs:
        if want != have:
            raise BundleError(f"segment has {have}, this arena has a place for {want}")
    if expected.data_bytes != found.data_bytes:
        raise BundleError(f"segment holds {found.data_bytes} bytes of data, this arena {expected.data_bytes}")


def _relative(places: Sequence[Place]) -> list[Place]:
    """Places with layers counted from the stage's first."""
    numbers = [int(match.group()) for place in places if (match := _LAYER.search(place.name))]
    first = min(numbers, default=0)

    def renamed(name: str) -> str:
        return _LAYER.sub(lambda match: str(int(match.group()) - first), name, count=1)

    return [Place(renamed(p.name), p.dtype, p.shape, p.offset) for p in places]


class Arena:
    """Memory for the data of one stage.

    Args:
        data_bytes: bytes of data.
        device: full torch name. On the CPU it is private memory.

    Attributes:
        data: uint8, `data_bytes` long (rounded up to 2 MiB).
    """

    def __init__(self, data_bytes: int, device: str) -> None:
        import torch

        rounded = -(-data_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.data = torch.empty(rounded, dtype=torch.uint8, device=device)
        self.data_bytes = data_bytes

    def views(self, layout: Layout) -> dict[str, torch.Tensor]:
        """Parameters by name, as views in file order.

        Raises:
            BundleError: the layout is larger than the arena.
        """
        import torch

        if layout.data_bytes > self.data_bytes:
            raise BundleError(f"{layout.data_bytes} bytes of data, the arena has {self.data_bytes}")
        found: dict[str, torch.Tensor] = {}
        for place in layout.places:
            kind = getattr(torch, place.dtype)
            count = 1
            for side in place.shape:
                count *= side
            flat = self.data[place.offset : place.offset + count * ITEM_BYTES[place.dtype]]
            found[place.name] = flat.view(kind).view(place.shape)
        return found
