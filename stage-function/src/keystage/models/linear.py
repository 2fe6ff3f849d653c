"""Matrix multiplication with resident weights, in the layout that is fastest on the device.

On CPU oneDNN keeps weights in blocks: measured for SmolLM2's layers in fp32 on one thread, four
rows take 25 ms instead of 51, 128 rows 256 ms instead of 314. That layout is a copy; a caller that
shares parameters between processes takes it with `keep` and moves it into shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.nn import functional

from keystage.models.shared import Keep

Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps [T, in] to [T, out]."""

# oneDNN's own operators, which torch's compiler uses too. They carry no promise of stability, so
# they are looked up by name, and where one is gone the plain multiplication serves.
_REORDER, _MULTIPLY, _HAS_BF16 = "_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"


def linear(
    weight: torch.Tensor, bias: torch.Tensor | None, *, packed: bool = True, keep: Keep | None = None
) -> Linear:
    """Makes x -> x @ weight.T + bias.

    Args:
        weight: [out, in], on its device.
        bias: [out] or None.
        packed: whether a copy in a faster layout is allowed (used on CPU only).
        keep: gets the matrix that is multiplied with, packed or as it is.
    """
    if packed and is_packable(weight.device, weight.dtype):
        return _packed(weight, bias, keep)
    if keep is not None:
        keep(weight)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    return multiply


def is_packable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type well here; fp16 is left to the plain path."""
    if device.type != "cpu":
        return False
    if not (hasattr(torch.ops.mkldnn, _MULTIPLY) and hasattr(torch.ops.mkldnn, _REORDER)):
        return False
    if dtype is torch.bfloat16:
        return bool(getattr(torch.ops.mkldnn, _HAS_BF16)())
    return dtype is torch.float32


def ready_linear(matrix: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """As `linear`, with a matrix that another process has packed, or has left as it is.

    Args:
        matrix: [out, in], a packed one from the same oneDNN.
        bias: [out] or None.
    """
    if matrix.is_mkldnn:
        return _multiplying(matrix, bias)
    return linear(matrix, bias, packed=False)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None, keep: Keep | None) -> Linear:
    blocks = getattr(torch.ops.mkldnn, _REORDER)(weight)
    if keep is not None:
        keep(blocks)
    return _multiplying(blocks, bias)


def _multiplying(blocks: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    own_bias = None if bias is None else bias.clone()
    multiply_blocks = getattr(torch.ops.mkldnn, _MULTIPLY).default

    def multiply(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply_blocks(x, blocks, own_bias, "none", [], "")
        return result

    return multiply
