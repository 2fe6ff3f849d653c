"""Processes that the kernel gives to a subreaper: adopted, reaped, and never taken from anybody else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keystage.local.adopted import Orphans, children, reap, subreaper
from keystage.local.logs import ReplicaLog
from keystage.local.process import Process

DAEMON = """
import os, sys, time
# A double fork: the grandchild outlives the middle, whose end gives it to the subreaper.
told, tell = os.pipe()
middle = os.fork()
if middle == 0:
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        sys.stdout.write("hello\\n"); sys.stdout.flush()
        os.read(int(sys.argv[2]), 1)
        {end}
    os.write(tell, b"%d" % pid)
    os._exit(0)
os.waitpid(middle, 0)
os.write(int(sys.argv[1]), os.read(told, 32))  # the replica's parent is the subreaper by now
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def adopts() -> Iterator[None]:
    with subreaper():
        yield


class Daemon:
    """A process in a session of its own that forks one replica for us."""

    def __init__(self, end: str) -> None:
        pid_read, pid_write = os.pipe()
        self.output, output_write = os.pipe()
        lifeline, self.owner_end = os.pipe()
        self.popen = subprocess.Popen(
            [sys.executable, "-c", DAEMON.replace("{end}", end), str(pid_write), str(lifeline)],
            pass_fds=(pid_write, lifeline),
            stdout=output_write,
            start_new_session=True,
        )
        for fd in (pid_write, output_write, lifeline):
            os.close(fd)
        self.replica = int(os.read(pid_read, 32))
        os.close(pid_read)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.005)


def is_dead(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os._exit(7)", "exit code 7: hello"),
        ("os.kill(os.getpid(), 15); time.sleep(60)", "killed by SIGTERM: hello"),
    ],
)
def test_adopted_process_is_followed_to_its_end(tmp_path: Path, end: str, how: str) -> None:
    daemon = Daemon(end)
    daemon.end()  # its end does not touch the replica

    async def run() -> str:
        pid = daemon.replica
        log = ReplicaLog(tmp_path / "r.log")
        process = Process(pid, "", log, daemon.output, lambda: reap(pid), None)
        following = asyncio.create_task(process.wait(time.time))
        while not log.last:
            await asyncio.sleep(0.005)
        assert process.alive
        os.close(daemon.owner_end)
        said = await asyncio.wait_for(following, 20.0)
        assert not process.alive
        return said

    assert asyncio.run(run()) == how
    assert daemon.replica not in children()


def test_process_that_is_dead_and_reaped_already_is_no_endless_wait(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    read_end, write_end = os.pipe()
    os.close(write_end)

    async def run() -> str:
        log = ReplicaLog(tmp_path / "r.log")
        process = Process(gone.pid, "", log, read_end, lambda: reap(gone.pid), None)
        return await asyncio.wait_for(process.wait(time.time), 20.0)

    assert asyncio.run(run()) == "ended, nobody knows how"


def test_orphans_of_a_daemon_are_reaped_and_nobody_elses_exit_is_taken() -> None:
    known: set[int] = set()
    orphans = Orphans(lambda: known)
    daemon = Daemon("os._exit(0)")
    other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"], process_group=0)
    own_session = subprocess.Popen([sys.executable, "-c", "raise SystemExit(6)"], start_new_session=True)
    orphans.add_session(daemon.popen.pid)
    daemon.end()
    assert orphans.reap() == 1  # lives, and is left alone
    os.close(daemon.owner_end)
    until(lambda: is_dead(daemon.replica) and is_dead(other.pid) and is_dead(own_session.pid))
    known.add(daemon.replica)
    assert orphans.reap() == 0
    assert daemon.replica in children()  # somebody waits for it
    known.clear()
    assert orphans.reap() == 0
    assert daemon.replica not in children()
    assert (other.wait(), own_session.wait()) == (5, 6)
    os.close(daemon.output)


def test_the_end_kills_what_lives_of_a_daemons_session_only() -> None:
    orphans = Orphans(tuple)
    daemon = Daemon("os._exit(0)")
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0)
    orphans.add_session(daemon.popen.pid)
    daemon.end()
    orphans.end()
    assert daemon.replica not in children()
    assert other.poll() is None
    other.communicate(b"\n", timeout=20)
    assert other.returncode == 0
    os.close(daemon.owner_end)
    os.close(daemon.output)


def test_a_replica_that_died_before_it_was_ours_is_reaped_by_number() -> None:
    daemon = Daemon("os._exit(3)")
    os.close(daemon.owner_end)
    until(lambda: is_dead(daemon.replica))
    assert reap(daemon.replica) == 3
    assert reap(daemon.replica) is None
    daemon.end()
    os.close(daemon.output)


def test_the_setting_holds_until_the_last_one_leaves() -> None:
    with subreaper(), subreaper():
        pass
    daemon = Daemon("os._exit(4)")
    daemon.end()
    assert daemon.replica in children()  # the fixture is inside still
    os.close(daemon.owner_end)
    until(lambda: is_dead(daemon.replica))
    assert reap(daemon.replica) == 4
    os.close(daemon.output)
