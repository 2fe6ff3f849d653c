"""Batches of items of different length, one after another in one tensor: order, slices, attention.

Matrix multiplications do not care where one item ends, so they run once over all tokens and nothing
is padded. Attention does: items are put in order of their length, those of equal length attend
together as one dense batch, and where a device would be kept waiting by many small launches all items
attend in one padded batch under a mask. What an item gets does not depend on the others either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.nn import functional

MOST_LAUNCHES = 4
"""On a device more groups than this attend in one padded batch: a launch costs what thousands of padded
tokens do. A CPU computes every group on its own, whatever their number."""

T = TypeVar("T")


class RaggedBatch:
    """How the items of a batch lie in one tensor, shortest first.

    Args:
        counts: tokens of each item, at least 1.
        device: where it is computed.
        launches: attention runs at most; None: as many as there are lengths on a CPU, else
            `MOST_LAUNCHES`.

    Attributes:
        counts: tokens of each item as they lie.
        tokens: in all.
    """

    def __init__(self, counts: Sequence[int], device: torch.device, launches: int | None = None) -> None:
        self._order = sorted(range(len(counts)), key=counts.__getitem__)
        self.counts = [counts[item] for item in self._order]
        self.tokens = sum(counts)
        self._device = device
        self._groups = _groups(self.counts)
        if launches is None:
            launches = len(self._groups) if device.type == "cpu" else MOST_LAUNCHES
        self._places: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        if len(self._groups) > launches:
            self._pad()

    def ordered(self, items: Sequence[T]) -> list[T]:
        """Items as they lie."""
        return [items[item] for item in self._order]

    def restored(self, items: Sequence[T]) -> list[T]:
        """What `ordered` was given, or what was made of it, in the caller's order."""
        placed = sorted(zip(self._order, items, strict=True), key=lambda pair: pair[0])
        return [item for _, item in placed]

    def positions(self) -> torch.Tensor:
        """Position of every token within its item, int64 [tokens], on the device."""
        return torch.cat([torch.arange(count) for count in self.counts]).to(self._device)

    def lengths(self) -> torch.Tensor:
        """`counts` on the device, int64 [items]."""
        return torch.tensor(self.counts, device=self._device)

    def starts(self) -> torch.Tensor:
        """Where every item begins, int64 [items], on the device."""
        lengths = torch.tensor(self.counts)
        return (lengths.cumsum(0) - lengths).to(self._device)

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """Attention of every token to all tokens of its item.

        Args:
            qkv: [tokens, 3, heads, head_dim].

        Returns:
            [tokens, heads * head_dim].
        """
        if self._places is not None:
            return self._attend_padded(qkv)
        attended = [
            _attend_dense(qkv[start : start + items * count].view(items, count, *qkv.shape[1:]))
            for start, items, count in self._groups
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _pad(self) -> None:
        longest = self.counts[-1]
        places = [torch.arange(count) + row * longest for row, count in enumerate(self.counts)]
        self._places = torch.cat(places).to(self._device)
        taken = torch.arange(longest) < torch.tensor(self.counts)[:, None]
        self._mask = taken[:, None, None].to(self._device)

    def _attend_padded(self, qkv: torch.Tensor) -> torch.Tensor:
        assert self._places is not None
        items, longest = len(self.counts), self.counts[-1]
        padded = qkv.new_zeros(items * longest, *qkv.shape[1:])
        padded[self._places] = qkv
        attended = _attend_dense(padded.view(items, longest, *qkv.shape[1:]), self._mask)
        return attended[self._places]


def _attend_dense(qkv: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attention within items of one length: [items, count, 3, heads, dim] to [items * count, heads * dim]."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return attended.transpose(1, 2).flatten(2).flatten(0, 1)


def _groups(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of equal counts in ascending counts: (first token, items, tokens of each)."""
    groups: list[tuple[int, int, int]] = []
    start = 0
    for count in sorted(set(counts)):
        items = sum(1 for other in counts if other == count)
        groups.append((start, items, count))
        start += items * count
    return groups
