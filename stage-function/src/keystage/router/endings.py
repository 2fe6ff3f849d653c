"""How a worker's process ended, as far as this node can tell: exit status, signal, the memory killer.

Before it: `process_watch` sees that a process is gone, or `node` why a worker is given up. After it:
`suspects` weighs what that says of the requests it ran. A SIGKILL is somebody's wish, unless the kernel has
counted a process killed for want of memory since the last look.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

from keystage.router.fleet import Fleet
from keystage.router.suspects import Cause, Ending
from keystage.wire.api import Hello
from keystage.wire.mailbox import Mailbox

log = logging.getLogger(__name__)

LAST_WORDS = "last words: "
"""Before what a worker said of its own end."""
_INFO = struct.Struct("<QQ11Ii")
"""`struct pidfd_info` (Linux 6.15): mask, cgroup, eleven ids, exit code as `wait` has it."""
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_EXIT = 1 << 3
_WISHED = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a computation does not raise by what it does."""


def wait_status(pidfd: int, pid: int) -> int | None:
    """The wait status of a process that has ended; None: the system does not tell.

    Before its parent has read it `/proc` shows it, afterwards (Linux 6.15) the pidfd.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] in ("Z", "X"):
            return int(fields[-1])
    except (OSError, IndexError, ValueError):
        pass
    info = bytearray(_INFO.pack(_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return int(status) if mask & _EXIT else None


def memory_kills() -> int:
    """Processes that the kernel has killed for want of memory, on this machine since its start."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        pass
    return 0


def ending_of(
    status: int | None, replica: str, process: str = "", *, is_shared: bool, is_memory_short: bool
) -> Ending:
    """A wait status in words, and what it says of what the process ran.

    Args:
        status: as `wait` has it, None: not known.
        replica: whose.
        process: see `Ending`.
        is_shared: see `Ending`.
        is_memory_short: whether the kernel killed something for want of memory meanwhile.
    """
    cause, words = _read(status, is_memory_short=is_memory_short)
    return Ending(cause, words, replica, process, is_shared)


def _read(status: int | None, *, is_memory_short: bool) -> tuple[Cause, str]:
    if status is None:
        return Cause.UNKNOWN, "it ended, nobody knows how"
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        # Exit status 0 is a drain whose `Bye` was lost.
        return (Cause.CRASH if code else Cause.OUTSIDE), f"exit status {code}"
    number = os.WTERMSIG(status)
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL and is_memory_short:
        return Cause.CRASH, "SIGKILL while the system killed for want of memory"
    if number in _WISHED:
        return Cause.OUTSIDE, f"{name} from outside"
    return Cause.CRASH, name


_GIVEN_UP = {
    "silent": (Cause.UNKNOWN, "no sign of life"),
    "link broke": (Cause.UNKNOWN, "the connection to or from it broke"),
    "exited": (Cause.UNKNOWN, "it ended, nobody knows how"),
    "replaced": (Cause.UNKNOWN, "it was started anew"),
    "bye": (Cause.OUTSIDE, "it was drained"),
    "unreachable": (Cause.OUTSIDE, "its queue is full"),
}


def process_of(hello: Hello) -> str:
    """Which process a worker is."""
    return f"{hello.node}#{hello.pid}"


def given_up(why: str, replica: str, process: str = "", *, is_shared: bool) -> Ending:
    """The ending of a worker that is given up for a reason, or has told one itself (`LAST_WORDS`)."""
    if why.startswith(LAST_WORDS):
        return Ending(Cause.CRASH, why.removeprefix(LAST_WORDS), replica, "", is_shared)
    cause, words = _GIVEN_UP.get(why, (Cause.UNKNOWN, why))
    return Ending(cause, words, replica, process, is_shared)


def gone(fleet: Fleet, mailbox: Mailbox, now_s: float) -> Iterator[tuple[str, str]]:
    """Workers to be given up, and why: no heartbeat came, or messages may be lost because a link broke."""
    for address in fleet.silent(now_s):
        log.warning("no heartbeat from %s", address)
        yield address, "silent"
    for address in mailbox.broken():
        yield address, "link broke"
