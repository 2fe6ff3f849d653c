"""Parts of a wave: some of its rows, their share of its tokens or of its activation. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from keystage.wire.api import StepRows
from keystage.worker.executor import Activation


def select_rows(rows: StepRows, keep: Sequence[int]) -> StepRows:
    """The rows at the given indices."""
    return StepRows(
        [rows.sessions[i] for i in keep],
        [rows.epochs[i] for i in keep],
        [rows.positions[i] for i in keep],
        [rows.counts[i] for i in keep],
        [rows.sample[i] for i in keep],
        [rows.opens[i] for i in keep],
        [rows.temperatures[i] for i in keep],
        [rows.top_ps[i] for i in keep],
        [rows.seeds[i] for i in keep],
        [rows.holds[i] for i in keep] if rows.holds else [],
    )


def select_tokens(activation: Activation, counts: Sequence[int], keep: Sequence[int]) -> Activation:
    """The rows' share of a [tokens, ...] block; axis 0 is the token axis."""
    total = activation.shape[0]
    width = activation.data.nbytes // total if total else 0
    offsets = _offsets(counts)
    parts = [bytes(activation.data[offsets[i] * width : offsets[i + 1] * width]) for i in keep]
    shape = (sum(counts[i] for i in keep), *activation.shape[1:])
    return Activation(activation.dtype, shape, memoryview(bytearray(b"".join(parts))))


def select_ids(ids: Sequence[int], counts: Sequence[int], keep: Sequence[int]) -> list[int]:
    """The rows' share of the token ids."""
    offsets = _offsets(counts)
    return [token for i in keep for token in ids[offsets[i] : offsets[i + 1]]]


def _offsets(counts: Sequence[int]) -> list[int]:
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets
