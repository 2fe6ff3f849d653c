"""Forks a replica so that it belongs to its owner, not to the process that forked it.

Used by `forkserver` and `holder`; the child goes on in `child`. The fork is a double one: the
process in the middle ends at once, and the kernel hands the replica to the nearest child subreaper
above (the supervisor), which reaps it. So the end of a fork server, a holder or the daemon never
touches a replica, and leaves no zombie.

    forker --fork--> middle --fork--> replica
       <------ pipe: pid, then "ok" or why not ------'

The answer goes out when the replica is clean (`fork_child`) and has found its module.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from keystage.keysmanager.api import Spawn, Spawned
from keystage.keysmanager.fork_check import ForkError, check_forkable

DESCRIPTORS = ("lifeline", "output", "HTTP socket", "claim")
"""What goes beside a `Spawn`, in order."""
START_S = 60.0
"""From fork to clean; milliseconds, unless a module must be imported on a busy machine."""
_READ_BYTES = 4096

Begin = Callable[[Spawn, Sequence[int]], int]
"""The child's life: (message, descriptors and the pipe for `tell`) -> exit code."""


def spawn(message: Spawn, fds: Sequence[int], begin: Begin) -> Spawned:
    """Forks a replica; returns once it runs and is no child of this process.

    Args:
        message: what it is told.
        fds: see `DESCRIPTORS`; they stay open here.
        begin: runs in the child.

    Raises:
        ForkError: this process may not fork, or the child ended before it was clean.
    """
    if len(fds) != len(DESCRIPTORS):
        raise ForkError(
            f"{message.replica}: {len(fds)} descriptors, {len(DESCRIPTORS)} are expected: "
            + ", ".join(DESCRIPTORS)
        )
    check_forkable()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else the child could write the same text again
    reader, writer = os.pipe()
    with _children_are_waited_for():
        try:
            middle = os.fork()
        except OSError as error:
            os.close(reader)
            os.close(writer)
            raise ForkError(f"{message.replica}: fork failed: {error.strerror}") from error
        if middle == 0:
            _middle(message, fds, writer, begin)
        os.close(writer)
        try:
            told = _hear(reader)
        finally:
            os.close(reader)
            os.waitpid(middle, 0)
    return Spawned(_pid_of(message.replica, told))


@contextlib.contextmanager
def _children_are_waited_for() -> Iterator[None]:
    """Ignores SIGCHLD no more, for as long: else nobody is charged for the processor time of a middle.

    A holder that ends meanwhile is waited for afterwards, as nobody else will.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
        with contextlib.suppress(ChildProcessError):
            while before is signal.SIG_IGN and os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _middle(message: Spawn, fds: Sequence[int], writer: int, begin: Begin) -> None:
    """Forks again and ends; in the replica, lives its life. Returns in neither."""
    code = 1
    try:
        pid = os.fork()
        if pid == 0:
            code = begin(message, (*fds, writer))
        else:
            tell(writer, f"pid {pid}")
            code = 0
    except OSError as error:
        with contextlib.suppress(OSError):
            tell(writer, f"no second fork failed: {error.strerror}")
    finally:
        # Never back into the forker's frames, whatever happened.
        os._exit(code)


def tell(writer: int, text: str) -> None:
    """Writes one line for the forker: `ok` once the child is clean, or `no` and why not."""
    os.write(writer, text.replace("\n", " ").encode(errors="replace")[:_READ_BYTES] + b"\n")


def _hear(reader: int) -> dict[str, str]:
    """Lines from the pipe, by first word, until all ends are closed or time is up."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    until_s = time.monotonic() + START_S
    text = b""
    while True:
        left_ms = int(1000 * (until_s - time.monotonic()))
        if left_ms <= 0 or not poll.poll(left_ms):
            text += f"late not running after {START_S:.0f} s\n".encode()
            break
        block = os.read(reader, _READ_BYTES)
        if not block:
            break
        text += block
    lines = (line.partition(" ") for line in text.decode(errors="replace").splitlines())
    return {word: rest for word, _, rest in lines}


def _pid_of(replica: str, told: dict[str, str]) -> int:
    pid = int(told.get("pid", "0"))
    if "ok" in told and pid:
        return pid
    if "late" in told and pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    why = told.get("no") or told.get("late") or "the child ended before it was running"
    raise ForkError(f"{replica}: {why}")
