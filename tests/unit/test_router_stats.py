"""What a router's statistics tell of its clients: requests that had an objective, and those that met it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from keystage.bundle.api import emulated
from keystage.router.admission import AdmissionBounds
from keystage.router.engine import TooLate
from keystage.router.node import RouterNode
from keystage.wire.events import EventLog
from keystage.wire.opening import open_router


@pytest.mark.parametrize(("is_counting", "due"), [(True, 2), (False, 0)])
def test_requests_with_an_objective_are_counted_where_answers_are(
    tmp_path: Path, is_counting: bool, due: int
) -> None:
    async def run() -> None:
        node = RouterNode(
            emulated("e", 1, execution="single-pass"), open_router(f"ipc://{tmp_path}/r"), AdmissionBounds(),
            EventLog(None, "r"), 1 << 20,
        )  # fmt: skip
        node.watch(None, is_counting=is_counting)
        node.start()
        try:
            async with asyncio.timeout(30):
                for _ in range(2):  # nobody serves
                    with pytest.raises(TooLate):
                        await node.run(b"x", 0.1)
            assert (node.stats().due, node.stats().in_time) == (due, 0)
            assert node.served is not None or not is_counting
            if node.served is not None:
                node.served.ended(is_met=True)
                assert (node.stats().due, node.stats().in_time) == (due + 1, 1)
        finally:
            await node.stop()

    asyncio.run(run())
