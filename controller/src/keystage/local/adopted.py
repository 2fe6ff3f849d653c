"""Processes that others forked and the kernel gave to us: become their parent, and reap them.

A KeysManager forks replicas twice, so that their parent is the nearest *child subreaper* above it: us.
`local.node` wraps those we asked for in a `Process`; `Orphans` takes care of the rest (a fork server
or holders whose daemon died, idle standbys, replicas whose start was given up). What came from a
daemon is told by its session, which a dead process keeps until it is reaped: the exit of a process
that anybody here started is never taken away.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
REPARENT_TRIES = 20
REPARENT_PAUSE_S = 0.01
"""A replica may die before the child between it and its forker, whose end makes it ours: microseconds."""
END_WAIT_S = 2.0


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Makes this process the parent of orphaned descendants while inside; may be nested.

    Raises:
        OSError: the kernel refuses.
    """
    with _lock:
        _depth.append(_get_subreaper())
        _set_subreaper(on=True)
    try:
        yield
    finally:
        with _lock:
            was_on = _depth[0]
            _depth.pop()
            if not _depth:
                _set_subreaper(on=was_on)


_depth: list[bool] = []
"""What the setting was at every entry; the process has one, and the first entry's is restored."""
_lock = threading.Lock()
_libc = ctypes.CDLL(None, use_errno=True)


def _set_subreaper(*, on: bool) -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(on))


def _get_subreaper() -> bool:
    value = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return bool(value.value)


def _prctl(option: int, argument: object) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option} (child subreaper): {os.strerror(number)}")


def reap(pid: int) -> int | None:
    """Waits for a dead process that was given to us.

    Returns:
        Its exit code, minus the signal that ended it; None when it is no child of ours (any longer).
    """
    for _ in range(REPARENT_TRIES):
        try:
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            if not psutil.pid_exists(pid):
                return None
            result = None
        if result is not None:
            return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        time.sleep(REPARENT_PAUSE_S)
    return None


class _Child(NamedTuple):
    pid: int
    is_dead: bool
    session: int


class Orphans:
    """Descendants of daemons that became our children and are not replicas.

    Args:
        known: process ids that somebody here waits for.
    """

    def __init__(self, known: Callable[[], Collection[int]]) -> None:
        self._known = known
        self._sessions: set[int] = set()

    def add_session(self, pid: int) -> None:
        """A daemon was started as the leader of a session."""
        self._sessions.add(pid)

    def reap(self) -> int:
        """Reaps those that are dead; answers how many others live."""
        living = 0
        for child in self._children():
            if child.is_dead:
                _take(child.pid)
            else:
                living += 1
        return living

    def end(self) -> None:
        """Kills all of them and reaps them, for at most `END_WAIT_S`; says what lives longer."""
        deadline_s = time.monotonic() + END_WAIT_S
        while True:
            for child in self._children():
                os.kill(child.pid, signal.SIGKILL)  # ours, so the number cannot be another's
            if not self.reap():
                return
            if time.monotonic() > deadline_s:
                left = ", ".join(str(child.pid) for child in self._children())
                log.warning("still alive %g s after SIGKILL, left behind: %s", END_WAIT_S, left)
                return
            time.sleep(0.01)

    def _children(self) -> list[_Child]:
        """Unknown children out of a daemon's session, the daemons left out."""
        known = set(self._known()) | self._sessions
        found = (_read(pid) for pid in children() if pid not in known)
        return [child for child in found if child is not None and child.session in self._sessions]


def children() -> list[int]:
    """Process ids of our children, dead ones included."""
    found: list[int] = []
    try:
        for task in Path("/proc/self/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN, or a thread that just ended
        return [child.pid for child in psutil.Process().children()]
    return found


def _read(pid: int) -> _Child | None:
    try:
        # The name in parentheses may hold anything; fields follow the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return None
        raise
    return _Child(pid, fields[0] == "Z", int(fields[3]))


def _take(pid: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return
