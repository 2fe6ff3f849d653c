"""A convolution, the batch norm after it and its rectifier, as one step where that is possible.

At inference the norm is a scale and a shift per channel, which the convolution's own weight and a bias
take up. On a CPU the folded weight is kept in oneDNN's blocks: measured for the layers of wide_resnet50_2
on one image and one thread, 88 ms instead of 149. Parameters that are on their way to a device may not be
combined before they have arrived; there convolution and norm run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.nn import functional

from keystage.models.linear import is_packable
from keystage.models.named_tensors import NamedTensors
from keystage.models.wide_resnet_layout import NORM_PARTS

Convolution: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps [items, in, H, W] to [items, out, H / stride, W / stride]."""

# oneDNN's own operators, as in `models.linear`: looked up by name, and done without where one is gone.
_REORDER, _CONVOLVE = "mkldnn_reorder_conv2d_weight", "_convolution_pointwise"


def memory_format(device: torch.device, dtype: torch.dtype) -> torch.memory_format:
    """How an activation [items, C, H, W] should lie: kernels of CPUs and of tensor cores want C innermost."""
    if device.type == "cpu" or dtype is not torch.float32:
        return torch.channels_last
    return torch.contiguous_format


def convolution(
    named: NamedTensors,
    names: tuple[str, str],
    eps: float,
    side: int,
    stride: int = 1,
    *,
    is_rectified: bool = True,
) -> Convolution:
    """Makes x -> relu(norm(x * weight)), padded so that only the stride makes it smaller.

    Args:
        named: parameters of the stage.
        names: of the convolution and of its norm.
        eps: added to the norm's variance.
        side: H and W that most inputs have; others work as well.
        stride: of the convolution.
        is_rectified: whether what is below 0 becomes 0.
    """
    kernel, norm = f"{names[0]}.weight", names[1]
    shape = tuple(named.stored(kernel).shape)
    padding = shape[-1] // 2
    if named.is_in_place:
        weight = named.table(kernel)
        gamma, beta, mean, variance = (named.vector(f"{norm}.{part}") for part in NORM_PARTS)

        def convolve_and_norm(x: torch.Tensor) -> torch.Tensor:
            x = functional.conv2d(x, weight, None, stride, padding)
            x = functional.batch_norm(x, mean, variance, gamma, beta, training=False, eps=eps)
            return functional.relu_(x) if is_rectified else x

        return convolve_and_norm

    gamma, beta, mean, variance = (named.stored(f"{norm}.{part}").float() for part in NORM_PARTS)
    scale = gamma / (variance + eps).sqrt()
    is_packed = is_packable(named.device, named.dtype) and _has_packed()

    def fold() -> torch.Tensor:
        weight = (named.stored(kernel).float() * scale[:, None, None, None]).to(named.device, named.dtype)
        if named.device.type != "cpu":
            return weight.contiguous(memory_format=memory_format(named.device, named.dtype))
        if not is_packed:
            return weight  # as it is: what is shared lies in a row
        size = [1, shape[1], side, side]
        reorder = getattr(torch._C._nn, _REORDER)  # noqa: SLF001  # the one place it can be had from
        packed: torch.Tensor = reorder(weight.to_mkldnn(), [padding] * 2, [stride] * 2, [1, 1], 1, size)
        return packed

    folded = named.made(shape, fold)
    bias = (beta - mean * scale).to(named.device, named.dtype)
    if folded.is_mkldnn:
        return _packed(folded, bias, stride, padding, is_rectified=is_rectified)

    def convolve(x: torch.Tensor) -> torch.Tensor:
        x = functional.conv2d(x, folded, bias, stride, padding)
        return functional.relu_(x) if is_rectified else x

    return convolve


def _has_packed() -> bool:
    return hasattr(torch._C._nn, _REORDER) and hasattr(torch.ops.mkldnn, _CONVOLVE)  # noqa: SLF001


def _packed(
    weight: torch.Tensor, bias: torch.Tensor, stride: int, padding: int, *, is_rectified: bool
) -> Convolution:
    run = getattr(torch.ops.mkldnn, _CONVOLVE).default
    after = "relu" if is_rectified else "none"

    def convolve(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run(x, weight, bias, [padding] * 2, [stride] * 2, [1, 1], 1, after, [], "")
        return result

    return convolve
