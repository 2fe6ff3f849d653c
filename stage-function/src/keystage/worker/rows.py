"""Parts of a wave: some of its rows, their share of its tokens or of its activation; its next message."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import structs

from keystage.wire.api import Step, StepRows, TensorRef
from keystage.worker.executor import Activation
from keystage.worker.step_times import ended


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


def next_step(
    step: Step,
    stage: int,
    rows: StepRows,
    sender: str,
    ref: TensorRef | None,
    tokens: list[int] | None = None,
) -> Step:
    """The message by which a wave goes on.

    Args:
        step: the message by which it came.
        stage: the next one, 0: the wave goes back to its owner.
        rows: those that go on.
        sender: who has run it.
        ref: its activation, None: there is none.
        tokens: sampled ones, for the owner.
    """
    times = step.times if stage else None
    if times is not None:
        # A tensor on a device is placed when what was queued there is done: compute ends only now.
        ended(times, time.perf_counter(), stage - step.stage)
    return structs.replace(
        step, stage=stage, rows=rows, sender=sender, ref=ref, tokens=tokens or [], times=times
    )
