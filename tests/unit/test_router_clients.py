"""What counts as an answer: its end, or a client that has all it wants; not one that left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import cast

import pytest

from keystage.router.admission import AdmissionBounds
from keystage.router.batch_settings import BatchSettings
from keystage.router.clients import Clients
from keystage.router.engine import Failure, Generation, enough
from keystage.router.fleet import Fleet
from keystage.router.looping import LoopingCore
from keystage.wire import api
from keystage.wire.events import EventLog

Tokens = AsyncGenerator[list[int], None]


class Router:
    """The looping core of a pipeline with one worker, and its clients."""

    def __init__(self) -> None:
        self.core = LoopingCore(Fleet(1, "p"), AdmissionBounds(), 100, lambda _addresses: 1)
        hello = api.Hello(api.WIRE_VERSION, "p", (0,), "a", "b", "emulated", 4, 1000, 8, "a", 1, "n", True)
        assert self.core.fleet.hello("a", hello, 0.0) is None
        self.core.fleet.credit("a", api.Credit("a", 4, 1000))
        self.core.fleet.ready("a", 0.0)
        self.core.worker_ready("a", 0.0)
        self.clients = Clients(EventLog(None, "r"), "p", BatchSettings(ttft_s=60.0), self.flush, self.flush)
        self.released = 0

    def flush(self) -> None:
        sends, outcomes = self.core.take()
        self.released += sum(isinstance(message, api.Release) for _, message in sends)
        for outcome in outcomes:
            self.clients.tell(outcome)

    def generate(self) -> Tokens:
        request = Generation([1, 2], 5, 0.0, 1.0, 0, ())
        return cast("Tokens", self.clients.generate(self.core, request))

    def sample(self, position: int) -> None:
        self.core.tokens(api.Tokens("a", 1, [100], [1], [position], [9]), 1.0)
        self.flush()


async def stops(tokens: Tokens, _router: Router) -> None:
    await enough(tokens)


async def leaves(tokens: Tokens, _router: Router) -> None:
    await tokens.aclose()


async def completes(tokens: Tokens, router: Router) -> None:
    for position in range(4, 7):
        router.sample(position)
    assert [new async for new in tokens] == [[9, 9, 9]]


async def fails(tokens: Tokens, router: Router) -> None:
    router.core.failed(api.Failed("a", [100], [1], "broken", False), 1.0)
    router.flush()
    with pytest.raises(Failure):
        await anext(tokens)


@pytest.mark.parametrize(
    ("end", "answered", "due", "in_time"),
    [(completes, 1, 1, 1), (stops, 1, 1, 1), (leaves, 0, 0, 0), (fails, 0, 1, 0)],
)
def test_what_counts_as_an_answer(
    end: Callable[[Tokens, Router], Awaitable[None]], answered: int, due: int, in_time: int
) -> None:
    router = Router()

    async def run() -> None:
        tokens = router.generate()
        first = asyncio.ensure_future(anext(tokens))
        await asyncio.sleep(0)
        router.sample(2)
        assert await first == [9]
        router.sample(3)
        assert await anext(tokens) == [9]
        await end(tokens, router)

    asyncio.run(asyncio.wait_for(run(), 20))
    served = router.clients.served
    assert served is not None
    assert sum(served.answer.counts) == answered
    assert (served.due, served.in_time) == (due, in_time)
    assert (router.released, router.clients.streams) == (1, {})
