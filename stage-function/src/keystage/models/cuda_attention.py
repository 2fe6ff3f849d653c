"""Attention of single tokens over KV state in blocks, in two Triton kernels that a CUDA graph can hold.

One step of decoding: a token a session, each with keys and values in blocks of its own. The keys of a
session are dealt to several programs (split-KV, as in FlashDecoding), so that a batch of one keeps the
whole device busy; a second kernel joins their parts. torch's own variable-length attention has no block
table before 2.13 and does not split keys: measured on an H200 for 32 heads of 128 and 4,096 positions,
126 us against 20 us here (reading the keys takes 14). Prompts go through torch (see `cuda_span`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keystage.models.blocks import BLOCK_TOKENS

_TILE, _WARPS, _STAGES = 32, 2, 3
"""Positions a program reads at once, its warps, and how far ahead it reads: best or within 5 % of the best of
100 settings for 1 to 32 sessions of 600 to 4,096 positions, with 1 and 4 query heads a key head (H200)."""
_PROGRAMS_A_PROCESSOR = 8
_MOST_SPLITS = 32
_PROCESSORS_ELSEWHERE = 4
"""Where Triton's interpreter computes: enough for splits."""
_LEAST_SIDE = 16
"""Sides of the smallest tensor-core product: heads that share a key, and elements of a head, are padded to
it. The product of padded rows is still quicker than sums by element (7 against 35 us for 600 positions)."""
_LOG2_E = 1.4426950408889634


# Triton builds a kernel anew for other alignments and multiples of its arguments: these differ from wave to
# wave, and no session should wait the second that it takes.
@triton.jit(do_not_specialize=["table", "lengths", "table_width"])
def _part_kernel(
    q, keys, values, table, lengths, out, part, part_m, part_l,
    table_width, q_stride, scale, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    begin = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    tiles = tl.cdiv(length - begin, TILE)
    share = tl.cdiv(tiles, SPLITS) * TILE
    first = begin + split * share
    end = tl.minimum(first + share, length)
    at_dim = tl.arange(0, DIM_PAD)
    in_dim = at_dim < DIM
    group = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + group
    query = tl.load(
        q + row * q_stride + head[:, None] * DIM + at_dim[None, :],
        mask=(group[:, None] < GROUP) & in_dim[None, :], other=0.0,
    )  # fmt: skip
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP_PAD], tl.float32)
    found = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        is_seen = at < end
        block = tl.load(table + row * table_width + at // BLOCK, mask=is_seen, other=0).to(tl.int64)
        place = ((block * BLOCK + at % BLOCK) * KV_HEADS + kv_head) * DIM
        inside = is_seen[:, None] & in_dim[None, :]
        key = tl.load(keys + place[:, None] + at_dim[None, :], mask=inside, other=0.0)
        value = tl.load(values + place[:, None] + at_dim[None, :], mask=inside, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        score = tl.where(is_seen[None, :], score * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        found = found * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        mass = mass * shrink + tl.sum(weight, 1)
        top = new_top
    is_mine = group < GROUP
    heads = KV_HEADS * GROUP
    if SPLITS == 1:
        target = out + (row * heads + head)[:, None] * DIM + at_dim[None, :]
        result = found / mass[:, None]
        tl.store(target, result.to(out.dtype.element_ty), mask=is_mine[:, None] & in_dim[None, :])
    else:
        slot = (row * heads + head) * SPLITS + split
        tl.store(part_m + slot, top, mask=is_mine)
        tl.store(part_l + slot, mass, mask=is_mine)
        tl.store(part + slot[:, None] * DIM + at_dim[None, :], found, mask=is_mine[:, None] & in_dim[None, :])


@triton.jit
def _join_kernel(
    part, part_m, part_l, out, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0).to(tl.int64)
    at_dim = tl.arange(0, DIM_PAD)
    in_dim = at_dim < DIM
    split = row_head * SPLITS + tl.arange(0, SPLITS)
    tops = tl.load(part_m + split)
    weight = tl.exp2(tops - tl.max(tops, 0))
    mass = tl.sum(tl.load(part_l + split) * weight, 0)
    found = tl.load(part + split[:, None] * DIM + at_dim[None, :], mask=in_dim[None, :], other=0.0)
    result = tl.sum(found * weight[:, None], 0) / mass
    tl.store(out + row_head * DIM + at_dim, result.to(out.dtype.element_ty), mask=in_dim)


class PagedAttention:
    """Attention of up to `rows` single tokens, with its scratch memory at a fixed address.

    Args:
        rows: sessions of a step.
        heads: query heads.
        kv_heads: key-value heads.
        head_dim: elements of a head.
        window: positions a token sees, itself included; 0: all.
        device: CUDA device.
    """

    def __init__(
        self, rows: int, heads: int, kv_heads: int, head_dim: int, window: int, device: torch.device
    ) -> None:
        self._shape = (heads, kv_heads, head_dim)
        self._window = window
        processors = _PROCESSORS_ELSEWHERE
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        wanted = processors * _PROGRAMS_A_PROCESSOR // (rows * kv_heads)
        self._splits = 1 << max(0, min(_MOST_SPLITS, wanted).bit_length() - 1)
        parts = rows * heads * self._splits if self._splits > 1 else 0
        self._part = torch.empty(parts, head_dim, device=device)
        self._tops = torch.empty(parts, device=device)
        self._masses = torch.empty(parts, device=device)

    def __call__(
        self,
        qkv: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        table: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """Attends.

        Args:
            qkv: [rows, heads + 2 * kv_heads, head_dim], contiguous, queries rotated.
            kv: keys and values [pool rows, kv_heads, head_dim], the present token's included.
            table: int32 [rows, blocks]: blocks of each session, in order.
            lengths: int32 [rows]: positions held, at least 1.

        Returns:
            [rows, heads * head_dim] in the type of `qkv`.
        """
        heads, kv_heads, dim = self._shape
        rows, group, splits = qkv.shape[0], heads // kv_heads, self._splits
        out = qkv.new_empty(rows, heads * dim)
        padded = max(_LEAST_SIDE, triton.next_power_of_2(dim))
        _part_kernel[(rows, kv_heads, splits)](
            qkv, kv[0], kv[1], table, lengths, out, self._part, self._tops, self._masses,
            table.stride(0), qkv.stride(0), dim**-0.5 * _LOG2_E, self._window,
            KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(_LEAST_SIDE, triton.next_power_of_2(group)),
            DIM=dim, DIM_PAD=padded, SPLITS=splits, BLOCK=BLOCK_TOKENS, TILE=_TILE, STAGES=_STAGES,
            num_warps=_WARPS,
        )  # fmt: skip
        if splits > 1:
            _join_kernel[(rows * heads,)](
                self._part,
                self._tops,
                self._masses,
                out,
                DIM=dim,
                DIM_PAD=padded,
                SPLITS=splits,
                num_warps=_WARPS,
            )
        return out
