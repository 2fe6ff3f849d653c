"""A plan sent by several processes: every request once, at its time, merged; what a death costs; a stall."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.sender_world import WAIT_S, plan_of

from keystage.loadgen import app, measures, requestlog, validity
from keystage.loadgen.sending import messages, processes
from keystage.loadgen.sending.parts import PROCESS_RPS, processes_for
from keystage.loadgen.sending.route import RouteError
from keystage.loadgen.sending.row import Row
from keystage.loadgen.sending.run import Sent, prepared, run_plan
from keystage.loadgen.target import Target

SLEEP_S = 0.001
"""As much earlier an event loop may wake than it was told."""

_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers every POST on any number of connections, from an event loop in a thread of its own.

    Attributes:
        came: body and `time.monotonic()` of each request, in the order of arrival.
        stall: from the arrival of request number `stall[0]` on, it answers nobody for `stall[1]` seconds.
        stalled_s: `time.monotonic()` of the stall's beginning and end.
    """

    def __init__(self, stall: tuple[int, float] | None = None) -> None:
        self.came: list[tuple[bytes, float]] = []
        self.stall = stall
        self.stalled_s = (math.inf, math.inf)
        self._going = asyncio.Event()
        self._going.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._serve(reader, writer)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
            self.came.append((body, time.monotonic()))
            if self.stall is not None and len(self.came) == self.stall[0]:
                self._going.clear()
                begun_s = time.monotonic()
                await asyncio.sleep(self.stall[1])
                self.stalled_s = (begun_s, time.monotonic())
                self._going.set()
            await self._going.wait()
            writer.write(_OK)


@contextlib.contextmanager
def serving(server: Server) -> Iterator[str]:
    """Runs a server and yields its address."""
    address: list[str] = []
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=1024) as listening:
            address.append(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
            stop.append(lambda: loop.call_soon_threadsafe(done.set))
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(WAIT_S)
    try:
        yield address[0]
    finally:
        stop[0]()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def _poll(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 2 * WAIT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_every_request_is_sent_once_at_its_time_to_its_target() -> None:
    count = 300
    bodies = [b"%d" % index for index in range(count)]
    first, second = Server(), Server()
    ended: list[int] = []
    with serving(first) as one, serving(second) as other:
        targets = [index % 7 == 0 for index in range(count)]
        plan = plan_of(
            [0.002 * index for index in range(count)],
            bodies,
            addresses=(one, other),
            targets=list(map(int, targets)),
        )
        rows = run_plan(
            plan, Target("raw", "http://unused"), processes=3, ended=lambda row: ended.append(row.index)
        )
    assert [(row.index, row.error, row.status, row.attempts) for row in rows] == [
        (index, "", 200, 1) for index in range(count)
    ]
    assert [row.target for row in rows] == list(map(int, targets))
    assert sorted(ended) == list(range(count))
    assert {body for body, _ in second.came} == {bodies[index] for index in range(0, count, 7)}
    assert sorted(body for body, _ in first.came + second.came) == sorted(bodies)
    assert [row.scheduled_s for row in rows] == [0.002 * index for index in range(count)]
    assert all(row.sent_s >= row.scheduled_s for row in rows), "nothing is sent early"
    assert all(row.first_s is not None and row.sent_s <= row.first_s <= row.last_s for row in rows)


def test_all_processes_start_at_one_moment() -> None:
    """The server's own clock, which is the machine's: no request comes before start + scheduled time."""
    server = Server()
    times_s = [0.01 * index for index in range(60)]

    async def sent(address: str) -> tuple[float, Sent]:
        plan = plan_of(times_s, [b"%d" % index for index in range(60)])
        async with prepared(plan, Target("raw", address), processes=4) as sender:
            start_s = time.monotonic() + 0.2
            return start_s, await sender.send(start_s)

    with serving(server) as address:
        start_s, made = asyncio.run(sent(address))
    assert made.processes == 4
    came = {int(body): at_s - start_s for body, at_s in server.came}
    assert all(came[row.index] >= row.sent_s >= row.scheduled_s for row in made.rows)


def _killed(how: signal.Signals) -> tuple[Sent, Server]:
    """Two processes send for 2 s; once rows have come, the first of them gets a signal."""
    server = Server()

    async def sent(address: str) -> Sent:
        plan = plan_of([0.01 * index for index in range(200)])
        async with prepared(plan, Target("raw", address), processes=2, timeout_s=1.0) as sender:
            victim = sender.pids[0]
            struck: list[int] = []

            def ended(row: Row) -> None:
                if row.index >= 40 and not struck:
                    struck.append(row.index)
                    os.kill(victim, how)

            return await sender.send(ended=ended)

    with serving(server) as address:
        return asyncio.run(sent(address)), server


def test_a_process_that_dies_is_told_and_the_others_rows_are_kept() -> None:
    made, server = _killed(signal.SIGKILL)
    assert made.told.faults == ["sending process 1 of 2 ended early: signal SIGKILL"]
    lost = [row for row in made.rows if row.error]
    assert lost
    assert {row.error_class for row in lost} == {"generator"}
    assert {row.index % 2 for row in lost} == {0}, "only requests of the process that died"
    assert len(server.came) >= len(made.rows) - len(lost) >= 100
    assert any("generator" in reason for reason in validity.faults(made.rows, 200, 10.0))
    assert "SIGKILL" in made.notes[0]


@pytest.mark.slow
def test_a_process_that_stands_still_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_GRACE_S", 1.0)
    before = {child.pid for child in psutil.Process().children()}
    made, _ = _killed(signal.SIGSTOP)
    assert made.told.faults == ["sending did not end within 1 s after the last request's time-out"]
    assert {row.index % 2 for row in made.rows if row.error_class == "generator"} == {0}
    assert {child.pid for child in psutil.Process().children()} <= before


def test_run_plan_raises_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()

    def kill_all(row: Row) -> None:
        for child in psutil.Process().children():
            if "keystage.loadgen.sending.worker" in child.cmdline():
                child.kill()

    with serving(server) as address, pytest.raises(processes.SenderError, match="signal SIGKILL") as caught:
        run_plan(plan_of([0.0, 60.0]), Target("raw", address), ended=kill_all)
    assert [row.error_class for row in caught.value.rows] == ["", "generator"]


def test_a_worker_ends_with_its_input() -> None:
    part = messages.Part(
        np.zeros(1, np.int64).tobytes(), np.array([600.0]).tobytes(), np.zeros(1, np.int32).tobytes(),
        np.zeros(1, np.int32).tobytes(), [b"x"], ["http://127.0.0.1:1/"], {}, "times", 1.0, "1.1", 0,
    )  # fmt: skip
    for given in (b"", messages.framed(part), messages.framed(part) + messages.framed(messages.Start(1e9))):
        with subprocess.Popen(
            [sys.executable, "-m", "keystage.loadgen.sending.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as worker:
            assert worker.stdin is not None
            worker.stdin.write(given)
            worker.stdin.close()
            assert worker.wait(WAIT_S) == 0


def test_rows_that_end_all_at_once_behind_a_slow_reader_are_all_told() -> None:
    """5,000 requests fail in a moment, far more than a pipe holds, while who reads takes his time."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    def slow(row: Row) -> None:
        if row.index % 500 == 0:
            time.sleep(0.02)

    rows = run_plan(plan_of([0.0] * 5000), Target("raw", f"http://127.0.0.1:{port}"), ended=slow)
    assert {row.error_class for row in rows} == {"connect"}


def test_processes_end_behind_output_that_nobody_reads() -> None:
    """Whoever looks on breaks off while rows still pour in."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def broken_off(address: str) -> None:
        async with prepared(plan_of([0.0] * 20_000), Target("raw", address), processes=1) as sender:
            sending = asyncio.create_task(sender.send(ended=lambda _row: sending.cancel()))
            with contextlib.suppress(asyncio.CancelledError):
                await sending
            (process,) = sender._processes._processes
            while not getattr(process.stdout, "_paused"):  # noqa: B009 -- a private of asyncio
                await asyncio.sleep(0.01)

    async def bounded() -> None:
        async with asyncio.timeout(2 * WAIT_S):
            await broken_off(f"http://127.0.0.1:{port}")

    asyncio.run(bounded())


def _heeds_ctrl_c() -> None:
    """What a shell runs in the background ignores the signal, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "ending"),
    [
        (["--rate", "50"], signal.SIGINT),
        (["--closed-loop", "3"], signal.SIGINT),
        (["--rate", "50"], signal.SIGTERM),
    ],
    ids=["open", "closed", "stopped"],
)
def test_ctrl_c_leaves_what_was_measured(way: list[str], ending: signal.Signals, tmp_path: Path) -> None:
    """The server stands still from its 20th request on: what is under way then is in the files too."""
    server = Server(stall=(20, 60.0))
    with serving(server) as address:
        command = [sys.executable, "-m", "keystage.cli.main", "load", address, "--target", "raw", *way]
        with subprocess.Popen(
            [*command, "--duration", "600", "--out", str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_heeds_ctrl_c,
        ) as running:  # fmt: skip
            try:
                _poll(lambda: len(server.came) >= 20)
                workers = psutil.Process(running.pid).children(recursive=True)
                running.send_signal(ending)
                shown, complaint = running.communicate(timeout=2 * WAIT_S)
            finally:
                running.kill()
    assert running.returncode == app.EXIT_INTERRUPTED
    assert complaint.strip() == "error: interrupted"
    assert "INVALID: it was broken off after" in shown
    assert not psutil.wait_procs(workers, WAIT_S)[1]
    told = json.loads((tmp_path / "report.json").read_bytes())
    assert not told["valid"]
    rows, _ = requestlog.read(tmp_path / requestlog.FILE)
    assert sum(row.is_served for row in rows) >= 17, "of the 19 before the stall; two may be on their way"
    under_way = [row for row in rows if row.error]
    assert {row.error_class for row in under_way} <= {"generator"}
    assert bool(under_way) == (way[0] == "--rate")
    assert told["requests"]["sent"] == len(rows)


def test_processes_that_cannot_be_started_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(processes.SenderError, match="cannot be started: No such file"):
        run_plan(plan_of([0.0]), Target("raw", "http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"processes": 0}, "processes must be at least 1 or 'auto', got 0"),
        ({"retries": -1}, "retries must be at least 0, got -1"),
        ({"timeout_s": math.nan}, "timeout_s must be finite and above 0, got nan"),
        ({"http": "3"}, "http must be one of 1.1, 2, got '3'"),
    ],
)
def test_settings_out_of_bounds(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_plan(plan_of([0.0]), Target("raw", "http://127.0.0.1:1"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["ftp://h", "http://h:99999", "http://"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(RouteError, match="address"):
        run_plan(plan_of([0.0]), Target("raw", url))


@pytest.mark.parametrize(
    ("times_s", "cores", "count"),
    [
        ([], 8, 1),
        ([0.0], 8, 1),
        (np.arange(0, 2, 1 / (3 * PROCESS_RPS)), 8, 3),
        (np.arange(0, 2, 1 / (3 * PROCESS_RPS)), 2, 2),
        (np.linspace(5.0, 5.9, int(2 * PROCESS_RPS)), 8, 2),
    ],
)
def test_processes_follow_the_busiest_second(times_s: list[float], cores: int, count: int) -> None:
    assert processes_for(times_s, cores=cores) == count


def _closed_loop(address: str, is_enough: Callable[[int], bool]) -> list[float]:
    """Latencies as a closed loop of one client sees them: the next request is sent after the answer."""
    host, port = address.removeprefix("http://").split(":")
    latencies_s: list[float] = []
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        while not is_enough(len(latencies_s)):
            sent_s = time.monotonic()
            connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\nx")
            received = b""
            while len(received) < len(_OK):
                received += connection.recv(4096)
            latencies_s.append(time.monotonic() - sent_s)
    return latencies_s


@pytest.mark.slow
def test_a_stall_of_two_seconds_shows_in_p99() -> None:
    """A server stands still for 2 s while 50 requests a second are scheduled for 6 s: 300 requests.

    The stall begins at the moment T at which request number 101 arrives (scheduled at 2.00 s, never sent
    early) and lasts d >= 2 s. Number 101 waits d. The requests scheduled after T are 0.02 s apart, so the
    j-th of them is scheduled at T + 0.02 j at the latest and waits d - 0.02 j at least, for j up to 100. So
    the k-th largest latency is at least 2 - 0.02 (k - 1). Nearest-rank p99 of 300 is the 297th smallest, the
    4th largest: at least 1.94 s. p90 is the 31st largest, at least 1.40 s.

    A closed loop of one client sends nothing while it waits, so that one request of all its requests has met
    the stall: with 150 of them p99 is the 2nd largest, one that did not. It reports a server without a stall.
    """
    server = Server(stall=(101, 2.0))
    with serving(server) as address:
        rows = run_plan(plan_of([0.02 * index for index in range(300)]), Target("raw", address), processes=2)
    assert not any(row.error for row in rows)
    told = measures.latencies(rows)
    assert told.p99 is not None
    assert told.p90 is not None
    assert told.p99 >= 1.94 - SLEEP_S
    assert told.p90 >= 1.40 - SLEEP_S
    late = sorted((measures.latency_s(row) for row in rows), reverse=True)
    assert all(late[k - 1] >= 2.0 - 0.02 * (k - 1) - SLEEP_S for k in range(1, 101))

    server = Server(stall=(75, 2.0))
    with serving(server) as address:
        closed = measures.percentiles(_closed_loop(address, lambda count: count >= 150))
    assert closed.max is not None
    assert closed.p99 is not None
    assert closed.max >= 2.0
    assert closed.p99 < 1.0 < told.p90, "the closed loop hides it"
