"""A replica that misbehaves as told, and an ASGI client for the gateway's proxy."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any, cast

import uvloop

from keystage.gateway.backend import Backend, Endpoint, FunctionState, UnknownFunction
from keystage.gateway.metrics import Metrics
from keystage.gateway.proxy import Proxy
from keystage.gateway.replicas import Replicas
from keystage.local.api import Deployment

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Upstream:
    """A listening socket whose connections are handed to a script.

    Attributes:
        connections: how many there have been.
    """

    def __init__(self, script: Script) -> None:
        self.connections = 0
        self.address = ""
        self._script = script
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[str]:
        """Yields the address."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield f"{host}:{port}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._script(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()


async def head(reader: asyncio.StreamReader) -> bytes:
    """A request's head."""
    return await reader.readuntil(b"\r\n\r\n")


class _View:
    """The part of a backend that invocations read."""

    def __init__(self, addresses: Sequence[str]) -> None:
        ready = tuple(Endpoint(f"f-{k}", address) for k, address in enumerate(addresses))
        deployment = Deployment(service="f", image="none")
        self._state = FunctionState(
            deployment=deployment,
            created_at_s=0.0,
            replicas=len(ready),
            ready=ready,
            waking=False,
            trouble=(),
        )

    def get(self, name: str) -> FunctionState:
        if name != "f":
            raise UnknownFunction(f"function {name} is not deployed")
        return self._state

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


@contextlib.asynccontextmanager
async def proxy_to(
    *addresses: str, upstream_s: float = 5.0, wake_s: float = 5.0, max_body_bytes: int = 1 << 30
) -> AsyncIterator[Proxy]:
    """The gateway's proxy before function `f` with these replicas."""
    replicas = Replicas(cast("Backend", _View(addresses)), wake_s)
    proxy = Proxy(replicas, Metrics(), max_body_bytes=max_body_bytes, upstream_s=upstream_s)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


@dataclasses.dataclass
class Call:
    """One invocation as an ASGI server would make it.

    Attributes:
        method: HTTP method.
        parts: the request's body as it comes.
        headers: the request's, lower case.
        more: the body does not end with the last part.
        gate: closed, the client takes no answer.
        left: set, the client goes away once its parts are sent.
        pace_s: time between parts.
        before: told the number of each part before it is sent; may block.
        taken: parts that the proxy has taken.
        sent: messages of the answer.
    """

    method: str = "GET"
    parts: Sequence[bytes] = (b"",)
    headers: Sequence[tuple[bytes, bytes]] = ()
    more: bool = False
    gate: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    left: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    sent: list[MutableMapping[str, Any]] = dataclasses.field(default_factory=list)
    pace_s: float = 0.0
    before: Callable[[int], None] | None = None
    taken: int = 0

    async def run(self, proxy: Proxy, path: bytes = b"/function/f/x") -> Call:
        """Makes the call, with an open gate unless it was closed before."""
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "raw_path": path,
            "query_string": b"",
            "headers": list(self.headers),
            "client": ("10.0.0.1", 1),
        }
        await proxy(scope, self._receive, self._send)
        return self

    @property
    def status(self) -> int:
        """Of the answer, 0 without one."""
        return int(self.sent[0]["status"]) if self.sent else 0

    @property
    def answer_headers(self) -> dict[bytes, bytes]:
        """Of the answer."""
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        """As far as it came."""
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def is_whole(self) -> bool:
        """The answer was ended in good order."""
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)

    async def _receive(self) -> MutableMapping[str, Any]:
        if self.taken < len(self.parts):
            if self.pace_s and self.taken:
                await asyncio.sleep(self.pace_s)
            if self.before is not None:
                self.before(self.taken)
            part = self.parts[self.taken]
            self.taken += 1
            more = self.more or self.taken < len(self.parts)
            return {"type": "http.request", "body": part, "more_body": more}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            await self.gate.wait()


def open_call(method: str = "GET", parts: Sequence[bytes] = (b"",), **more: Any) -> Call:
    """A call whose client takes what comes."""
    call = Call(method, parts, **more)
    call.gate.set()
    return call


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    uvloop.run(bounded())
