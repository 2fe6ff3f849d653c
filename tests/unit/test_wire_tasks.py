"""Tasks that are to end do, also behind a library that loses a cancellation."""

from __future__ import annotations

import asyncio
import contextlib

from keystage.wire.tasks import end


async def _forever(lost: int, seen: list[int]) -> None:
    """Loses the first cancellations, as a client does that takes one for its own time-out."""
    for _ in range(lost):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        seen.append(1)
    await asyncio.Event().wait()


def test_a_cancellation_that_is_lost_is_said_again() -> None:
    async def work() -> None:
        seen: list[int] = []
        tasks = [asyncio.create_task(_forever(lost, seen)) for lost in (0, 1, 2)]
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await end(tasks, 0.01)
        assert len(seen) == 3
        assert all(task.cancelled() for task in tasks)

    asyncio.run(work())


def test_a_task_that_has_a_last_word_is_not_cut_short() -> None:
    async def work() -> None:
        said = asyncio.Event()
        words: list[str] = []

        async def leave() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await said.wait()
                words.append("told")

        task = asyncio.create_task(leave())
        await asyncio.sleep(0)
        ending = asyncio.create_task(end([task], 30.0))
        await asyncio.sleep(0.05)
        said.set()
        await ending
        assert words == ["told"]

    asyncio.run(work())


def test_nothing_to_end_is_no_wait() -> None:
    async def work() -> None:
        done = asyncio.create_task(asyncio.sleep(0))
        await done
        await end([])
        await end([done])

    asyncio.run(work())
