"""The server's transport writes once a turn, in order, and loses nothing on close."""

from __future__ import annotations

import asyncio
from typing import cast

from keystage.gateway.joined_writes import JoinedWrites


class Recorded:
    """What a transport was told."""

    def __init__(self) -> None:
        self.told: list[bytes | str] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.told.append(data)

    def close(self) -> None:
        self.told.append("close")
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.told.append("pause")


def test_what_is_written_in_one_turn_leaves_together() -> None:
    async def work() -> None:
        under = Recorded()
        transport = JoinedWrites(cast("asyncio.Transport", under))
        transport.write(b"head ")
        transport.write(b"body")
        assert under.told == []
        await asyncio.sleep(0)
        assert under.told == [b"head body"]
        await asyncio.sleep(0)
        transport.write(b"more")
        await asyncio.sleep(0)
        assert under.told == [b"head body", b"more"]
        transport.pause_reading()
        assert under.told[-1] == "pause"

    asyncio.run(work())


def test_closing_writes_what_is_left_and_nothing_after() -> None:
    async def work() -> None:
        under = Recorded()
        transport = JoinedWrites(cast("asyncio.Transport", under))
        transport.write(b"last")
        transport.close()
        assert under.told == [b"last", "close"]
        transport.write(b"late")
        await asyncio.sleep(0)
        assert under.told == [b"last", "close"]

    asyncio.run(work())
