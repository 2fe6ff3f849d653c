"""Collecting the youngest garbage of a server now and then, and trimming its heap.

Router and gateway look at young objects only after tens of thousands of them (`COLLECT_AFTER` there): under
load that is every second, without it once in hours, in which what each connection leaves behind adds up to
megabytes. Beside their servers, as a task. It must not look at older objects, which takes long.
"""

from __future__ import annotations

import asyncio
import gc

from keystage.wire.heap import HeapTrim

EVERY_S = 10.0


async def collect_young(every_s: float = EVERY_S) -> None:
    """Looks at the youngest objects, a millisecond or two, and trims the heap, until it is cancelled.

    Args:
        every_s: seconds between two looks.
    """
    heap = HeapTrim()
    while True:
        await asyncio.sleep(every_s)
        gc.collect(0)
        heap.now_and_then()
