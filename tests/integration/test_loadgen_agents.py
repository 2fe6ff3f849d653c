"""A plan sent by agents (`keystage load-agent`): merged rows, clocks, the secret, what a lost agent costs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from support.scripted_upstream import Upstream, head
from support.sender_world import WAIT_S, plan_of

from keystage.loadgen import app
from keystage.loadgen.options import LoadOptions
from keystage.loadgen.sending import fleet, messages
from keystage.loadgen.sending.agent import PATH
from keystage.loadgen.sending.fleet import prepared_on
from keystage.loadgen.sending.parts import Manner
from keystage.loadgen.sending.processes import SenderError
from keystage.loadgen.sending.row import Row
from keystage.loadgen.sending.run import Sent
from keystage.loadgen.target import Target

SECRET = "a secret of enough bytes"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    return path


@contextlib.contextmanager
def agents(secret_file: Path, count: int) -> Iterator[list[tuple[str, int]]]:
    """Runs agents and yields address and pid of each."""
    command = [sys.executable, "-m", "keystage.cli.main", "load-agent", "--port", "0", "--secret-file"]
    running = [
        subprocess.Popen([*command, str(secret_file)], stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        found = []
        for process in running:
            assert process.stdout is not None
            told = re.search(r"listens on (\S+)", process.stdout.readline())
            assert told is not None
            found.append((f"http://{told[1]}", process.pid))
        yield found
    finally:
        for process in running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(WAIT_S)
            if process.stdout is not None:
                process.stdout.close()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        told = await head(reader)
        size = int(told.lower().split(b"content-length: ")[1].split()[0])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + await reader.readexactly(size))


@pytest.mark.slow
def test_two_agents_send_a_plan(secret_file: Path) -> None:
    async def sent(places: list[str]) -> tuple[Sent, list[int]]:
        ended: list[int] = []
        async with Upstream(_echo).run() as address:
            plan = plan_of([0.004 * index for index in range(201)])
            target = Target("raw", f"http://{address}")
            async with prepared_on(places, SECRET, plan, target, processes=2) as prepared:
                return await prepared.send(ended=lambda row: ended.append(row.index)), ended

    with agents(secret_file, 2) as found:
        made, ended = asyncio.run(sent([address for address, _ in found]))
        again, _ = asyncio.run(sent([found[0][0]]))  # an agent is free again after a run
    assert made.told.faults == again.told.faults == []
    assert made.processes == 4
    assert [(row.index, row.status, row.error) for row in made.rows] == [(k, 200, "") for k in range(201)]
    assert sorted(ended) == list(range(201))
    assert all(row.sent_s >= row.scheduled_s for row in made.rows)
    notes = [note for note in made.notes if "its clock was known to" in note]
    assert len(notes) == 2, "each agent's clock is told"


@pytest.mark.slow
def test_an_agent_that_is_lost_is_told_and_the_others_rows_are_kept(secret_file: Path) -> None:
    senders: list[psutil.Process] = []

    async def sent(places: list[str], victim: int) -> Sent:
        async with Upstream(_echo).run() as address:
            plan = plan_of([0.01 * index for index in range(200)])
            target = Target("raw", f"http://{address}")
            async with prepared_on(places, SECRET, plan, target, manner=Manner(timeout_s=1.0)) as prepared:
                struck: list[int] = []

                def ended(row: Row) -> None:
                    if row.index >= 40 and not struck:
                        struck.append(row.index)
                        senders.extend(psutil.Process(victim).children())
                        os.kill(victim, signal.SIGKILL)

                return await prepared.send(ended=ended)

    with agents(secret_file, 2) as found:
        made = asyncio.run(sent([address for address, _ in found], found[0][1]))
    assert senders
    assert not psutil.wait_procs(senders, WAIT_S)[1], "its sending processes end with it"
    (fault,) = made.told.faults
    assert fault.startswith(f"agent {found[0][0]}: the connection ended")
    lost = [row for row in made.rows if row.error]
    assert {row.error_class for row in lost} == {"generator"}
    assert {row.index % 2 for row in lost} == {0}


@pytest.mark.slow
def test_an_agent_that_falls_silent_is_not_waited_for(
    secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still with its connection open, as a machine does that lost its network."""
    monkeypatch.setattr(fleet, "SILENCE_S", 3.0)

    async def sent(places: list[str], victim: int) -> Sent:
        async with Upstream(_echo).run() as address:
            plan, target = plan_of([0.01 * index for index in range(200)]), Target("raw", f"http://{address}")
            manner = Manner(timeout_s=600.0)
            async with (
                prepared_on(places, SECRET, plan, target, manner=manner) as prepared,
                asyncio.timeout(60),
            ):
                return await prepared.send(
                    ended=lambda row: os.kill(victim, signal.SIGSTOP) if row.index == 40 else None
                )

    with agents(secret_file, 2) as found:
        made = asyncio.run(sent([address for address, _ in found], found[0][1]))
    assert made.told.faults == [
        f"agent {found[0][0]}: no word for 3 s: it, its machine or its network is lost"
    ]
    assert {row.index % 2 for row in made.rows if row.error} == {0}
    assert not any(row.error for row in made.rows if row.index % 2), "the others' rows are kept"


@pytest.mark.slow
def test_an_agent_says_something_while_no_request_ends(
    secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "SILENCE_S", 2.0)

    async def sent(places: list[str]) -> Sent:
        async with Upstream(_echo).run() as address:
            target = Target("raw", f"http://{address}")
            async with prepared_on(places, SECRET, plan_of([0.0, 4.0]), target) as prepared:
                return await prepared.send()

    with agents(secret_file, 1) as found:
        assert asyncio.run(sent([found[0][0]])).told.faults == []


def test_who_does_not_know_the_secret_sends_nothing(secret_file: Path) -> None:
    async def sent(place: str, secret: str) -> None:
        async with prepared_on([place], secret, plan_of([0.0]), Target("raw", "http://127.0.0.1:1")):
            raise AssertionError("it was let in")

    with agents(secret_file, 1) as found, pytest.raises(SenderError, match="the secret is another"):
        asyncio.run(sent(found[0][0], "another secret of that size"))
    with pytest.raises(SenderError, match="cannot be reached"):
        asyncio.run(sent(found[0][0], SECRET))


def test_one_run_at_a_time(secret_file: Path) -> None:
    async def both(place: str) -> None:
        plan, target = plan_of([0.0]), Target("raw", "http://127.0.0.1:1")
        async with (
            prepared_on([place], SECRET, plan, target),
            prepared_on([place], SECRET, plan, target),
        ):
            raise AssertionError("it was let in")

    with agents(secret_file, 1) as found, pytest.raises(SenderError, match="a run is under way"):
        asyncio.run(both(found[0][0]))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (messages.encoded(messages.Begin(0.0, 1.0)), "no part is here, or it is being sent"),
        (
            messages.encoded(
                messages.Prepare(
                    messages.Part(b"", b"odd", b"", b"", [], [], {}, "times", 1.0, "1.1", 0), None
                )
            ),
            "buffer size must be a multiple of element size",
        ),
        (b"rubbish", "not understood: "),
    ],
    ids=["begin-first", "odd-part", "rubbish"],
)
def test_what_an_agent_cannot_do_is_refused_in_words(secret_file: Path, asked: bytes, reason: str) -> None:
    async def told(place: str) -> bytes:
        login = {"Authorization": f"Bearer {SECRET}"}
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(place + PATH, headers=login) as socket,
        ):
            await socket.send_bytes(asked)
            answer = await socket.receive(WAIT_S)
            assert isinstance(answer.data, bytes), answer
            return answer.data

    with agents(secret_file, 1) as found:
        answer = messages.agent_told(asyncio.run(told(found[0][0])))
    assert isinstance(answer, messages.Refused)
    assert reason in answer.reason


def test_the_command_and_its_report(secret_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def replayed(place: str) -> int:
        async with Upstream(_echo).run() as address:
            options = LoadOptions(
                url=f"http://{address}", target="raw", rate_rps=40.0, duration_s=0.5, out=None,
                timeout_s=20.0, agents=(place,), agent_secret=secret_file,
            )  # fmt: skip
            return await asyncio.to_thread(app.load, options)

    with agents(secret_file, 1) as found:
        assert asyncio.run(replayed(found[0][0])) in (app.EXIT_OK, app.EXIT_INVALID)
    shown = capsys.readouterr().out
    assert "served 20" in shown
    assert "its clock was known to" in " ".join(shown.split())


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_text("short")
    command = [sys.executable, "-m", "keystage.cli.main", "load-agent", "--port", "0", "--secret-file"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "at least 16 bytes, got 5" in done.stderr
    assert "Traceback" not in done.stderr
