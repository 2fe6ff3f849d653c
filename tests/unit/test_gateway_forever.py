"""The gateway's background loops go on after an exception that nobody foresaw, and stop as they should."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import cast

import pytest

from keystage.gateway import queue_runner
from keystage.gateway.forever import forever
from keystage.gateway.queue import Bounds, Call, Depth, Lease
from keystage.gateway.queue_attempt import Attempts, Outcome
from keystage.gateway.queue_backoff import Backoff
from keystage.gateway.queue_callback import Callbacks
from keystage.gateway.queue_memory import MemoryQueue
from keystage.gateway.queue_runner import RetryRules, Runner
from keystage.gateway.queue_slots import Slots

WAIT_S = 20.0


def call(name: str) -> Call:
    return Call(key=name, id=name, function="f", path="/", headers=[], body=b"")


class Faulty(MemoryQueue):
    """A queue of which steps raise what nobody foresaw, as often as told."""

    def __init__(self) -> None:
        super().__init__(Bounds(10, 1 << 20))
        self.faults: dict[str, int] = {}
        self.is_stopped = False

    def _fail(self, step: str) -> None:
        if self.faults.get(step, 0):
            self.faults[step] -= 1
            raise KeyError(step)

    async def take(self, room: Mapping[str, int]) -> list[Lease]:
        self._fail("take")
        return await super().take(room)

    async def depth(self) -> Mapping[str, Depth]:
        self._fail("depth")
        return await super().depth()

    async def again(self, lease: Lease, call: Call, delay_s: float) -> None:
        self._fail("again")
        await super().again(lease, call, delay_s)

    async def stop(self) -> None:
        self.is_stopped = True
        await super().stop()


class Function:
    """Takes every call; answers once it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.ran: list[str] = []
        self.has_run = asyncio.Event()
        self.is_open = False

    async def start(self) -> None:
        self.is_open = True

    async def stop(self) -> None:
        self.is_open = False

    async def run(self, call: Call) -> Outcome:
        self.ran.append(call.id)
        self.has_run.set()
        await self.may_answer.wait()
        return Outcome(200, "", b"", is_answer=True)


def runner_of(queue: Faulty, function: Function) -> Runner:
    rules = RetryRules(Backoff(3, 0.01, 0.01), frozenset())
    part = cast("Attempts", function)
    return Runner(queue, part, cast("Callbacks", Function()), Slots(4, 4), rules, drain_s=0.01)


def test_a_runner_goes_on_after_a_fault_of_its_queue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queue_runner, "RETRY_S", 0.01)
    caplog.set_level(logging.INFO)

    async def work() -> None:
        queue, function = Faulty(), Function()
        function.may_answer.set()
        queue.faults = {"take": 2, "depth": 1}
        runner = runner_of(queue, function)
        await runner.start()
        async with asyncio.timeout(WAIT_S):
            await queue.put(call("c1"))
            await function.has_run.wait()
        await runner.stop()
        assert function.ran == ["c1"]
        assert queue.faults == {"take": 0, "depth": 0}
        assert (queue.is_stopped, function.is_open) == (True, False)

    asyncio.run(work())
    told = [
        record for record in caplog.records if record.getMessage().startswith("taking asynchronous calls")
    ]
    assert [record.levelname for record in told] == ["ERROR", "INFO"]
    assert told[0].exc_info is not None
    assert told[1].getMessage() == "taking asynchronous calls goes on, after 2 failures"


def test_a_runner_stops_and_closes_though_what_runs_cannot_be_put_back() -> None:
    async def work() -> None:
        queue, function = Faulty(), Function()
        runner = runner_of(queue, function)
        await runner.start()
        async with asyncio.timeout(WAIT_S):
            await queue.put(call("c1"))
            await function.has_run.wait()
            queue.faults = {"again": 1, "take": 1_000_000}
            await runner.stop()
        assert queue.faults["again"] == 0
        assert (queue.is_stopped, function.is_open) == (True, False)

    asyncio.run(work())


def test_a_loop_tells_its_failures_once_and_ends_by_cancellation_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def work() -> int:
        rounds = 0
        is_steady = asyncio.Event()

        async def step() -> None:
            nonlocal rounds
            rounds += 1
            if rounds <= 3:
                raise ValueError(rounds)
            if rounds == 5:
                is_steady.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(forever(step, 0.0, "the work"))
        async with asyncio.timeout(WAIT_S):
            await is_steady.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return rounds

    assert asyncio.run(work()) == 5
    assert caplog.messages == [
        "the work failed (1 in a row), and is tried again",
        "the work goes on, after 3 failures",
    ]


def test_a_loop_that_is_told_to_stop_does_not_wait_for_its_pause() -> None:
    async def work() -> None:
        stopping = asyncio.Event()
        is_failing = asyncio.Event()

        async def step() -> None:
            is_failing.set()
            raise ValueError

        task = asyncio.create_task(forever(step, 3600.0, "the work", stopping))
        async with asyncio.timeout(WAIT_S):
            await is_failing.wait()
            stopping.set()
            await task

    asyncio.run(work())
