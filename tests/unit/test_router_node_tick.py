"""The router's tick: what it watches over, deadlines and deaths, must not end with one failure."""

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


def test_a_tick_that_failed_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[float] = []

    async def run() -> None:
        node = RouterNode(
            emulated("e", 1, execution="single-pass"), open_router(f"ipc://{tmp_path}/r"), AdmissionBounds(),
            EventLog(None, "r"), 1 << 20,
        )  # fmt: skip
        tick = node._core.tick

        def failing_once(now_s: float) -> None:
            if not failures:
                failures.append(now_s)
                raise RuntimeError("a bug")
            tick(now_s)

        monkeypatch.setattr(node._core, "tick", failing_once)
        node.start()
        try:
            async with asyncio.timeout(20):
                with pytest.raises(TooLate):
                    await node.run(b"x", 0.2)
        finally:
            await node.stop()

    asyncio.run(run())
    assert failures
