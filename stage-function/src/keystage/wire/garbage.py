"""Collecting the youngest garbage of a server now and then.

Router and gateway look at young objects only after tens of thousands of them (`COLLECT_AFTER` there): under
load that is every second, without it once in hours, in which what each connection leaves behind adds up to
megabytes. Beside their servers, as a task, which also does the `Upkeep` of every lasting process.
"""

from __future__ import annotations

import asyncio
import gc

from keystage.wire.upkeep import Upkeep

EVERY_S = 10.0


async def collect_young(every_s: float = EVERY_S) -> None:
    """Looks at the youngest objects, a millisecond or two, until it is cancelled.

    Args:
        every_s: seconds between two looks.
    """
    upkeep = Upkeep()
    while True:
        await asyncio.sleep(every_s)
        gc.collect(0)
        upkeep.now_and_then()
