"""Which replica a request gets after one has broken a connection; a wake that fails is repeated."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import cast

import pytest

from keystage.gateway.backend import Backend, BackendUnavailable, Endpoint, FunctionState
from keystage.gateway.replicas import NoReplica, Replicas, TooManyWaiting
from keystage.local.api import Deployment

A, B = Endpoint("f-0", "h:1"), Endpoint("f-1", "h:2")


class View:
    """The part of a backend that replicas are found by; `failing` wakes fail before one succeeds."""

    def __init__(self, *ready: Endpoint, failing: int = 0) -> None:
        self.state = FunctionState(
            deployment=Deployment(service="f"),
            created_at_s=0.0,
            replicas=len(ready),
            ready=ready,
            waking=False,
            trouble=(),
        )
        self.wakes = 0
        self._failing = failing
        self._changed = asyncio.Event()

    def get(self, name: str) -> FunctionState:
        assert name == "f"
        return self.state

    async def changed(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def wake(self, name: str) -> None:
        self.wakes += 1
        await asyncio.sleep(0.01)
        if self.wakes <= self._failing:
            raise BackendUnavailable("away")
        self.state = dataclasses.replace(self.state, waking=True)

    def serve(self, *ready: Endpoint) -> None:
        self.state = dataclasses.replace(self.state, ready=ready, replicas=len(ready))
        self._changed.set()
        self._changed = asyncio.Event()


def replicas(view: View, wake_s: float = 10.0, **options: int) -> Replicas:
    return Replicas(cast("Backend", view), wake_s, **options)


async def acquire(found: Replicas) -> Endpoint:
    return await found.acquire("f", time.monotonic(), frozenset())


def test_replica_that_broke_a_connection_is_passed_over_for_a_moment_and_never_for_good() -> None:
    async def inside() -> None:
        found = replicas(View(A, B))
        assert await acquire(found) == A
        found.suspect(B)
        assert await acquire(found) == A, "though B has less in flight"
        only = replicas(View(A))
        only.suspect(A)
        assert await acquire(only) == A
        at_once = replicas(View(A), wake_s=0.0)
        at_once.suspect(A)
        assert await acquire(at_once) == A
        view = View(A)
        dying = replicas(view)
        dying.suspect(A)
        asking = asyncio.create_task(acquire(dying))
        await asyncio.sleep(0)
        view.serve(B)
        assert await asking == B

    asyncio.run(inside())


def test_two_hundred_ask_for_one_wake_and_a_failed_one_is_repeated() -> None:
    async def inside() -> None:
        for failing in (0, 2):
            view = View(failing=failing)
            found = replicas(view)
            asking = [asyncio.create_task(acquire(found)) for _ in range(200)]
            while not view.state.waking:
                await asyncio.sleep(0.01)
            assert found.waiting("f") == 200
            asking[0].cancel()
            await asyncio.wait(asking[:1])
            assert found.waiting("f") == 199
            view.serve(A)
            assert await asyncio.gather(*asking[1:]) == [A] * 199
            assert (found.waiting("f"), view.wakes) == (0, failing + 1)

    asyncio.run(inside())


def test_wake_outlives_the_request_that_asked_for_it() -> None:
    async def inside() -> None:
        view = View()
        found = replicas(view)
        first, second = (asyncio.create_task(acquire(found)) for _ in range(2))
        while not view.wakes:
            await asyncio.sleep(0)
        first.cancel()
        while not view.state.waking:
            await asyncio.sleep(0.001)
        view.serve(A)
        assert (await second, view.wakes) == (A, 1)

    asyncio.run(inside())


def test_waits_are_bounded_in_time_and_number() -> None:
    async def inside() -> None:
        found = replicas(View(), wake_s=0.5, max_waiting=1)
        asking = asyncio.create_task(acquire(found))
        await asyncio.sleep(0)
        with pytest.raises(TooManyWaiting, match="1 requests wait for one, at most 1 may"):
            await acquire(found)
        with pytest.raises(NoReplica, match=r"function f has no ready replica after 0.5 s, 0 wanted"):
            await asking
        assert found.waiting("f") == 0

    asyncio.run(inside())
