"""Garbage in cycles is collected by time, however rarely Python itself looks."""

from __future__ import annotations

import asyncio
import gc
import weakref

from keystage.wire.garbage import collect_young


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_young_cycles_are_collected_although_the_threshold_is_far() -> None:
    async def run() -> None:
        tidying = asyncio.create_task(collect_young(0.01))
        seen = weakref.ref(Node())
        assert seen() is not None
        async with asyncio.timeout(20):
            while seen() is not None:
                await asyncio.sleep(0.01)
        tidying.cancel()

    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 20, 20)
    try:
        asyncio.run(run())
    finally:
        gc.set_threshold(*before)
