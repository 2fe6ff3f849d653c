"""What a process does first after it was forked, so that nothing of its parent clings to it.

Called by `fork_spawn` (replicas) and `forkserver` (holders) in the child. A program started by exec
gets a clean process from the kernel; a forked one inherits descriptors (a socket kept open never
reads end of file), signal handlers, random state, environment, logging and names.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import logging
import os
import random
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_FIRST_FD = 3
_PR_SET_NAME = 15
_NAME_BYTES = 15

_libc = ctypes.CDLL(None)


def rename(name: str) -> None:
    """Sets the name that `ps` shows; the kernel keeps 15 bytes."""
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:_NAME_BYTES]), 0, 0, 0)


def lead_group() -> None:
    """Makes this process the leader of a group of its own: signals to the parent's group miss it."""
    os.setpgid(0, 0)


def reset_signals() -> None:
    """Default actions, nothing blocked; SIGPIPE stays ignored, as in every Python program."""
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def keep_only(fds: Sequence[int]) -> list[int]:
    """Closes every descriptor from 3 on but these; returns their new numbers, from 3 on in order."""
    first_free = _FIRST_FD + len(fds)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first_free) for fd in fds]
    kept = list(range(_FIRST_FD, first_free))
    for fd, place in zip(high, kept, strict=True):
        os.dup2(fd, place, inheritable=False)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    os.closerange(first_free, highest + 1)
    return kept


def attach_output(output: int) -> None:
    """Standard output and error go to `output`, standard input is empty; logging starts afresh."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for place in (1, 2):
        os.dup2(output, place)
    # The parent's objects stay referenced by their frames; new ones have empty buffers.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _text(1)
    sys.stderr = _text(2)
    for handler in list(logging.root.handlers):
        logging.root.removeHandler(handler)


def _text(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def replace_environment(env: Mapping[str, str]) -> None:
    """The environment is exactly `env` from now on."""
    os.environ.clear()
    os.environ.update(env)


def reseed() -> None:
    """New random state: siblings share their parent's otherwise, and would draw the same numbers."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(list(struct.unpack("8I", os.urandom(32))))
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # those of GPUs are made in this process


def set_threads(threads: int) -> None:
    """Intra-op threads of torch; 0: as many as this process has cores. The parent has one."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
