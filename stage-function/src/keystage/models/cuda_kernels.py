"""Small Triton kernels of a decoder step: what torch would do in several launches, in one.

A decode step of a 7B model is a few hundred launches of a few microseconds; its matrices take most of
the time only if everything between them is fused. `cuda_span` calls these inside CUDA graphs and, for
prompts, outside. Attention over paged KV state is in `cuda_attention`. Triton comes with CUDA builds of
torch; where it (or the C compiler that it needs once) is missing, `cuda_span` is not used at all.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
_ACTIVATE_BLOCK = 1024


@triton.jit
def _norm_kernel(
    x, delta, weight, bias, out, width, eps,
    IS_RMS: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0)
    if HAS_DELTA:
        value = value + tl.load(delta + row * width + at, mask=inside, other=0.0)
        tl.store(x + row * width + at, value, mask=inside)
    wide = value.to(tl.float32)
    if IS_RMS:
        centred = wide
    else:
        mean = tl.sum(wide, 0) / width
        centred = tl.where(inside, wide - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    result = centred * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, result.to(out.dtype.element_ty), mask=inside)


def norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_rms: bool,
) -> torch.Tensor:
    """Adds `delta` to `x` in place and normalises the sum.

    Args:
        x: [T, hidden], contiguous; becomes x + delta.
        delta: [T, hidden], None: nothing is added.
        weight: [hidden].
        bias: [hidden] or None.
        eps: added to the mean square (or the variance).
        is_rms: root mean square; False: mean and variance.

    Returns:
        [T, hidden] of the same type.
    """
    out = torch.empty_like(x)
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _norm_kernel[(x.shape[0],)](
        x, delta, weight, bias, out, width, eps,
        IS_RMS=is_rms, HAS_DELTA=delta is not None, HAS_BIAS=bias is not None, BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip
    return out


@triton.jit
def _activate_kernel(
    up, out, width, KIND: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    start = up + row * width * (2 if IS_GATED else 1)
    stored = tl.load(start + at, mask=inside, other=0.0)
    value = stored.to(tl.float32)
    if KIND == 0:
        value = value * tl.sigmoid(value)
    elif KIND == 1:
        value = 0.5 * value * (1.0 + tl.math.erf(value * 0.7071067811865476))
    elif KIND == 2:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = value * tl.sigmoid(2.0 * inner)
    else:
        value = tl.maximum(value, 0.0)
    value = value.to(stored.dtype)
    if IS_GATED:
        value = value * tl.load(start + width + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, value, mask=inside)


def activate(up: torch.Tensor, kind: Activation, *, is_gated: bool) -> torch.Tensor:
    """The activation of the feed-forward block.

    Args:
        up: [T, width], or gate and up side by side [T, 2 * width].
        kind: which function.
        is_gated: whether the activated first half is multiplied with the second.

    Returns:
        [T, width].
    """
    tokens, total = up.shape
    width = total // 2 if is_gated else total
    out = up.new_empty(tokens, width)
    grid = (tokens, triton.cdiv(width, _ACTIVATE_BLOCK))
    _activate_kernel[grid](
        up, out, width, KIND=_ACTIVATIONS[kind], IS_GATED=is_gated, BLOCK=_ACTIVATE_BLOCK, num_warps=4
    )
    return out


# As in `cuda_attention`: where these vectors begin differs from wave to wave.
@triton.jit(do_not_specialize=["positions", "slots"])
def _place_kernel(
    qkv, cos, sin, positions, slots, keys, values, q_norm, k_norm, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HAS_ROPE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    width = (HEADS + 2 * KV_HEADS) * DIM
    source = qkv + token * width + head * DIM
    half = tl.arange(0, HALF)
    inside = half < DIM // 2
    first = tl.load(source + half, mask=inside, other=0.0)
    second = tl.load(source + DIM // 2 + half, mask=inside, other=0.0)
    is_value = head >= HEADS + KV_HEADS
    if HAS_NORM and not is_value:
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / DIM + eps)
        weight = q_norm if head < HEADS else k_norm
        first = (a * scale).to(first.dtype) * tl.load(weight + half, mask=inside, other=0.0)
        second = (b * scale).to(second.dtype) * tl.load(weight + DIM // 2 + half, mask=inside, other=0.0)
    if HAS_ROPE and not is_value:
        position = tl.load(positions + token).to(tl.int64)
        c = tl.load(cos + position * DIM + half, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + position * DIM + DIM // 2 + half, mask=inside, other=0.0).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first = (a * c - b * s).to(first.dtype)
        second = (b * c + a * s).to(second.dtype)
    if head < HEADS:
        if HAS_ROPE or HAS_NORM:
            tl.store(source + half, first, mask=inside)
            tl.store(source + DIM // 2 + half, second, mask=inside)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if is_value:
            target = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM
        else:
            target = keys + (slot * KV_HEADS + head - HEADS) * DIM
        tl.store(target + half, first, mask=inside)
        tl.store(target + DIM // 2 + half, second, mask=inside)


def place(
    qkv: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    heads: int,
) -> None:
    """Normalises and turns queries in place; does the same to keys and puts them, with values, into KV state.

    Args:
        qkv: [T, heads + 2 * kv_heads, head_dim], contiguous; its queries are overwritten.
        rope: cosine and sine tables [positions, head_dim], the sine's first half negated; None: no rotation.
        positions: integers [T].
        slots: integers [T]: where each token's key and value go, as rows of the pool.
        kv: keys and values, each [rows, kv_heads, head_dim].
        norms: weights [head_dim] of the RMS norm of every query and key head, None: there is none.
        eps: of that norm.
        heads: query heads.
    """
    tokens, _, dim = qkv.shape
    keys, values = kv
    cos, sin = rope or (None, None)
    q_norm, k_norm = norms or (None, None)
    grid = (tokens, heads + 2 * keys.shape[1])
    _place_kernel[grid](
        qkv, cos, sin, positions, slots, keys, values, q_norm, k_norm, eps,
        HEADS=heads, KV_HEADS=keys.shape[1], DIM=dim, HALF=triton.next_power_of_2(dim // 2),
        HAS_ROPE=rope is not None, HAS_NORM=norms is not None, num_warps=1,
    )  # fmt: skip
