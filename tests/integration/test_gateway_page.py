"""The live page's files and its data over HTTP: who may have them, what they may do, how they are sent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec
import pytest
from support.local_function import authorization
from support.report_server import PASSWORD, USER, ReportServer, a_report, report_server

from keystage.gateway.auth import CHALLENGE
from keystage.gateway.rest_page import FOLDER, INDEX, TYPES
from keystage.observability.api import EVENTS_PATH, REPORT_PATH, Report

Work = Callable[[ReportServer, aiohttp.ClientSession], Awaitable[None]]
FILES = sorted(file.name for file in FOLDER.iterdir())
WAIT_S = 60.0


def run(work: Work, *, user: str = USER) -> None:
    async def inside() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            report_server() as server,
            aiohttp.ClientSession(server.url, headers=authorization(user, PASSWORD)) as session,
        ):
            await work(server, session)

    asyncio.run(inside())


async def next_event(stream: aiohttp.StreamReader) -> tuple[str, str, bytes]:
    """The next event's name, id and data."""
    name = number = ""
    data = b""
    while line := (await stream.readuntil(b"\n")).rstrip(b"\n"):
        field, _, value = line.partition(b": ")
        if field == b"event":
            name = value.decode()
        elif field == b"id":
            number = value.decode()
        elif field == b"data":
            data = value
    return name, number, data


def test_page_and_report_need_credentials() -> None:
    async def work(server: ReportServer, session: aiohttp.ClientSession) -> None:
        server.tell(a_report())
        for path in ("/ui", "/ui/", "/ui/app.js", "/ui/nothing", REPORT_PATH, EVENTS_PATH):
            async with session.get(path, allow_redirects=False) as answer:
                assert answer.status == 401, path
                assert answer.headers["WWW-Authenticate"] == CHALLENGE
                assert b"big-stage" not in await answer.read()

    run(work, user="stranger")


def test_every_file_is_served_as_what_it_is_and_kept_until_it_changes() -> None:
    async def work(_: ReportServer, session: aiohttp.ClientSession) -> None:
        async with session.get("/ui", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (308, "ui/")
        async with session.get("/ui") as answer:
            assert (answer.status, answer.url.path) == (200, "/ui/")
            assert await answer.read() == (FOLDER / INDEX).read_bytes()
        for name in FILES:
            path = "/ui/" if name == INDEX else f"/ui/{name}"
            async with session.get(path) as answer:
                assert (answer.status, await answer.read()) == (200, (FOLDER / name).read_bytes())
                headers = answer.headers
            assert headers["Content-Type"] == TYPES[name[name.rindex(".") :]]
            assert headers["Cache-Control"] == "no-cache"
            assert headers["X-Content-Type-Options"] == "nosniff"
            policy = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
            assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            for condition in (headers["ETag"], f'"other", W/{headers["ETag"]}', "*"):
                async with session.get(path, headers={"If-None-Match": condition}) as answer:
                    assert (answer.status, await answer.read()) == (304, b"")
            async with session.get(path, headers={"If-None-Match": '"other"'}) as answer:
                assert answer.status == 200
            async with session.head(path) as answer:
                assert (answer.status, answer.headers["ETag"]) == (200, headers["ETag"])
        for path in ("/ui/nothing.js", "/ui/..%2Frest.py", "/ui/%2e%2e", "/ui/a/b"):
            async with session.get(path) as answer:
                assert answer.status == 404, path

    run(work)


def test_the_page_asks_nobody_else_and_runs_nothing_that_is_no_file() -> None:
    page = (FOLDER / INDEX).read_text()
    assert set(FILES) - {INDEX} >= set(re.findall(r'(?:src|href)="([^"#/.][^"]*)"', page))
    for tag in re.findall(r"<script[^>]*>", page):
        assert "src=" in tag
    assert "<style" not in page
    assert not re.findall(r'\s(?:style|on\w+)="', page)
    for name in FILES:
        text = (FOLDER / name).read_text()
        assert set(re.findall(r"https?://[^\s\"'`)]*", text)) <= {"http://www.w3.org/2000/svg"}, name
        for imported in re.findall(r'^import .* from "([^"]*)";$', text, re.MULTILINE):
            assert imported.removeprefix("./") in FILES
        # What comes from outside is a text, never markup.
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name


def test_without_a_report_both_say_so() -> None:
    async def work(_: ReportServer, session: aiohttp.ClientSession) -> None:
        for path in (REPORT_PATH, EVENTS_PATH):
            async with session.get(path) as answer:
                assert (answer.status, "no controller has reported" in await answer.text()) == (503, True)

    run(work)


def test_the_report_is_told_as_it_is_then_each_new_one() -> None:
    async def work(server: ReportServer, session: aiohttp.ClientSession) -> None:
        first = server.tell(a_report())
        async with session.get(REPORT_PATH) as answer:
            assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store")
            assert msgspec.json.decode(await answer.read(), type=Report) == first
        async with session.head(EVENTS_PATH) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        async with session.get(EVENTS_PATH) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            name, _, data = await next_event(answer.content)
            assert (name, abs(msgspec.json.decode(data)["now_s"] - first.at_s) < WAIT_S) == ("clock", True)
            name, number, data = await next_event(answer.content)
            assert (name, number) == ("report", "told/1")
            assert msgspec.json.decode(data, type=Report) == first
            for i in range(2, 5):
                told = server.tell(a_report(stages=i))
                name, number, data = await next_event(answer.content)
                assert (name, number) == ("report", f"told/{i}")
                assert msgspec.json.decode(data, type=Report) == told

    run(work)


def test_who_reads_slowly_gets_the_newest_and_not_a_queue() -> None:
    async def work(server: ReportServer, session: aiohttp.ClientSession) -> None:
        server.tell(a_report(stages=500))
        async with session.get(EVENTS_PATH) as answer:
            assert (await next_event(answer.content))[0] == "clock"
            assert (await next_event(answer.content))[1] == "told/1"
            for _ in range(2000):  # far more than sockets hold
                server.tell(a_report(stages=1))
            seen = ["told/1"]
            while seen[-1] != "told/2001":
                seen.append((await next_event(answer.content))[1])
            assert len(seen) < 2001

    run(work)


def test_an_open_page_does_not_hold_up_a_stop() -> None:
    async def work(server: ReportServer, session: aiohttp.ClientSession) -> None:
        server.tell(a_report())
        async with session.get(EVENTS_PATH) as answer:
            assert (await next_event(answer.content))[0] == "clock"
            await server.stop()
            left = await answer.content.read()  # its end is a whole one: not broken off
            assert left.startswith(b"event: report")

    run(work)


@pytest.mark.parametrize("path", [REPORT_PATH, EVENTS_PATH, "/ui/"])
def test_other_methods_are_refused(path: str) -> None:
    async def work(_: ReportServer, session: aiohttp.ClientSession) -> None:
        async with session.post(path) as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD, OPTIONS")

    run(work)
