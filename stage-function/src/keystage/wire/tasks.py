"""Ends tasks for certain where a part stops: they may wait in a library that loses a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.2


async def end(tasks: Iterable[asyncio.Task[Any]], again_s: float = AGAIN_S) -> None:
    """Cancels tasks until all have ended. The client of Redis may lose one cancellation while it connects.

    Args:
        tasks: which.
        again_s: before those that have not ended are cancelled again; longer where they may have a last word.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again_s)
