"""What is stored of an asynchronous call: the headers that its function gets."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, cast

import pytest

from keystage.gateway.queue import Bounds
from keystage.gateway.queue_address import CallbackRules
from keystage.gateway.queue_calls import AsyncCalls
from keystage.gateway.queue_memory import MemoryQueue
from keystage.gateway.queue_runner import Runner
from keystage.gateway.replicas import Replicas


class Deployed:
    """Knows every function."""

    def check(self, function: str) -> None:
        """Refuses none."""


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_via_names_the_version_in_which_the_call_came(version: str) -> None:
    async def work() -> dict[str, str]:
        queue = MemoryQueue(Bounds(1, 10_000))
        replicas, runner = cast("Replicas", Deployed()), cast("Runner", None)
        calls = AsyncCalls(queue, runner, replicas, cast("CallbackRules", None), 10)
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": b"x"}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {
            "method": "POST",
            "raw_path": b"/async-function/f",
            "query_string": b"",
            "headers": [(b"host", b"h")],
            "client": ("10.0.0.1", 1),
            "scheme": "http",
            "http_version": version,
        }
        await calls(scope, receive, send)
        assert sent[0]["status"] == 202
        (lease,) = await queue.take({"f": 1})
        assert lease.call is not None
        return dict(lease.call.headers)

    assert asyncio.run(work())["via"] == f"{version} keystage"
