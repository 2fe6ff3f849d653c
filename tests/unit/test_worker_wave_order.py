"""Waves whose tensors come from another node keep the order in which they were sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keystage.bundle.api import emulated
from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.worker.executor import EmulatedDevice, EmulatedExecutor
from keystage.worker.looping import LoopingWork
from keystage.worker.settings import EngineSettings, Status


class LateSources:
    """Every tensor is on its way until the test says that it is here."""

    def __init__(self) -> None:
        self.ready: list[Callable[[], None]] = []

    def begin(self, refs: Sequence[api.TensorRef], owners: Sequence[str], ready: Callable[[], None]) -> bool:
        del refs, owners
        self.ready.append(ready)
        return True


def step(path: int, wave: int, nbytes: int) -> api.Step:
    ref = api.TensorRef("uint8", (1, nbytes), 1, 1, 0, nbytes, wave)
    rows = api.StepRows([1], [1], [0], [1], [True], [1], [0.0], [1.0], [0])
    return api.Step(path, wave, 1, "r", ["a", "b"], ["a", "b"], "a", rows, [], ref)


def test_a_small_wave_does_not_overtake_a_large_one_of_its_path() -> None:
    settings = EngineSettings("b", (1,), ("r",), "x", "emulated", 4, 64, 4, 16, 1.0, "n", 1)
    executor = EmulatedExecutor(EmulatedDevice(), 2, 8, 256)
    sources, unused = LateSources(), object()
    late: Any = sources
    outbox: Any = unused
    work = LoopingWork(
        settings, emulated("p", 2, execution="looping"), executor, outbox, late, EventLog(None, "b"), Status()
    )
    work.receive(step(7, 1, 1 << 20), None)
    work.receive(step(7, 2, 8), b"12345678")  # came with its message
    work.receive(step(7, 3, 1 << 20), None)
    work.receive(step(8, 4, 8), b"12345678")
    assert [entry.wave for entry, *_ in work._steps] == [4]
    sources.ready[1]()
    assert [entry.wave for entry, *_ in work._steps] == [4]
    sources.ready[0]()
    assert [entry.wave for entry, *_ in work._steps] == [4, 1, 2, 3]
    work.receive(step(7, 5, 8), b"12345678")
    assert [entry.wave for entry, *_ in work._steps] == [4, 1, 2, 3, 5]
