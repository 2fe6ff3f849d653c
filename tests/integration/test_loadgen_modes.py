"""Closed loop, saturation search and several pipelines against a real HTTP server."""

from __future__ import annotations

import asyncio
import collections
import csv
import io
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.asgi_server import serving

from keystage.loadgen import app, table
from keystage.loadgen.options import LoadOptions
from keystage.loadgen.report import Report

Send = Callable[[dict[str, Any]], Awaitable[None]]


class Server:
    """Serves `slots` requests at a time, `service_s` each, and counts them by path."""

    def __init__(self) -> None:
        self.slots, self.service_s = 1000, 0.0
        self.in_flight = self.most_in_flight = 0
        self.by_path: collections.Counter[str] = collections.Counter()
        self._gate: asyncio.Semaphore | None = None

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Any], send: Send) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        if scope["method"] == "GET":
            await self.answer(send, 404)
            return
        self._gate = self._gate or asyncio.Semaphore(self.slots)
        self.by_path[scope["path"]] += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        async with self._gate:
            await asyncio.sleep(self.service_s)
        self.in_flight -= 1
        await self.answer(send, 500 if "fails" in scope["path"] else 200)

    async def answer(self, send: Send, status: int) -> None:
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def base_url(server: Server) -> Iterator[str]:
    with serving(server) as address:
        yield address


def options(url: str, **changes: Any) -> LoadOptions:
    given: dict[str, Any] = {"target": "raw", "body_bytes": 64, "out": None, "timeout_s": 30.0}
    return LoadOptions(url=url, **(given | changes))


def test_a_cv_is_claimed_only_over_enough_arrivals(base_url: str) -> None:
    few = app.replay(options(f"{base_url}/function/p", rate_rps=40.0, cv=2.0, duration_s=0.5))
    assert (few.arrivals.cv_claimed, few.arrivals.cv_needs) == (False, 8000)
    assert "not claimed, which takes 8000 arrivals" in shown(few)
    even = app.replay(options(f"{base_url}/function/p", rate_rps=40.0, cv=0.0, duration_s=0.5))
    assert (even.arrivals.cv_claimed, even.arrivals.cv_needs) == (True, 3)
    assert "not claimed" not in shown(even)


def shown(report: Report) -> str:
    out = io.StringIO()
    table.show(report, Console(file=out, width=200, markup=False))
    return out.getvalue()


def test_a_closed_loop_never_has_more_in_flight_than_clients(server: Server, base_url: str) -> None:
    server.service_s = 0.02
    report = app.replay(options(f"{base_url}/function/p", closed_loop=3, duration_s=1.0, slo_latency_s=30.0))
    assert server.most_in_flight == 3
    assert 3 < report.requests.sent == server.by_path["/function/p/"]
    # Three clients, at least 20 ms each: no more than 50 rounds fit into a second, and none begins after it.
    assert report.requests.sent <= 3 * 50
    assert max(row.scheduled_s for row in report.rows) < 1.0
    assert [row.index for row in report.rows] == list(range(report.requests.sent))
    assert report.arrivals.source == "closed loop of 3 clients"
    assert (report.arrivals.asked_rate_rps, report.arrivals.asked_cv) == (None, None)
    assert "the queueing that independent users would meet is hidden" in report.notes[0]


def test_clients_think(server: Server, base_url: str) -> None:
    report = app.replay(options(f"{base_url}/function/p", closed_loop=4, think_s=0.4, duration_s=1.0))
    # Each begins at its share of 0.4 s and comes back no sooner than 0.4 s after an answer.
    assert 4 <= report.requests.sent <= 4 * 3
    starts = sorted(row.scheduled_s for row in report.rows)[:4]
    assert all(start >= 0.1 * number for number, start in enumerate(starts))


def test_clients_whose_requests_fail_do_not_hammer(server: Server, base_url: str) -> None:
    report = app.replay(options(f"{base_url}/function/fails", closed_loop=2, duration_s=1.0))
    assert report.requests.by_error == {"http_500": report.requests.sent}
    # A failed client waits a 20th of the run.
    assert report.requests.sent <= 2 * 20


@pytest.mark.slow
def test_functions_go_to_their_pipelines(server: Server, base_url: str, tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    counts = {"f1": [12, 3], "f2": [0, 7], "f3": [5, 5]}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["HashOwner", "HashApp", "HashFunction", "Trigger", 1, 2])
        for name, minutes in counts.items():
            writer.writerow(["o", "a", name, "http", *minutes])
    mapping = ("a/f1=chat", "a/f2=embed", "hash:spare")
    out = tmp_path / "out"
    report = app.replay(options(base_url, trace=path, speed=60.0, mapping=mapping, out=out))
    assert report.requests.served == 32
    wanted = {"/function/chat/": 15, "/function/embed/": 7, "/function/spare/": 10}
    assert dict(server.by_path) == wanted
    assert any("stages are not watched: requests went to 3 pipelines" in note for note in report.notes)
    scheduled = [row.scheduled_s for row in report.rows]
    assert [sum(k <= at_s < k + 1 for at_s in scheduled) for k in (0, 1)] == [17, 15]


def searched(base_url: str, **changes: Any) -> Report:
    given: dict[str, Any] = {
        "cv": 0.0, "rate_rps": 8.0, "duration_s": 2.0, "search_rate": True, "slo_latency_s": 1.3,
        "search_attainment": 0.9, "search_precision": 0.5,
    }  # fmt: skip
    return app.replay(options(f"{base_url}/function/p", **(given | changes)))


@pytest.mark.slow
def test_a_search_finds_what_a_server_of_known_rate_can_do(
    server: Server, base_url: str, tmp_path: Path
) -> None:
    """Ten slots of 1 s serve 10/s. At 8/s nobody waits; at 12/s for 2 s the last four of 24 wait 0.42 s and
    more, at 16/s the last 22 of 32 wait 0.37 s and more, and 0.3 s are allowed."""
    server.slots, server.service_s = 10, 1.0
    report = searched(base_url, out=tmp_path)
    found = json.loads((tmp_path / "search.json").read_bytes())
    assert (found["best_rps"], found["not_met_rps"], found["bound_by"]) == (8.0, 12.0, "target")
    assert [(step["rate_rps"], step["verdict"]) for step in found["steps"]] == [
        (8.0, "met"), (16.0, "missed"), (12.0, "missed"),
    ]  # fmt: skip
    tried: list[int] = []
    for step in found["steps"]:
        seeds = [window["seed"] for window in step["windows"]]
        assert 2 <= len(seeds) <= 3
        tried += seeds
        assert {window["requests"] for window in step["windows"]} == {2 * step["rate_rps"]}
    assert tried == list(range(len(tried))), "no prompt is sent twice"
    assert report.arrivals.asked_rate_rps == 8.0
    assert any("search: 8/s is the highest rate found with 90 % of requests" in note for note in report.notes)
    assert sum(note.startswith("search: ") for note in report.notes) == 4
    assert (tmp_path / "report.json").exists()


def test_a_search_that_finds_nothing_says_so(server: Server, base_url: str) -> None:
    server.service_s = 0.3
    report = searched(base_url, slo_latency_s=0.1, rate_rps=10.0, duration_s=1.0, search_repeats=1)
    assert any(note.startswith("search: no rate down to 10/s had 90 %") for note in report.notes)
    assert report.attainment[0].met == 0


def test_what_an_earlier_run_left_is_not_read_as_this_ones(tmp_path: Path) -> None:
    """A run that is killed leaves requests.jsonl; beside an old report.json it would look whole."""
    for name in ("report.json", "report.html", "slo.png"):
        (tmp_path / name).write_text("of an earlier run")
    found: list[list[str]] = []

    class Look(Server):
        async def answer(self, send: Send, status: int) -> None:
            found.append(sorted(path.name for path in tmp_path.iterdir()))
            await super().answer(send, status)

    with serving(Look()) as address:
        app.replay(options(f"{address}/function/p", rate_rps=40.0, duration_s=0.25, out=tmp_path))
    assert found[-1] == ["requests.jsonl"], "while it sends"
    assert {path.name for path in tmp_path.iterdir()} == {
        "requests.jsonl", "report.json", "report.html", "latency.png", "arrivals.png",
    }  # fmt: skip
