"""Background loops that outlive what nobody foresaw.

Used by the gateway's own tasks (`load`, `queue_runner`, `queue_redis`, `upstream`): were one to end by an
exception, what it does would be left undone for as long as the gateway runs. What a loop foresees it handles
itself; this module must not know what that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable

TELL_S = 60.0
"""Between two tracebacks of one loop."""
_log = logging.getLogger(__name__)


async def forever(
    step: Callable[[], Awaitable[None]], pause_s: float, what: str, stopping: asyncio.Event | None = None
) -> None:
    """Repeats a step until it is cancelled, whatever it raises.

    Args:
        step: one round; waits by itself while there is nothing to do.
        pause_s: seconds after a round that raised.
        what: what the step does, for the log: the traceback of a failure, and when it goes on again.
        stopping: no round begins, and no pause goes on, once it is set; None for cancellation alone.
    """
    stopping = stopping or asyncio.Event()
    failures = 0
    tells_from_s = -math.inf
    is_told = False
    while not stopping.is_set():
        try:
            await step()
        except Exception:  # noqa: BLE001
            # Whatever it is: were this loop to end, its work would be left undone for good and nobody told.
            failures += 1
            if time.monotonic() >= tells_from_s:
                _log.exception("%s failed (%d in a row), and is tried again", what, failures)
                tells_from_s = time.monotonic() + TELL_S
                is_told = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), pause_s)
        else:
            if is_told:
                _log.info("%s goes on, after %d failures", what, failures)
            failures = 0
            is_told = False
