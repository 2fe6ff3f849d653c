"""Parameters viewed where they lie: the bytes of a stage's file as named tensors.

Nothing is copied but what begins at no multiple of its element's size, which the format allows and no
processor views (our own files have none of it).

After `models.loading` has read a file, or the KeysManager has mapped a segment with the same bytes;
before a family builds a stage from them. Hashes are not looked at here.
"""

from __future__ import annotations

from pathlib import Path

import torch

from keystage.bundle.dtypes import FLOAT_NAMES
from keystage.bundle.errors import BundleError
from keystage.bundle.safetensors_file import Header, header_in


def tensors_in(buffer: torch.Tensor, origin: str, header: Header | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file that is in memory.

    Args:
        buffer: uint8 [nbytes], the whole file.
        origin: for messages.
        header: its header where the caller has parsed it.

    Raises:
        BundleError: truncated, no safetensors file, or a tensor that is not of a floating type.
    """
    found = header_in(Path(origin), buffer.numpy().data) if header is None else header
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in found.tensors.items():
        start, end = (found.data_start + offset for offset in entry.data_offsets)
        if entry.dtype not in FLOAT_NAMES:
            raise BundleError(f"{origin}: tensor {name} has type {entry.dtype}, a floating type is expected")
        dtype = getattr(torch, FLOAT_NAMES[entry.dtype])
        part = buffer[start:end]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        tensors[name] = part.view(dtype).view(entry.shape)
    return tensors
