"""A gateway in front of `async_function`, a receiver of callbacks, and a flood of asynchronous calls."""

from __future__ import annotations

import asyncio
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from support.local_function import PYTHON

from keystage.local.api import Deployment
from keystage.local.world import LocalWorld

_SERVE = (
    f"{PYTHON} -m uvicorn --app-dir {shlex.quote(str(Path(__file__).parent))} async_function:app "
    "--host 127.0.0.1 --port $PORT --log-level warning --no-access-log"
)
WAIT_S = 40.0
AT_ONCE = 32


class AsyncWorld:
    """What a test needs of a running world.

    Attributes:
        world: the world.
        session: client of its gateway.
        callbacks: what the receiver got: (path, headers, body).
        receiver_url: address of the receiver.
        answers: statuses that the receiver gives, the last one for ever.
    """

    def __init__(self, world: LocalWorld, session: aiohttp.ClientSession, folder: Path) -> None:
        self.world = world
        self.session = session
        self.callbacks: list[tuple[str, dict[str, str], bytes]] = []
        self.receiver_url = ""
        self.answers = [200]
        self._folder = folder

    async def deploy(self, *names: str) -> None:
        """Deploys functions and waits until each has a replica."""
        for name in names:
            envs = {"RAN": str(self._folder / f"ran-{name}")}
            await self.world.deploy(Deployment(service=name, image="x", envProcess=_SERVE, envVars=envs))
        for name in names:
            await self.world.wait_ready(name)

    def ran(self, name: str = "job") -> Counter[str]:
        """How often each call was run, by id."""
        file = self._folder / f"ran-{name}"
        return Counter(file.read_text().split()) if file.exists() else Counter()

    async def post(self, path: str, body: bytes = b"", **headers: str) -> tuple[int, str, dict[str, str]]:
        """One asynchronous call: (status, text, headers in lower case)."""
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        async with self.session.post(f"/async-function/{path}", data=body, headers=named) as answer:
            return answer.status, await answer.text(), {k.lower(): v for k, v in answer.headers.items()}

    async def flood(self, ids: list[str], path: str, pause_s: float = 0.0) -> Counter[str]:
        """Sends each call until it is accepted; how often each was refused or broken off before.

        Each of the `AT_ONCE` senders pauses after every call.
        """
        todo = list(reversed(ids))
        refused: Counter[str] = Counter()

        async def send() -> None:
            while todo:
                call_id = todo.pop()
                while True:
                    try:
                        status, text, _ = await self.post(path, b"x" * 500, X_Call_Id=call_id)
                    except (aiohttp.ClientError, OSError):
                        status, text = 0, ""
                    if status == 202:
                        await asyncio.sleep(pause_s)
                        break
                    assert status in (0, 503), (status, text)
                    refused[call_id] += 1
                    await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as senders:
            for _ in range(AT_ONCE):
                senders.create_task(send())
        return refused

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Waits, bounded, until something holds."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{what}: not within {WAIT_S} s") from None

    async def metrics(self) -> str:
        """The gateway's metrics."""
        async with self.session.get("/metrics") as answer:
            return await answer.text()

    async def receive(self, request: web.Request) -> web.Response:
        """Takes one callback."""
        headers = {key.lower(): value for key, value in request.headers.items()}
        self.callbacks.append((request.path_qs, headers, await request.read()))
        status = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.Response(status=status, headers={"Location": "/elsewhere"} if status == 302 else {})


@asynccontextmanager
async def _opened(folder: Path, env: dict[str, str]) -> AsyncIterator[AsyncWorld]:
    async with (
        LocalWorld(folder / "state", gateway_port=0, controller=False, env=env) as world,
        aiohttp.ClientSession(world.gateway_url) as session,
    ):
        opened = AsyncWorld(world, session, folder)
        app = web.Application()
        app.router.add_post("/{tail:.*}", opened.receive)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        opened.receiver_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield opened
        finally:
            await runner.cleanup()


def run_async_world(folder: Path, work: Callable[[AsyncWorld], Awaitable[None]], **env: str) -> None:
    """Runs a test in a world with these settings of the gateway."""

    async def inside() -> None:
        async with asyncio.timeout(100), _opened(folder, env) as opened:
            await work(opened)

    asyncio.run(inside())
