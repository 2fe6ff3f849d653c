"""Sending processes that end by themselves: asyncio alone takes their ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import psutil
import pytest
from support.sender_world import WAIT_S, plan_of

from keystage.loadgen.sending.run import prepared
from keystage.loadgen.target import Target


class _LateWatcher(asyncio.ThreadedChildWatcher):
    """Looks for the ends of processes no sooner than told: so does a thread on a machine with other work."""

    def __init__(self) -> None:
        super().__init__()
        self.may_look = threading.Event()

    def _do_waitpid(self, *given: Any) -> None:
        assert self.may_look.wait(WAIT_S)
        super()._do_waitpid(*given)  # type: ignore[misc]


def test_ends_of_processes_are_left_to_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    """They end just before they are closed, and asyncio's thread has not seen it yet."""
    watcher, before = _LateWatcher(), asyncio.get_child_watcher()
    asyncio.set_child_watcher(watcher)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def closed() -> None:
        async with prepared(plan_of([0.0]), Target("raw", f"http://127.0.0.1:{port}"), processes=1) as sender:
            await sender.send()
            (pid,) = sender.pids
            async with asyncio.timeout(WAIT_S):
                while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    await asyncio.sleep(0.01)
            asyncio.get_running_loop().call_later(0.1, watcher.may_look.set)

    try:
        asyncio.run(closed())
    finally:
        watcher.may_look.set()
        asyncio.set_child_watcher(before)
    assert caplog.messages == []
