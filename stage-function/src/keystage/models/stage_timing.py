"""Times single steps of a loaded stage, for `models.profile`: decode, prefill, a single-pass batch.

Between `models.loading` and the fits of `models.service_time`. A looping stage gets sessions of its own
with slots below zero, so the sessions a worker holds are not touched. Every time includes the wait for
the device. It chooses no sizes and fits nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

import torch

from keystage.models.base import LoadedStage, Row
from keystage.models.loading import sample_input
from keystage.models.single_pass import SinglePassStage

STEPS = 16
"""Decode steps of a session before it is begun anew: its KV state is to stay about as long as asked for."""


class BatchClock(Protocol):
    """What can be timed by number of rows."""

    def batch_s(self, rows: int) -> float:
        """Seconds of one batch of so many rows."""


class LoopingClock:
    """Decode steps of sessions that hold `held` tokens each, and prefill chunks beside them.

    Args:
        model: a loaded stage.
        rows: sessions, the largest batch.
        held: tokens of KV state a decode step attends to at first, beside the positions of a prefix;
            cut to what the context allows.

    Attributes:
        held: tokens a session holds when it begins; it is begun anew after a few steps.
    """

    def __init__(self, model: LoadedStage, rows: int, held: int) -> None:
        self._model = model
        prefix, context = model.shape.prefix, model.shape.context_length
        self.held = max(1, min(held, context - prefix - STEPS))
        self._opening = prefix + self.held
        self._capacity = min(self._opening + STEPS, context)
        self._lengths = dict.fromkeys((-1 - row for row in range(rows)), 0)

    def __enter__(self) -> Self:
        """Opens the sessions and fills their KV state."""
        for slot in self._lengths:
            self._model.open(slot, self._capacity)
            self._refill(slot)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes them."""
        for slot in self._lengths:
            self._model.close(slot)

    def batch_s(self, rows: int) -> float:
        """Seconds of one decode step of the first `rows` sessions; each holds a token more afterwards."""
        slots = list(self._lengths)[:rows]
        for slot in slots:
            if self._lengths[slot] >= self._capacity:
                self._refill(slot)
        steps = [Row(slot, self._lengths[slot], 1) for slot in slots]
        x = sample_input(self._model, rows)
        seconds = _timed(lambda: self._model.forward(x, steps, range(rows)), self._model.device)
        for slot in slots:
            self._lengths[slot] += 1
        return seconds

    def _refill(self, slot: int) -> None:
        self._model.forward(sample_input(self._model, self._opening), [Row(slot, 0, self._opening)], [0])
        self._lengths[slot] = self._opening


def prefill_s(model: LoadedStage, tokens: int) -> float:
    """Seconds of a prompt of so many tokens in one chunk, with the prefix where there is one."""
    slot, opening = -1, model.shape.prefix + tokens
    model.open(slot, opening)
    try:
        x = sample_input(model, opening)
        return _timed(lambda: model.forward(x, [Row(slot, 0, opening)], [0]), model.device)
    finally:
        model.close(slot)


class SinglePassClock:
    """Batches of a stage's own sample items.

    Args:
        stage: a loaded stage.
        rows: items of the largest batch.
        tokens: of an item, see `SinglePassStage.samples`.
    """

    def __init__(self, stage: SinglePassStage, rows: int, tokens: int) -> None:
        self._stage = stage
        self._items = stage.samples(rows, tokens)

    def batch_s(self, rows: int) -> float:
        """Seconds of one batch of the first `rows` items."""
        items = self._items[:rows]
        return _timed(lambda: self._stage.forward(items), self._stage.device)


def rounds(
    clock: BatchClock, batches: Sequence[int], cores: Sequence[int], repeats: int
) -> dict[tuple[int, int], list[float]]:
    """Times every batch size at every number of cores, in rounds, so that a drift meets all alike.

    Args:
        clock: what is timed.
        batches: rows of a batch, ascending.
        cores: CPU threads; a 0 leaves the present number.
        repeats: rounds. In each, the largest batch runs once uncounted after a change of threads.

    Returns:
        Seconds by (cores, batch), `repeats` each, in order.
    """
    times: dict[tuple[int, int], list[float]] = {(count, batch): [] for count in cores for batch in batches}
    before = torch.get_num_threads()
    try:
        for _ in range(repeats):
            for count in cores:
                if count:
                    torch.set_num_threads(count)
                clock.batch_s(batches[-1])
                for batch in batches:
                    times[count, batch].append(clock.batch_s(batch))
    finally:
        torch.set_num_threads(before)
    return times


def _timed(run: Callable[[], object], device: torch.device) -> float:
    _finish(device)
    begin_s = time.perf_counter()
    run()
    _finish(device)
    return time.perf_counter() - begin_s


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
