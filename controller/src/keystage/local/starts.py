"""How starts went: from "wanted" to the first item of work, per replica, kept when replicas are gone.

Fed by `local.supervisor` (wanted, forked) and by the worker itself (`GET /_/start`, asked until it has
done its first item); read over the control socket (`GET /starts`). Times are kept in Unix seconds; the
worker's are `time.monotonic` of the same machine. It must not judge them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import aiohttp
import msgspec

from keystage.local.api import StartRecord
from keystage.wire.starts import START_PATH, StartReport
from keystage.wire.unreadable import UNREADABLE

KEPT = 1000
ASK_EVERY_S = 0.5
"""Times come from the worker's own clock: a slow reading loses nothing but replicas that end before it."""
ASK_TIMEOUT_S = 2.0


class Starts:
    """Records of the newest starts.

    Args:
        offset_s: Unix seconds minus `time.monotonic`.
    """

    def __init__(self, offset_s: float) -> None:
        self._offset_s = offset_s
        self._records: OrderedDict[str, StartRecord] = OrderedDict()

    def records(self) -> list[StartRecord]:
        """The newest `KEPT`, oldest first."""
        return list(self._records.values())

    def wanted(self, replica: str, function: str, node: str, at_s: float) -> None:
        """A replica is to be started."""
        self._records[replica] = StartRecord(replica=replica, function=function, node=node, wanted_at_s=at_s)
        if len(self._records) > KEPT:
            self._records.popitem(last=False)

    def forked(self, replica: str, at_s: float, *, via: str, source: str = "", note: str = "") -> None:
        """Its process runs."""
        self._change(replica, forked_at_s=at_s, via=via, source=source, note=note)

    def told(self, replica: str, report: StartReport) -> None:
        """It said how far it is; it may have begun before its forker's answer was heard."""
        record = self._records.get(replica)
        if record is None:
            return
        begun_at_s = self._unix_s(report.begun_s)
        self._change(
            replica,
            forked_at_s=min(record.forked_at_s or begun_at_s, begun_at_s or record.forked_at_s),
            mapped_at_s=self._unix_s(report.mapped_s),
            forward_at_s=self._unix_s(report.forward_s),
            ready_at_s=self._unix_s(report.ready_s),
            first_item_at_s=self._unix_s(report.first_item_s),
        )

    def _unix_s(self, monotonic_s: float) -> float:
        return monotonic_s + self._offset_s if monotonic_s else 0.0

    def _change(self, replica: str, **changes: object) -> None:
        record = self._records.get(replica)
        if record is not None:
            self._records[replica] = msgspec.structs.replace(record, **changes)


async def follow(session: aiohttp.ClientSession, address: str, told: Callable[[StartReport], None]) -> None:
    """Asks a worker until it has done its first item; ends by cancellation too."""
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    while True:
        try:
            async with session.get(f"http://{address}{START_PATH}", timeout=timeout) as answer:
                if answer.status == 200:
                    report = msgspec.json.decode(await answer.read(), type=StartReport)
                    told(report)
                    if report.first_item_s:
                        return
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass  # it ends, or answers next time
        except UNREADABLE:
            pass  # likewise
        await asyncio.sleep(ASK_EVERY_S)
