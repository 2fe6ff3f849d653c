"""KV state of the sessions a stage holds: one contiguous buffer per session.

`models.decoder` writes each layer's keys and values here and attends over them. Buffers are
[layers, 2 * kv_heads, capacity, head_dim] (keys first), allocated when a session opens and freed
when it closes. No attention arithmetic beyond one row lives here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from keystage.models.base import Row, StageError


@dataclass(slots=True)
class _Session:
    buffers: list[torch.Tensor]
    capacity: int
    length: int


@dataclass(frozen=True, slots=True)
class Span:
    """One row of a forward pass, resolved.

    Attributes:
        buffers: KV buffer per layer, [2 * kv_heads, capacity, head_dim].
        first: index of its first token among the flattened ones.
        start: position of that token.
        count: tokens.
        seen: first position that any of its tokens sees: above 0 only with a sliding window.
        mask: additive mask [group * count, start + count - seen], None where causality needs none.
    """

    buffers: list[torch.Tensor]
    first: int
    start: int
    count: int
    seen: int
    mask: torch.Tensor | None


class KvSlots:
    """The sessions' buffers, by slot.

    Args:
        layers: layers of the stage.
        kv_heads: key-value heads.
        group: query heads per key-value head.
        head_dim: elements of a head.
        device: where the buffers lie.
        dtype: their type.
        window: a token sees this many newest tokens, itself included; 0: all.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        window: int = 0,
    ) -> None:
        self._layers = layers
        self._kv_heads = kv_heads
        self._group = group
        self._head_dim = head_dim
        self._device = device
        self._dtype = dtype
        self._window = window
        self._sessions: dict[int, _Session] = {}

    def open(self, slot: int, capacity: int, buffers: list[torch.Tensor] | None = None) -> None:
        """Takes a session's buffers, or allocates them; replaces what the slot held.

        Args:
            slot: the session's.
            capacity: its tokens.
            buffers: per layer [2 * kv_heads, at least capacity, head_dim], None: they are allocated.
        """
        self._sessions.pop(slot, None)
        if buffers is not None:
            self._sessions[slot] = _Session(buffers, capacity, 0)
            return
        shape = (self._layers, 2 * self._kv_heads, capacity, self._head_dim)
        buffer = torch.empty(shape, device=self._device, dtype=self._dtype)
        self._sessions[slot] = _Session(list(buffer), capacity, 0)

    def close(self, slot: int) -> None:
        """Frees a session's buffers."""
        self._sessions.pop(slot, None)

    def read(self, slot: int) -> torch.Tensor | None:
        """A copy of what a slot holds, [layers, 2 * kv_heads, tokens, head_dim]; None for an unknown slot."""
        session = self._sessions.get(slot)
        if session is None:
            return None
        return torch.stack([buffer[:, : session.length] for buffer in session.buffers])

    def write(self, slot: int, state: torch.Tensor) -> bool:
        """Puts what `read` gave elsewhere into an open slot; False when it does not fit."""
        session = self._sessions.get(slot)
        shape = (self._layers, 2 * self._kv_heads, state.shape[2] if state.ndim == 4 else 0, self._head_dim)
        if session is None or tuple(state.shape) != shape or shape[2] > session.capacity:
            return False
        for buffer, layer in zip(session.buffers, state.to(self._device, self._dtype), strict=True):
            buffer[:, : shape[2]].copy_(layer)
        session.length = shape[2]
        return True

    def rewind(self, slot: int, tokens: int) -> bool:
        """Forgets what a slot holds from position `tokens` on; False for an unknown slot."""
        session = self._sessions.get(slot)
        if session is None:
            return False
        session.length = min(session.length, tokens)
        return True

    def spans(self, rows: Sequence[Row]) -> list[Span]:
        """Checks the rows of a forward pass and resolves them.

        Raises:
            StageError: unknown or repeated slot, wrong start, full slot, empty row.
        """
        if len({row.slot for row in rows}) != len(rows):
            raise StageError(f"a slot appears twice among rows {[row.slot for row in rows]}")
        spans: list[Span] = []
        first = 0
        for row in rows:
            session = self._checked(row)
            seen = max(0, row.start - self._window + 1) if self._window else 0
            is_windowed = 0 < self._window < row.start + row.count
            mask = self._mask(row, seen) if row.count > 1 and (row.start > 0 or is_windowed) else None
            spans.append(Span(session.buffers, first, row.start, row.count, seen, mask))
            first += row.count
        return spans

    def _checked(self, row: Row) -> _Session:
        session = self._sessions.get(row.slot)
        if session is None:
            raise StageError(f"slot {row.slot} is not open")
        if row.count < 1:
            raise StageError(f"slot {row.slot}: a row needs at least 1 token, got {row.count}")
        if row.start not in (0, session.length):
            raise StageError(
                f"slot {row.slot}: row starts at position {row.start}, the slot holds {session.length} tokens"
            )
        if row.start + row.count > session.capacity:
            raise StageError(
                f"slot {row.slot}: {row.start + row.count} tokens do not fit a capacity of {session.capacity}"
            )
        return session

    def commit(self, rows: Sequence[Row]) -> None:
        """Records the rows' tokens as held, after a forward pass has succeeded."""
        for row in rows:
            self._sessions[row.slot].length = row.start + row.count

    def _mask(self, row: Row, seen: int) -> torch.Tensor:
        ones = torch.ones(row.count, row.start + row.count - seen, dtype=torch.bool, device=self._device)
        visible = ones.tril(row.start - seen)
        if self._window:
            visible &= ones.triu(row.start - seen - self._window + 1)
        hidden = ~visible
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf")).repeat(self._group, 1)

    def attend(self, layer: int, span: Span, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Stores a row's keys and values and attends over all it has so far.

        The heads that share a key-value head are laid behind one another as queries, so that one
        call serves decode and prefill alike, without repeating keys.

        Args:
            layer: index within the stage.
            span: the row.
            qkv: [T, heads + 2 * kv_heads, head_dim], rotated.
            out: [T, heads, head_dim], written at the row's tokens.
        """
        kv_heads, group, head_dim = self._kv_heads, self._group, self._head_dim
        end = span.start + span.count
        mine = qkv[span.first : span.first + span.count]
        buffer = span.buffers[layer]
        buffer[:, span.start : end].copy_(mine[:, kv_heads * group :].transpose(0, 1))
        keys = buffer[None, :kv_heads, span.seen : end]
        values = buffer[None, kv_heads:, span.seen : end]
        query = mine[:, : kv_heads * group]
        place = out[span.first : span.first + span.count]
        if span.count == 1:
            query = query.reshape(1, kv_heads, group, head_dim)
            found = functional.scaled_dot_product_attention(query, keys, values)
            place.copy_(found.reshape(1, kv_heads * group, head_dim))
        elif span.mask is None:
            query = query.transpose(0, 1).unsqueeze(0)
            found = functional.scaled_dot_product_attention(
                query, keys, values, is_causal=True, enable_gqa=group > 1
            )
            place.copy_(found[0].transpose(0, 1))
        else:
            query = query.transpose(0, 1).reshape(1, kv_heads, group * span.count, head_dim)
            found = functional.scaled_dot_product_attention(query, keys, values, attn_mask=span.mask)
            place.copy_(found.reshape(kv_heads * group, span.count, head_dim).transpose(0, 1))
