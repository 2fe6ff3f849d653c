"""The reader of the supervisor's report: one question for all who look, none while nobody does."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from keystage.gateway import local_report
from keystage.gateway.backend import BackendUnavailable
from keystage.gateway.local_report import ReportReader
from keystage.observability.api import Report
from keystage.observability.board import Board


def body(number: int, controller: str = "a b&c", at_s: float = 1.0) -> bytes:
    return msgspec.json.encode(Report(controller=controller, number=number, at_s=at_s))


class Supervisor:
    """Answers as the control socket does; it can be away."""

    def __init__(self) -> None:
        self.board = Board()
        self.asked: list[str] = []
        self.is_away = False

    async def ask(self, path: str, within_s: float) -> bytes:
        self.asked.append(path)
        if self.is_away:
            raise BackendUnavailable("the supervisor cannot be reached")
        query = {name: values[0] for name, values in parse_qs(urlsplit(path).query).items()}
        assert within_s > float(query["wait"])
        since = (query["controller"], int(query["since"])) if "controller" in query else None
        return await self.board.wait(since, float(query["wait"])) or b""


def test_many_readers_are_one_question() -> None:
    async def work() -> None:
        supervisor = Supervisor()
        reader = ReportReader(supervisor.ask)
        supervisor.board.put(body(1))
        assert await asyncio.gather(*[reader.report(None, 0.0) for _ in range(50)]) == [body(1)] * 50
        waiting = [asyncio.create_task(reader.report(("a b&c", 1), 30.0)) for _ in range(50)]
        await asyncio.sleep(0.01)
        assert len(supervisor.asked) == 2  # what there is, and what comes next
        supervisor.board.put(body(2))
        assert await asyncio.gather(*waiting) == [body(2)] * 50
        await reader.stop()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_nothing_is_asked_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_report, "IDLE_S", 0.0)
    monkeypatch.setattr(local_report, "WAIT_S", 0.01)

    async def work() -> None:
        supervisor = Supervisor()
        reader = ReportReader(supervisor.ask)
        supervisor.board.put(body(1))
        assert await reader.report(None, 0.0) == body(1)
        await asyncio.sleep(0.1)
        asked = len(supervisor.asked)
        assert asked <= 2
        supervisor.board.put(body(2))
        await asyncio.sleep(0.1)
        assert len(supervisor.asked) == asked
        assert await reader.report(None, 0.0) == body(2)  # not what was known long ago
        await reader.stop()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_supervisor_that_is_away_is_named_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_report, "RETRY_S", 0.01)

    async def work() -> None:
        supervisor = Supervisor()
        reader = ReportReader(supervisor.ask)
        supervisor.is_away = True
        with pytest.raises(BackendUnavailable):
            await reader.report(None, 0.0)
        supervisor.is_away = False
        assert await reader.report(None, 0.0) is None
        supervisor.board.put(body(1))
        assert await reader.report(None, 30.0) == body(1)
        supervisor.is_away = True
        supervisor.board.put(body(2))  # ends the question on its way; the next ones fail
        assert await reader.report(("a b&c", 1), 30.0) == body(2)
        assert await reader.report(("a b&c", 2), 0.05) is None
        supervisor.is_away = False
        supervisor.board = Board()  # it started anew, and so did the controller
        supervisor.board.put(body(1, "new", at_s=2.0))
        assert await reader.report(("a b&c", 2), 30.0) == body(1, "new", at_s=2.0)
        await reader.stop()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_report_that_is_no_news_here_is_not_asked_for_over_and_over() -> None:
    async def work() -> None:
        supervisor = Supervisor()
        reader = ReportReader(supervisor.ask)
        supervisor.board.put(body(5, at_s=100.0))
        assert await reader.report(None, 0.0) == body(5, at_s=100.0)
        await asyncio.sleep(0.01)
        earlier = supervisor.board
        supervisor.board = Board()
        supervisor.board.put(body(1, "behind", at_s=50.0))  # its clock is behind
        earlier.put(body(6, at_s=101.0))  # ends the question on its way
        assert await reader.report(("a b&c", 5), 30.0) == body(6, at_s=101.0)
        await asyncio.sleep(0.1)
        assert len(supervisor.asked) <= 4
        await reader.stop()

    asyncio.run(asyncio.wait_for(work(), 60))
