"""Matrix multiplication with resident weights, in the layout that is fastest on the device.

On CPU oneDNN keeps weights in blocks: measured for SmolLM2's layers in fp32 on one thread, four
rows take 25 ms instead of 51, 128 rows 256 ms instead of 314. That layout is a private copy; a
caller that shares one mapping of the parameters between processes passes `packed=False` and gets
the plain multiplication on the memory as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.nn import functional

Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps [T, in] to [T, out]."""

# oneDNN's own operators, which torch's compiler uses too. They carry no promise of stability, so
# they are looked up by name, and where one is gone the plain multiplication serves.
_REORDER, _MULTIPLY, _HAS_BF16 = "_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"


def linear(weight: torch.Tensor, bias: torch.Tensor | None, *, packed: bool = True) -> Linear:
    """Makes x -> x @ weight.T + bias.

    Args:
        weight: [out, in], on its device.
        bias: [out] or None.
        packed: whether a private copy in a faster layout is allowed (used on CPU only).
    """
    if packed and _is_packable(weight):
        return _packed(weight, bias)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    return multiply


def _is_packable(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies this type well here; fp16 is left to the plain path."""
    if weight.device.type != "cpu":
        return False
    if not (hasattr(torch.ops.mkldnn, _MULTIPLY) and hasattr(torch.ops.mkldnn, _REORDER)):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(getattr(torch.ops.mkldnn, _HAS_BF16)())
    return weight.dtype is torch.float32


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    blocks = getattr(torch.ops.mkldnn, _REORDER)(weight)
    own_bias = None if bias is None else bias.clone()
    multiply_blocks = getattr(torch.ops.mkldnn, _MULTIPLY).default

    def multiply(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply_blocks(x, blocks, own_bias, "none", [], "")
        return result

    return multiply
