"""The fork server with real forks: what it proves before, and how clean its children are."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.keysmanager_forks import WAIT_S, Forks, Replica, open_fds, receive
from support.processes import wait_for

from keystage.keysmanager.api import Ok, Progress, Refused, Spawn, Spawned
from keystage.keysmanager.fork_check import ForkError, check_forkable, has_cuda, tasks
from keystage.keysmanager.forkserver import PRELOADED, PRELOADED_FOR_GPUS, has_kernels_for_gpus

THREADED = """
import socket, sys, threading, time
threading.Thread(target=time.sleep, args=(1000,), name="second", daemon=True).start()
from keystage.keysmanager import forkserver
from keystage.keysmanager.channel import Channel
sys.exit(forkserver.serve(Channel(socket.socket(fileno=int(sys.argv[1])))))
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as running:
        yield running


def stat(pid: int) -> str:
    """State letter of a process, empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


def test_the_fork_server_has_imported_everything_and_forks_all_the_same(forks: Forks) -> None:
    """That it forks proves one task; that its child has no CUDA, that it had none."""
    replica = forks.spawn()
    wanted = {*PRELOADED, *(PRELOADED_FOR_GPUS if has_kernels_for_gpus() else ())}
    assert wanted <= set(replica.ask("modules"))
    assert replica.ask("has_cuda") is False
    assert replica.ask("facts")["bad_cuda"] is False


def test_a_second_thread_is_named_and_nothing_is_forked() -> None:
    stop = threading.Event()
    second = threading.Thread(target=stop.wait)
    second.start()
    try:
        with pytest.raises(ForkError, match=r"\d+ tasks are running .* 1 is allowed"):
            check_forkable()
        assert len(tasks()) >= 2
        assert not has_cuda()
    finally:
        stop.set()
        second.join()


def test_a_fork_server_with_a_second_thread_refuses_every_fork() -> None:
    with Forks(program=THREADED) as threaded:
        for _ in range(2):
            replica, answer = threaded.try_spawn()
            assert isinstance(answer, Refused)
            assert "fork refused: 2 tasks are running" in answer.reason
            assert replica.claim.receive() is None  # nobody holds the other end
        children = Path(f"/proc/{threaded.process.pid}/task/{threaded.process.pid}/children").read_text()
        assert children == ""


def test_a_child_has_only_what_it_was_given(forks: Forks) -> None:
    replica = forks.spawn(KEYSTAGE_THREADS="2", OTHER="x")
    facts = replica.ask("facts")
    # 3 lifeline, 4 HTTP socket, 5 claim; the listing itself is open while it is read.
    found = {int(fd): target for fd, target in facts["fds"].items() if not target.endswith("/fd")}
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    assert found[0] == "/dev/null"
    assert found[1] == found[2] == str(Path(f"/proc/self/fd/{replica.output}").readlink())
    assert found[3] == str(Path(f"/proc/self/fd/{replica.lifeline}").readlink())
    assert facts["env"] == {
        "KEYSTAGE_THREADS": "2",
        "OTHER": "x",
        "KEYSTAGE_LIFELINE_FD": "3",
        "KEYSTAGE_HTTP": "fd://4",
    }
    assert facts["group"] == facts["pid"] == replica.pid
    assert facts["threads"] == 2
    assert facts["name"] == f"ks:{replica.name}"
    assert facts["argv"] == ["support.keysmanager_probe", replica.name]
    assert facts["tasks"] >= 2  # with its own lifeline watcher, and what torch starts for 2 threads
    assert facts["bad_cuda"] is False
    assert receive(replica.claim) == Progress(
        phase="forked", at_s=pytest.approx(time.monotonic(), abs=WAIT_S)
    )


def test_a_child_belongs_to_the_subreaper_and_only_it(forks: Forks) -> None:
    replica = forks.spawn()
    assert replica.ask("facts")["parent"] == os.getpid()
    os.kill(replica.pid, signal.SIGKILL)
    assert replica.wait() == -signal.SIGKILL
    # The process in the middle left no zombie with the fork server.
    server = forks.process.pid
    assert Path(f"/proc/{server}/task/{server}/children").read_text() == ""


def test_siblings_draw_different_numbers(forks: Forks) -> None:
    draws = [forks.spawn().ask("facts")["draws"] for _ in range(3)]
    for numbers in zip(*draws, strict=True):
        assert len(set(numbers)) == 3


def test_output_and_log_go_where_the_child_was_told(forks: Forks) -> None:
    one, two = forks.spawn(), forks.spawn()
    one.ask("say", "from one")
    two.ask("say", "from two")
    assert one.said() == "from one\nfrom one\n"
    assert two.said() == "from two\nfrom two\n"


@pytest.mark.parametrize(
    ("question", "code", "word"), [(("end", 7), 7, ""), (("crash",), 1, "asked to crash")]
)
def test_the_exit_code_is_that_of_main(forks: Forks, question: tuple[object], code: int, word: str) -> None:
    replica = forks.spawn()
    with pytest.raises(AssertionError, match=f"has ended.*{word}"):  # with what it said last
        replica.ask(*question)
    assert replica.wait() == code
    replica.pid = 0


def test_end_of_the_lifeline_ends_the_child(forks: Forks) -> None:
    replica = forks.spawn()
    replica.ask("facts")
    os.close(replica.lifeline)
    assert replica.wait() == 1
    replica.pid = 0
    assert receive_end(replica)


def receive_end(replica: Replica) -> bool:
    """Whether the claim reads end of file after what was told."""
    while (received := replica.claim.receive()) is not None:
        assert isinstance(received[0], Progress)
    return True


def test_a_module_that_is_none_is_refused_by_name(forks: Forks) -> None:
    for module, word in (("support.nowhere", "support.nowhere"), ("json", "json has no main")):
        replica, answer = forks.try_spawn(module=module)
        assert isinstance(answer, Refused)
        assert word in answer.reason
        assert replica.claim.receive() is None
    _, answer = forks.try_spawn(KEYSTAGE_THREADS="many")
    assert isinstance(answer, Refused)
    assert "KEYSTAGE_THREADS='many'" in answer.reason


def test_what_is_no_spawn_or_lacks_descriptors_is_refused_and_the_server_goes_on(forks: Forks) -> None:
    forks.channel.send(Ok())
    answer = receive(forks.channel)
    assert isinstance(answer, Refused)
    assert "Ok is not for a forker" in answer.reason
    forks.channel.send(Spawn(replica="few", module="m", env={}), (0, 1))
    answer = receive(forks.channel)
    assert isinstance(answer, Refused)
    assert "2 descriptors, 4 are expected" in answer.reason
    forks.process.send_signal(signal.SIGINT)  # as from a terminal
    forks.channel.sock.send(b"garbage")
    answer = receive(forks.channel)
    assert isinstance(answer, Refused)
    assert "malformed" in answer.reason
    assert forks.spawn().ask("facts")["parent"] == os.getpid()


def test_replicas_outlive_the_fork_server_and_sockets_do_not_leak() -> None:
    with Forks() as mortal:
        one, two = mortal.spawn(), mortal.spawn()
        mortal.channel.send(Ok())
        assert isinstance(receive(mortal.channel), Refused)  # by now it has closed what it passed on
        before = open_fds(mortal.process.pid)
        three = mortal.spawn()
        # The fork server keeps nothing of what it passes on.
        wait_for(lambda: open_fds(mortal.process.pid) == before, f"its descriptors are {before} again")
        mortal.process.kill()
        mortal.process.wait(WAIT_S)
        for replica in (one, two, three):
            assert replica.ask("facts")["parent"] == os.getpid()
        os.kill(two.pid, signal.SIGKILL)
        two.wait()
        two.pid = 0
        # The sibling forked later holds no end of the dead one's sockets.
        assert receive_end(two)
        assert stat(three.pid) != ""


def test_spawned_carries_the_pid_that_the_child_has(forks: Forks) -> None:
    replica, answer = forks.try_spawn()
    assert answer == Spawned(replica.ask("facts")["pid"])
