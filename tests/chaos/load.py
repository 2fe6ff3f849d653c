"""The load: so many clients, each asking one request after another, until enough were asked.

Before it: the live system. After it: every request with its answer, for `checker`. It goes on beyond its
number while faults are still to come, so that these find work; it must not know what the faults are.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

import aiohttp

from chaos.checker import Answer
from chaos.client import Client
from chaos.requests import Case, Request, drawn

SAY_S = 10.0


class Load:
    """Everything that is asked.

    Args:
        seed: of the run.
        run: what this run's keys begin with.
        cases: to draw from.
        least: requests at least.

    Attributes:
        asked: requests and what came, in the order of their numbers.
        in_flight: requests that are being asked.
    """

    def __init__(self, seed: int, run: str, cases: Sequence[Case], least: int) -> None:
        self.asked: list[tuple[Request, Answer]] = []
        self.in_flight = 0
        self._seed = seed
        self._run = run
        self._cases = cases
        self._least = least
        self._ended = 0

    @property
    def is_enough(self) -> bool:
        """Whether as many as wanted were begun."""
        return len(self.asked) >= self._least

    async def run(self, url: str, model: str, clients: int, goes_on: Callable[[], bool], rate: float) -> None:
        """Asks with so many clients until enough were asked and nothing more is to come.

        Args:
            url: of the pipeline's function.
            model: its name.
            clients: requests at once, at most.
            goes_on: whether more is wanted although there are enough.
            rate: requests a second at most, 0: as many as the clients can.
        """
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            client = Client(session, url, model)
            saying = asyncio.create_task(self._say())
            try:
                await asyncio.gather(
                    *(self._ask_on(client, goes_on, clients / rate if rate else 0.0) for _ in range(clients))
                )
            finally:
                saying.cancel()
                await asyncio.gather(saying, return_exceptions=True)

    async def _ask_on(self, client: Client, goes_on: Callable[[], bool], every_s: float) -> None:
        while not self.is_enough or goes_on():
            request = drawn(self._seed, self._run, len(self.asked), self._cases)
            answer = Answer(time.time())
            self.asked.append((request, answer))
            self.in_flight += 1
            try:
                await client.ask(request, answer)
            finally:
                self.in_flight -= 1
                self._ended += 1
            if every_s:
                await asyncio.sleep(max(0.0, answer.begun_s + every_s - time.time()))

    async def _say(self) -> None:
        while True:
            await asyncio.sleep(SAY_S)
            sys.stderr.write(f"chaos: {self._ended} requests ended, {self.in_flight} in flight\n")
