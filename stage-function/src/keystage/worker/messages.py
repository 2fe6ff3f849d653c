"""Messages of a stream program as bytes: header and layout for `meta`, tensors in one block.

Between `streams.api.Message`, which modules see, and `turns.Packed`, which travels. Tensors that come in are
copied once into memory of this process, so that modules may keep them; those that go out are copied to the
host together, with one wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from keystage.streams.api import Header, Message, ProgramError
from keystage.wire.unreadable import UNREADABLE

ALIGN_BYTES = 64
MOST_META_BYTES = 64 * 1024
"""Of header and layout: they travel through the router; what is large is a tensor."""


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in the block."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class _Meta(msgspec.Struct, frozen=True, array_like=True):
    header: Header
    places: list[_Place]
    nbytes: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Meta)


def pack(name: str, messages: Sequence[Message]) -> list[tuple[bytes, memoryview | None] | ProgramError]:
    """Packs what a module computed.

    Args:
        name: of the module, for messages.
        messages: their tensors may lie on any device; if on one, they are copied together.

    Returns:
        For each message `meta` and the block of its tensors (None: it has none), or why it cannot travel.
    """
    flat: list[torch.Tensor] = []
    metas: list[tuple[bytes, int] | ProgramError] = []
    for message in messages:
        try:
            meta, parts, nbytes = _laid_out(name, message)
        except ProgramError as error:
            metas.append(error)
            continue
        flat.extend(parts)
        metas.append((meta, nbytes))
    block = memoryview(b"")
    if flat:
        if len({part.device for part in flat}) > 1:
            flat = [part.cpu() for part in flat]
        whole = torch.cat(flat) if len(flat) > 1 else flat[0]
        block = whole.cpu().contiguous().numpy().data
    packed: list[tuple[bytes, memoryview | None] | ProgramError] = []
    start = 0
    for entry in metas:
        if isinstance(entry, ProgramError):
            packed.append(entry)
            continue
        meta, nbytes = entry
        packed.append((meta, block[start : start + nbytes] if nbytes else None))
        start += nbytes
    return packed


def unpack(meta: bytes, data: memoryview | None) -> Message:
    """The message, its tensors in memory of its own.

    Raises:
        ProgramError: the bytes are not as `meta` says.
    """
    try:
        described = _decoder.decode(meta)
        have = 0 if data is None else data.nbytes
        if not 0 <= described.nbytes <= have:
            raise ValueError(f"its tensors take {described.nbytes}")
        block = torch.empty(described.nbytes, dtype=torch.uint8)
        if data is not None and described.nbytes:
            block.numpy().data[:] = data[: described.nbytes]
        tensors = {place.name: _viewed(block, place) for place in described.places}
    except (RuntimeError, TypeError, ValueError, OverflowError, *UNREADABLE) as error:
        raise ProgramError(
            f"a message of {0 if data is None else data.nbytes} bytes: {error}", 500
        ) from error
    return Message(described.header, tensors)


def _laid_out(name: str, message: Message) -> tuple[bytes, list[torch.Tensor], int]:
    """`meta`, the bytes of its tensors with padding between them, and how many they are."""
    places: list[_Place] = []
    parts: list[torch.Tensor] = []
    nbytes = 0
    for key, tensor in message.data.items():
        if not isinstance(tensor, torch.Tensor) or not isinstance(key, str) or tensor.layout != torch.strided:
            raise ProgramError(
                f"module {name}: data {key!r} is {type(tensor).__name__}, no dense tensor", 500
            )
        places.append(_Place(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), nbytes))
        part = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        padding = -part.numel() % ALIGN_BYTES
        parts.append(part)
        if padding:
            parts.append(torch.zeros(padding, dtype=torch.uint8, device=tensor.device))
        nbytes += part.numel() + padding
    try:
        meta = _encoder.encode(_Meta(message.header, places, nbytes))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProgramError(f"module {name}: a header cannot travel: {error}", 500) from error
    if len(meta) > MOST_META_BYTES:
        raise ProgramError(
            f"module {name}: a header of {len(meta)} bytes, at most {MOST_META_BYTES} travel", 500
        )
    return meta, parts, nbytes


def _viewed(block: torch.Tensor, place: _Place) -> torch.Tensor:
    dtype = getattr(torch, place.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"tensor {place.name!r} of unknown type {place.dtype!r}")
    end = place.offset + math.prod(place.shape) * dtype.itemsize
    if not 0 <= place.offset <= end <= block.numel():
        raise ValueError(f"tensor {place.name!r} ends at byte {end} of {block.numel()}")
    return block[place.offset : end].view(dtype).view(place.shape)
