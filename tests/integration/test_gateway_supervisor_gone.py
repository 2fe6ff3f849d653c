"""What a client is told when the supervisor does not answer: thing and bound, no path, no exception."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from keystage.gateway.backend import BackendUnavailable
from keystage.gateway.local import LocalBackend
from keystage.local.api import View


def test_messages_name_the_supervisor_and_the_bound(tmp_path: Path) -> None:
    async def work() -> None:
        silent = asyncio.Event()

        async def watch(_: web.Request) -> web.Response:
            view = View(version=1, incarnation="i", functions=[], replicas=[])
            return web.Response(body=msgspec.json.encode(view))

        async def hang(_: web.Request) -> web.Response:
            await silent.wait()
            return web.Response()

        async def fail(_: web.Request) -> web.Response:
            return web.json_response({"error": "no room"}, status=507)

        app = web.Application()
        app.router.add_get("/watch", watch)
        app.router.add_get("/secrets", hang)
        app.router.add_delete("/secrets/{name}", fail)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        backend = LocalBackend(tmp_path / "s")
        await backend.start()
        said = []
        with pytest.raises(BackendUnavailable) as caught:
            await backend._ask("GET", "/secrets", timeout=aiohttp.ClientTimeout(total=0.05))
        said.append(str(caught.value))
        with pytest.raises(BackendUnavailable) as caught:
            await backend.delete_secret("x")
        said.append(str(caught.value))
        silent.set()
        await runner.cleanup()
        with pytest.raises(BackendUnavailable) as caught:
            await backend.secrets()
        said.append(str(caught.value))
        await backend.stop()
        assert said == [
            "the supervisor did not answer within 0.05 s",
            "the supervisor answered with status 507: no room",
            "the supervisor cannot be reached: it ends, or starts anew",
        ]

    asyncio.run(asyncio.wait_for(work(), 30))
