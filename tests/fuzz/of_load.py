"""Targets of the load generator: traces and plans, logs and reports, and the answers that it measures."""

from __future__ import annotations

import asyncio
import itertools
import socket
from pathlib import Path
from typing import Any

import msgspec

from fuzz.target import UNREADABLE, FuzzError, Ready

MOST_ROWS = 2000


def traces(scratch: Path) -> Ready:
    """Every kind of trace file, told by its first line, plain or compressed; times ascend."""
    import gzip

    from support.traces import GOOD

    from keystage.loadgen.trace_lines import TraceError
    from keystage.loadgen.traces.opening import open_trace

    file = scratch / "trace.csv"

    def run(data: bytes) -> None:
        file.write_bytes(data)
        trace = open_trace(file)
        last_s = 0.0
        for one in itertools.islice(trace.invocations(seed=1), MOST_ROWS):
            if not last_s <= one.at_s < float("inf"):
                raise FuzzError(f"{one.at_s} s behind {last_s} s")
            last_s = one.at_s

    plain = tuple(text.encode() for text in GOOD.values())
    return Ready(run, (TraceError,), (*plain, *(gzip.compress(text, mtime=0) for text in plain)))


def joined_traces(scratch: Path) -> Ready:
    """The files beside a day of the 2019 trace, and the plain reader of the simulator."""
    from support.traces import COUNTS_2019, DURATIONS_2019, MEMORY_2019, REQUESTS_AZURE

    from keystage.loadgen import trace
    from keystage.loadgen.trace_lines import TraceError
    from keystage.loadgen.traces.opening import open_trace

    counts, beside = scratch / "counts.csv", scratch / "beside.csv"
    counts.write_text(COUNTS_2019)

    def run(data: bytes) -> None:
        beside.write_bytes(data)
        for given in ({"durations": beside}, {"memory": beside}, {}):
            try:
                if given:
                    list(itertools.islice(open_trace(counts, **given).invocations(seed=1), MOST_ROWS))
                else:
                    list(itertools.islice(trace.read(beside), MOST_ROWS))
            except TraceError:
                continue

    seeds = (DURATIONS_2019, MEMORY_2019, REQUESTS_AZURE)
    return Ready(run, (), tuple(text.encode() for text in seeds))


def plans(scratch: Path) -> Ready:
    """What the command line takes: arrivals, files of gaps, mappings, places within a minute."""
    from keystage.loadgen.arrivals import ArrivalError
    from keystage.loadgen.arrivals_files import read_gaps
    from keystage.loadgen.arrivals_spec import parse
    from keystage.loadgen.mapping import MappingError, mapping
    from keystage.loadgen.traces.within import parse_within

    file = scratch / "file"

    def run(data: bytes) -> None:
        file.write_bytes(data)
        text = data.decode("utf-8", "replace")
        for read, given in (
            (parse, text),
            (read_gaps, file),
            (mapping, [str(file)]),
            (mapping, [text]),
            (parse_within, text),
        ):
            try:
                read(given)
            except (ArrivalError, MappingError, ValueError):
                continue

    seeds = (
        b"poisson", b"gamma,cv=4", b"mmpp:low=1,high=10,hold=3", b"gamma,cv=2*steps:1,2,4;every=10",
        b"replay:FILE",
        b"0.1\n0.25\n# a\n1e-3\n", b"a/f,smollm2\n", b"hash:a,b", b"strict", b"even", b"gamma:3",
        b"diurnal:period=60",
    )  # fmt: skip
    return Ready(run, (), seeds)


def runs(scratch: Path) -> Ready:
    """What `keystage compare` reads: a report and its log of requests."""
    from support.load_reports import assembled, rows

    from keystage.loadgen import compare, report, requestlog

    good, other = scratch / "good", scratch / "other"
    for folder in (good, other):
        folder.mkdir(exist_ok=True)
    made = rows(1, 40)
    report.write(assembled(made), good)
    one = compare.load(good)

    def run(data: bytes) -> None:
        names = (report.FILE, requestlog.FILE)
        for name in names:
            (other / name).write_bytes((good / name).read_bytes())
        (other / names[0 if b'"version"' in data[:40] else 1]).write_bytes(data)
        found = compare.load(other)
        compare.objections(one, found)
        if not found.side.span_s > 0:
            raise FuzzError(f"{found.side.span_s} s")

    log = b"".join(msgspec.json.encode(row) + b"\n" for row in made[:3])
    return Ready(run, (compare.CompareError,), ((good / report.FILE).read_bytes(), log, log[:-5]))


def answers(scratch: Path) -> Ready:
    """Event streams and JSON answers of a server, cut anywhere, whole and broken off."""
    from keystage.loadgen.sending.answers import JsonAnswer, StreamAnswer
    from keystage.loadgen.sending.row import Row
    from keystage.loadgen.sse import EventParser

    def run(data: bytes) -> None:
        width, body = max(1, (data[:1] or b"\1")[0]), data[1:]
        parts = [body[at : at + width] for at in range(0, len(body), width)]
        for kind in (StreamAnswer, JsonAnswer):
            answer = kind()
            answer.status = 200
            for at, part in enumerate(parts):
                answer.feed(part, float(at))
            row = Row(0, 0.0)
            answer.broken(row, 9.0)
            answer.complete(row, 9.0)
            msgspec.json.encode(row)
        whole, cut = EventParser(), EventParser()
        together = whole.feed(body)
        apart = [event for part in parts for event in cut.feed(part)]
        if together != apart:
            raise FuzzError(f"{together!r} in one piece, {apart!r} in parts")

    chunk = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
    seeds = (
        b"\7" + chunk + b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1}}\r\n\r\n'
        b"data: [DONE]\n\n",
        b"\1: c\r\rdata:a\rdata: b\r\r", b'\xffdata: {"error":{"message":"no"}}\n\n',
        b'\x20{"tokens":3,"usage":{"completion_tokens":4},"segments":[{"tokens":[1,2]}]}',
    )  # fmt: skip
    return Ready(run, (), seeds)


class _Outcomes:
    """Notes how an exchange went."""

    def __init__(self) -> None:
        self.start_s = 0.0
        self.ended: list[str] = []

    def answered(self, exchange: Any, now_s: float) -> None:
        """See `Outcomes`."""
        exchange.answer.complete(exchange.row, now_s)
        self.ended.append("")

    def failed(self, exchange: Any, error: str, *, processed: bool = True) -> None:
        """See `Outcomes`."""
        self.ended.append(error)


def connections(scratch: Path) -> Ready:
    """An HTTP answer as the load generator's own connection reads it, and messages of its agents."""
    from keystage.loadgen.sending import messages
    from keystage.loadgen.sending.answers import StreamAnswer
    from keystage.loadgen.sending.exchange import Exchange
    from keystage.loadgen.sending.http1 import Http1Connection
    from keystage.loadgen.sending.route import Peer, Route
    from keystage.loadgen.sending.row import Row

    loop = asyncio.new_event_loop()
    route = Route(Peer("h", 80, False), b"POST / HTTP/1.1\r\nContent-Length: ", (), StreamAnswer)

    async def ask(data: bytes) -> list[str]:
        outcomes, gone = _Outcomes(), asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            _, connection = await loop.connect_accepted_socket(
                lambda: Http1Connection(
                    outcomes, lambda _c: None, lambda _c: gone.done() or gone.set_result(None)
                ),
                ours,
            )
            connection.carry(Exchange(Row(0, 0.0), b"x", route, 9.0))
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            await gone
        return outcomes.ended

    def run(data: bytes) -> None:
        if len(loop.run_until_complete(ask(data))) != 1:
            raise FuzzError("an exchange ends once")
        for read in (messages.agent_asked, messages.agent_told):
            try:
                read(data)
            except UNREADABLE:
                continue

    seeds = (
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na",
        b"HTTP/1.1 103 x\r\n\r\nHTTP/1.0 200 x\r\n\r\ndata: [DONE]\n\n",
    )
    return Ready(
        run, (), (*seeds, messages.encoded(messages.WhatTime()), messages.encoded(messages.Refused("a")))
    )
