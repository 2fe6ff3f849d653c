"""When a gateway tells its load: at once, then with pauses, not at all when idle, again while it lasts.

And at once when a replica leaves the routing, and when such a one has no request any longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, cast

from keystage.gateway.backend import (
    Backend,
    BackendUnavailable,
    Endpoint,
    FunctionState,
    UnknownFunction,
)
from keystage.gateway.load import LoadReporter
from keystage.gateway.metrics import Metrics
from keystage.gateway.replicas import Replicas
from keystage.local.api import Deployment, Load


class Recorder:
    """Takes reports, as a backend does."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, str, int, int]] = []
        self.fault: Exception | None = None
        self.failed = 0
        self.unfollowed: Exception | None = None
        self.hands: list[dict[str, int]] = []
        self.ready: dict[str, tuple[Endpoint, ...]] = {"f": (), "g": ()}
        self._changed = asyncio.Event()

    def get(self, name: str) -> FunctionState:
        if name not in self.ready:
            raise UnknownFunction(name)
        return FunctionState(Deployment(service=name), 0.0, 1, self.ready[name], waking=False, trouble=())

    async def changed(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await self._changed.wait()
        if (fault := self.unfollowed) is not None:
            self.unfollowed = None
            raise fault

    def serve(self, **ready: tuple[Endpoint, ...]) -> None:
        self.ready = ready
        self._changed.set()
        self._changed = asyncio.Event()

    async def tell_load(self, name: str, load: Load) -> None:
        if self.fault is not None:
            self.failed += 1
            raise self.fault
        self.heard.append((time.monotonic(), name, load.in_flight, load.started))
        self.hands.append(load.replicas)

    @property
    def told(self) -> list[tuple[str, int, int]]:
        return [entry[1:] for entry in self.heard]


Work = Callable[[Recorder, Metrics, Replicas], Coroutine[Any, Any, None]]
EVERY_S = 0.7
"""A pause that is far longer than this process may stand still between two reports."""
A, B = Endpoint("f-0", "h:1"), Endpoint("f-1", "h:2")


def run(work: Work, every_s: float, repeat_s: float = 100.0) -> None:
    async def inside() -> None:
        recorder, metrics = Recorder(), Metrics()
        backend = cast("Backend", recorder)
        replicas = Replicas(backend, 1.0)
        reporter = LoadReporter(backend, metrics, replicas, every_s=every_s, repeat_s=repeat_s)
        await reporter.start()
        try:
            async with asyncio.timeout(20):
                await work(recorder, metrics, replicas)
        finally:
            await reporter.stop()

    asyncio.run(inside())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_the_first_request_at_once_the_rest_with_pauses_and_then_nothing() -> None:
    async def work(recorder: Recorder, metrics: Metrics, _: Replicas) -> None:
        metrics.begin("f")
        await until(lambda: recorder.told == [("f", 1, 1)])
        for _ in range(50):
            metrics.begin("f")
            metrics.end("f", 200, 0.0)
        metrics.begin("g")
        await until(lambda: len(recorder.told) == 3)
        assert recorder.told[1:] == [("g", 1, 1), ("f", 1, 51)]  # g at once, f after the pause
        first, second = (at_s for at_s, name, _, _ in recorder.heard if name == "f")
        assert second - first >= EVERY_S
        metrics.end("f", 200, 0.0)
        metrics.end("g", 200, 0.0)
        await until(lambda: len(recorder.told) == 5)
        await asyncio.sleep(2 * EVERY_S)
        assert sorted(recorder.told[3:]) == [("f", 0, 51), ("g", 0, 1)]

    run(work, every_s=EVERY_S)


def test_what_lasts_is_repeated_and_the_last_word_is_nothing() -> None:
    told: list[Recorder] = []

    async def work(recorder: Recorder, metrics: Metrics, _: Replicas) -> None:
        told.append(recorder)
        metrics.begin("f")
        await until(lambda: recorder.told[:4] == [("f", 1, 1)] * 4)

    run(work, every_s=0.01, repeat_s=0.05)
    assert told[0].told[-1] == ("f", 0, 1)


def test_a_backend_that_is_away_is_told_later_and_a_function_that_is_gone_is_not() -> None:
    async def work(recorder: Recorder, metrics: Metrics, _: Replicas) -> None:
        recorder.fault = BackendUnavailable("away")
        metrics.begin("f")
        await asyncio.sleep(0.05)
        recorder.fault = None
        await until(lambda: recorder.told == [("f", 1, 1)])
        recorder.fault = UnknownFunction("gone")
        metrics.end("f", 200, 0.0)
        await until(lambda: not metrics.touched)
        recorder.fault = None
        await asyncio.sleep(0.05)
        assert recorder.told == [("f", 1, 1)]

    run(work, every_s=0.01)


def test_after_an_exception_that_nobody_foresaw_the_same_load_and_the_next_are_told() -> None:
    async def work(recorder: Recorder, metrics: Metrics, _: Replicas) -> None:
        recorder.fault = ValueError("unforeseen")
        metrics.begin("f")
        await until(lambda: recorder.failed == 1)
        recorder.fault = None
        metrics.begin("g")
        await until(lambda: sorted(recorder.told) == [("f", 1, 1), ("g", 1, 1)])
        metrics.end("f", 200, 0.0)
        await until(lambda: recorder.told[-1] == ("f", 0, 1))

    run(work, every_s=0.2)


def test_that_replicas_leave_is_told_also_after_the_view_could_not_be_followed() -> None:
    async def work(recorder: Recorder, metrics: Metrics, replicas: Replicas) -> None:
        recorder.serve(f=(A, B))
        metrics.begin("f")
        await until(lambda: recorder.hands == [{"f-0": 0, "f-1": 0}])
        recorder.unfollowed = ValueError("unforeseen")
        recorder.serve(f=(B,))
        await until(lambda: recorder.unfollowed is None and recorder.hands[1:] == [{"f-1": 0}])
        recorder.serve(f=())
        await until(lambda: recorder.hands[2:] == [{}])

    run(work, every_s=1000.0)


def test_that_a_replica_leaves_and_that_its_last_request_ends_are_told_at_once() -> None:
    async def work(recorder: Recorder, metrics: Metrics, replicas: Replicas) -> None:
        recorder.serve(f=(A, B))
        for _ in range(3):
            metrics.begin("f")
        held = [await replicas.acquire("f", time.monotonic(), frozenset()) for _ in range(3)]
        assert held == [A, B, A]
        await until(lambda: recorder.hands == [{"f-0": 2, "f-1": 1}])
        recorder.serve(f=(B,))
        await until(lambda: recorder.hands[1:] == [{"f-0": 2, "f-1": 1}])
        replicas.release(A)
        recorder.serve()  # removed
        await until(lambda: recorder.hands[2:] == [{"f-0": 1, "f-1": 1}])
        replicas.release(B)
        await until(lambda: recorder.hands[3:] == [{"f-0": 1}])
        replicas.release(A)
        await until(lambda: recorder.hands[4:] == [{}])

    run(work, every_s=1000.0)


def test_a_replica_that_comes_and_one_of_a_function_never_told_are_no_news() -> None:
    async def work(recorder: Recorder, metrics: Metrics, replicas: Replicas) -> None:
        recorder.serve(f=(A,), g=(A, B))
        metrics.begin("f")
        await until(lambda: recorder.hands == [{"f-0": 0}])
        recorder.serve(f=(A, B), g=())
        await asyncio.sleep(0.1)
        assert len(recorder.hands) == 1

    run(work, every_s=1000.0)


def test_every_start_of_a_gateway_has_a_name_of_its_own() -> None:
    backend = cast("Backend", Recorder())
    names = {LoadReporter(backend, Metrics(), Replicas(backend, 1.0)).gateway for _ in range(3)}
    assert len(names) == 3
