"""Requests at a steady rate from a thread of their own, each of them noted: an open loop."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Self

import aiohttp

JOIN_S = 180.0
TIMEOUT_S = 120.0
CONNECT_S = 5.0
SILENCE_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One request; times are `time.time`.

    Attributes:
        sent_s: when it was sent.
        done_s: when its answer was there, or the connection broken.
        status: of the answer, 0: there is none.
        text: what is wrong, empty: nothing.
    """

    sent_s: float
    done_s: float
    status: int
    text: str

    @property
    def is_good(self) -> bool:
        return self.status == 200 and not self.text


class Load:
    """Sends `body(number)` to an address until it is stopped.

    Args:
        url: where to.
        rate_rps: requests a second.
        body: content of each.
        check: whether an answer is right, by its number and content.
        most: requests at most, None: until it is stopped.
    """

    def __init__(
        self,
        url: str,
        rate_rps: float,
        body: Callable[[int], bytes] = lambda number: b"%d" % number * 20,
        check: Callable[[int, bytes], bool] = lambda number, body: body == b"%d" % number * 20,
        most: int | None = None,
    ) -> None:
        self._url, self._rate_rps, self._body, self._check = url, rate_rps, body, check
        self._most = most
        self._stop = threading.Event()
        self.answers: list[Answer] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> list[Answer]:
        """No more are sent; returns all answers once they are there."""
        self._stop.set()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "requests are still without an answer"
        return self.answers

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.is_good]

    @property
    def served(self) -> int:
        """Right answers so far."""
        return len(self.answers) - len(self.failed)

    def wait(self, more: int, within_s: float = 60.0) -> None:
        """Until so many more were answered rightly."""
        goal, until_s = self.served + more, time.monotonic() + within_s
        while self.served < goal:
            assert time.monotonic() < until_s, f"{self.served} of {goal} good answers within {within_s:g} s"
            time.sleep(0.05)

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            calls: list[asyncio.Task[None]] = []
            begun_s = time.monotonic()
            while not self._stop.is_set() and len(calls) != self._most:
                calls.append(asyncio.create_task(self._call(session, len(calls))))
                await asyncio.sleep(max(0.0, begun_s + len(calls) / self._rate_rps - time.monotonic()))
            await asyncio.gather(*calls)

    async def _call(self, session: aiohttp.ClientSession, number: int) -> None:
        sent_s = time.time()
        try:
            async with session.post(self._url, data=self._body(number)) as answer:
                body = await answer.read()
                status = answer.status
                text = "" if status == 200 else f"{answer.headers.get('Retry-After', '')} {body[:200]!r}"
                if status == 200 and not self._check(number, body):
                    text = f"wrong answer {body[:200]!r}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            status, text = 0, f"{type(error).__name__}: {error}"
        self.answers.append(Answer(sent_s, time.time(), status, text))


def summary(load: Load) -> str:
    """What became of the requests."""
    taken = sorted(answer.done_s - answer.sent_s for answer in load.answers)
    if not taken:
        return "none sent"
    at = lambda ratio: taken[min(len(taken) - 1, int(ratio * len(taken)))]  # noqa: E731
    first = f"; first failure {load.failed[0]}" if load.failed else ""
    return (
        f"{len(taken)} sent, {len(load.failed)} failed, latency p50 {at(0.5):.3f} s, p99 {at(0.99):.3f} s, "
        f"longest {taken[-1]:.3f} s{first}"
    )
