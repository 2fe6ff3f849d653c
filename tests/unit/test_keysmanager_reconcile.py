"""What is believed against what runs, on tables and on real processes."""

from __future__ import annotations

import os
import subprocess
import sys

from keystage.keysmanager import proc_children
from keystage.keysmanager.events import HolderGone, StandbyGone
from keystage.keysmanager.reconcile import Actual, Believed, Memo, reconcile

SERVER = Believed("fork-server", "", 10)
HOLDER = Believed("holder", "abc", 11)
STANDBY = Believed("standby", "7", 12)


def running(*pids: int, zombies: tuple[int, ...] = (), started: int = 5) -> dict[int, Actual]:
    return {pid: Actual(pid, started, pid in zombies) for pid in (*pids, *zombies)}


def test_all_as_believed() -> None:
    found = reconcile((SERVER, HOLDER, STANDBY), running(10, 11, 12), Memo())
    assert (found.events, found.is_fork_server_gone, found.kill) == ((), False, ())
    assert found.memo == Memo({10: 5, 11: 5, 12: 5}, {})


def test_deaths_nobody_told() -> None:
    found = reconcile((SERVER, HOLDER, STANDBY), running(zombies=(11,)), Memo())
    assert found.events == (
        HolderGone("abc", "process 11 has ended"),
        StandbyGone(7, "process 12 is not there"),
    )
    assert found.is_fork_server_gone
    assert found.kill == ()


def test_a_number_given_to_another_process_is_a_death() -> None:
    memo = reconcile((HOLDER,), running(11), Memo()).memo
    found = reconcile((HOLDER,), running(11, started=6), memo)
    assert found.events == (HolderGone("abc", "process 11 ended, and its number was given to another"),)
    assert found.kill == ()


def test_a_stray_is_killed_when_it_is_found_twice() -> None:
    first = reconcile((SERVER,), running(10, 99), Memo())
    assert first.kill == ()
    assert reconcile((SERVER,), running(10, 99), first.memo).kill == (99,)
    assert reconcile((SERVER,), running(10, 99, started=6), first.memo).kill == ()


def test_nothing_is_killed_while_a_fork_is_under_way() -> None:
    first = reconcile((SERVER,), running(10, 99), Memo())
    second = reconcile((SERVER,), running(10, 99), first.memo, forking=1)
    assert second.kill == ()
    third = reconcile((SERVER,), running(10, 99), second.memo)
    assert third.kill == ()
    assert reconcile((SERVER,), running(10, 99), third.memo).kill == (99,)


def test_processes_of_others_are_never_killed() -> None:
    actual = {99: Actual(99, 5, is_ours=False)}
    memo = reconcile((), actual, Memo()).memo
    assert reconcile((), actual, memo).kill == ()


def test_real_descendants_are_seen_zombies_told_and_strangers_only_when_asked_for() -> None:
    script = (
        "import os, sys\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.read(0, 1); os._exit(0)\n"
        "dead = os.fork()\n"
        "if dead == 0:\n"
        "    os._exit(0)\n"
        "os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)\n"
        "print(child, dead, flush=True)\n"
        "os.read(0, 1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child, dead = map(int, parent.stdout.readline().split())
        found = proc_children.read(os.getpid())
        assert {parent.pid, child, dead} <= found.keys()
        assert (found[child].is_zombie, found[dead].is_zombie) == (False, True)
        below = proc_children.read(parent.pid, asked=[os.getpid(), 2**22 + 1])
        assert below.keys() == {child, dead, os.getpid()}
        assert (below[child].is_ours, below[os.getpid()].is_ours) == (True, False)
        assert parent.stdin is not None
        parent.stdin.close()
