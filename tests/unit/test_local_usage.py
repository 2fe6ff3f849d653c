"""Measuring what functions use: many questions at once cost one measurement, and hold no thread meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from keystage.local import usage


def test_many_who_ask_share_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[frozenset[int]] = []
    held = threading.Semaphore(1)
    read = usage.read

    def counted(groups: set[int], *, with_memory: bool = True) -> usage.Reading:
        assert held.acquire(blocking=False), "two readings at a time"
        try:
            reads.append(frozenset(groups))
            return read(groups, with_memory=with_memory)
        finally:
            held.release()

    monkeypatch.setattr(usage, "read", counted)
    mine = {os.getpgid(0)}

    async def work() -> None:
        meter = usage.Meter()
        async with asyncio.timeout(30):
            asked = [asyncio.create_task(meter.measure(name, lambda: mine)) for name in "aab" * 50]
            leaver = asyncio.create_task(meter.measure("a", lambda: mine))
            await asyncio.sleep(0)
            leaver.cancel()
            answers = await asyncio.gather(*asked)
        assert reads == [frozenset(mine)] * 4  # two of each function
        assert len({id(answer) for answer in answers}) == 2
        assert all(answer.memory_bytes > 1 << 20 for answer in answers)

    asyncio.run(work())


def test_no_thread_is_held_between_two_readings() -> None:
    async def work() -> None:
        meter = usage.Meter()
        between = asyncio.Event()
        turns = 0

        def groups() -> set[int]:
            nonlocal turns
            turns += 1
            return set()

        async with asyncio.timeout(30):
            asked = [asyncio.create_task(meter.measure(str(i), groups)) for i in range(150)]
            while turns < len(asked):
                await asyncio.sleep(0)
            # All wait for their second reading, or for a turn at their first; a thread is free soon.
            await asyncio.to_thread(between.is_set)
            assert not any(task.done() for task in asked)
            await asyncio.gather(*asked)

    asyncio.run(work())


def test_a_function_that_is_removed_meanwhile_leaves_nothing() -> None:
    async def work() -> None:
        meter = usage.Meter()
        task = asyncio.create_task(meter.measure("f", set))
        await asyncio.sleep(0)
        meter.forget("f")
        assert (await task).memory_bytes == 0
        assert not meter._last
        assert not meter._running

    asyncio.run(work())
