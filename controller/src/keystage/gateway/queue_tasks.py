"""Ends tasks for certain. Used by the asynchronous queue's parts when the gateway stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.2


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks until all have ended: a client library may lose one cancellation while it connects."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
