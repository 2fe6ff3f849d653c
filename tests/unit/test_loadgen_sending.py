"""Pure parts of the sender: heads, addresses, what is read of answers, messages; the benchmark's lag."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
import uvloop

from keystage.bench import sender_rivals
from keystage.bench.frame import BenchError
from keystage.bench.sender import _arrival_lag_ms
from keystage.loadgen.sending import messages
from keystage.loadgen.sending.answers import Answer, JsonAnswer, StreamAnswer
from keystage.loadgen.sending.pace import MOST_AT_ONCE, PreciseTimer, keep
from keystage.loadgen.sending.route import RouteError, route
from keystage.loadgen.sending.row import Row

TOKEN = b'data: {"choices":[{"text":" a"}]}\n\n'


@pytest.mark.parametrize(
    ("url", "line", "host", "peer"),
    [
        ("http://h/function/p/", "/function/p/", "h", ("h", 80, False)),
        ("http://h:8080", "/", "h:8080", ("h", 8080, False)),
        ("https://H.example/a b?q=1&r=%20", "/a%20b?q=1&r=%20", "h.example", ("h.example", 443, True)),
        ("http://[::1]:9/x", "/x", "[::1]:9", ("::1", 9, False)),
    ],
)
def test_heads(url: str, line: str, host: str, peer: tuple[str, int, bool]) -> None:
    made = route(url, {"Accept": "*/*"}, "times")
    assert made.head == f"POST {line} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\nContent-Length: ".encode()
    assert (made.peer.host, made.peer.port, made.peer.is_tls) == peer
    fields = dict(made.fields)
    assert (fields[b":path"], fields[b":authority"], fields[b"accept"]) == (
        line.encode(),
        host.encode(),
        b"*/*",
    )
    assert list(fields)[:4] == [b":method", b":scheme", b":authority", b":path"]


@pytest.mark.parametrize(
    ("url", "headers", "message"),
    [
        ("ftp://h/", {}, "no http"),
        ("http:///x", {}, "no http"),
        ("http://h:0x/", {}, "no address"),
        ("http://me:word@h/", {}, "holds a user or password"),
        ("http://\u00fc..x/", {}, "no address"),
        ("http://h/", {"A": "b\r\nC: d"}, "header 'A' holds a line end"),
    ],
)
def test_what_is_no_route(url: str, headers: dict[str, str], message: str) -> None:
    with pytest.raises(RouteError, match=message):
        route(url, headers, "times")


def _read(answer: Answer, status: int, *parts: tuple[bytes, float], end_s: float = 9.0) -> Row:
    answer.status = status
    for part, at_s in parts:
        answer.feed(part, at_s)
    row = Row(0, 0.0)
    answer.complete(row, end_s)
    return row


def test_what_is_read_of_answers() -> None:
    plain = _read(Answer(), 200, (b"a", 1.0), (b"b", 2.0))
    assert (plain.first_s, plain.last_s, plain.error) == (1.0, 9.0, "")
    empty = _read(Answer(), 200)
    assert (empty.first_s, empty.last_s) == (9.0, 9.0)
    refused = _read(StreamAnswer(), 500, (b"no" * 300, 1.0))
    assert refused.error == "http_500: " + "no" * 100
    assert refused.first_s is None
    told = _read(JsonAnswer(), 200, (b'{"usage":{"prompt_to', 1.0), (b'kens":3,"completion_tokens":4}}', 2.0))
    assert (told.prompt_tokens, told.output_tokens, told.error) == (3, 4, "")


def test_a_stream_has_the_moments_of_its_tokens() -> None:
    row = _read(
        StreamAnswer(), 200, (TOKEN, 1.0), (TOKEN[:9], 2.0), (TOKEN[9:], 3.0), (b"data: [DONE]\n\n", 4.0)
    )
    assert (row.first_s, row.last_s, row.output_tokens, row.error) == (1.0, 3.0, 2, "")
    cut = _read(StreamAnswer(), 200, (TOKEN, 1.0))
    assert (cut.error.partition(":")[0], cut.last_s) == ("truncated", 9.0)


def test_rows_come_back_as_they_went() -> None:
    rows = [Row(0, 0.5), Row(1, 1.5, target=3)]
    went = Row(1, 1.5, 1.6, None, 2.0, 503, None, 0, "http_503: no", 3, 2)
    content = messages.framed(messages.Rows([messages.fields(went)]))
    told = messages.told(content[messages.LENGTH.size :])
    assert isinstance(told, messages.Rows)
    assert messages.fill(rows, told.rows[0]) is rows[1]
    assert rows[1] == went


@pytest.mark.parametrize("runner", [uvloop.run, asyncio.run])
def test_nothing_is_handed_over_early_or_out_of_turn(runner: object) -> None:
    times_s = [0.0] * (3 * MOST_AT_ONCE) + [0.0201, 0.0202, 0.0203]
    handed: list[tuple[int, float]] = []

    async def run() -> float:
        start_s = time.monotonic() + 0.01
        await keep(times_s, start_s, lambda place: handed.append((place, time.monotonic())))
        await keep([], start_s, lambda place: handed.append((place, 0.0)))
        return start_s

    start_s = runner(run())  # type: ignore[operator]
    assert [place for place, _ in handed] == list(range(len(times_s)))
    assert all(at_s >= start_s + times_s[place] for place, at_s in handed)


def test_a_bug_in_sending_ends_the_run() -> None:
    def broken(_place: int) -> None:
        raise ZeroDivisionError("bug")

    with pytest.raises(ZeroDivisionError, match="bug"):
        asyncio.run(keep([0.0], time.monotonic(), broken))


def test_a_timer_rings_again_until_it_is_set_or_closed() -> None:
    async def run() -> int:
        rung = 0
        done = asyncio.Event()

        def ring() -> None:
            nonlocal rung
            rung += 1
            timer.set(0.0)  # long past: at once
            if rung == 3:
                timer.close()
                timer.close()
                done.set()

        timer = PreciseTimer(asyncio.get_running_loop(), ring)
        timer.set(time.monotonic() + 0.001)
        async with asyncio.timeout(30):
            await done.wait()
        await asyncio.sleep(0.01)
        return rung

    assert uvloop.run(run()) == 3


def test_arrival_lag_is_that_of_an_even_schedule() -> None:
    even = 5.0 + np.arange(1000) / 100
    assert _arrival_lag_ms(even, 100) == pytest.approx((0.0, 0.0, 0.0), abs=1e-6)
    late = even.copy()
    late[500] += 0.004
    assert _arrival_lag_ms(late, 100) == pytest.approx((0.0, 0.0, 4.0), abs=1e-6)
    slow = 5.0 + np.arange(1000) / 50
    assert _arrival_lag_ms(slow, 100)[2] == pytest.approx(9990.0)


def test_tools_that_are_not_here_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WRK", "HEY", "LOCUST"):
        monkeypatch.delenv(f"KEYSTAGE_{name}", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sender_rivals.rivals() == ([], ["wrk", "hey", "locust"])
    program = tmp_path / "hey"
    program.touch(0o755)
    found, absent = sender_rivals.rivals()
    assert ([tool.name for tool in found], absent) == (["hey"], ["wrk", "locust"])
    monkeypatch.setenv("KEYSTAGE_WRK", str(tmp_path / "none"))
    with pytest.raises(BenchError, match=r"KEYSTAGE_WRK=.*none: no such file"):
        sender_rivals.rivals()
