"""Single keys of a terminal, while something else is drawn on it.

Used by `top`. Bytes become names of keys in `parsed`, which is pure; `keys` puts the terminal back as it was,
however it is left.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import termios
import tty
from collections.abc import Callable, Iterator

_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page-up",
    b"\x1b[6~": "page-down",
}
END = "end"
"""The terminal is gone."""
_LONGEST = 16
"""Bytes of a sequence that nobody knows."""

ReadKey = Callable[[float], str]
"""Waits at most so many seconds for a key; empty where none came."""


def parsed(data: bytes) -> tuple[list[str], bytes]:
    r"""Keys, and what is left of a sequence that has not come whole.

    >>> parsed(b"j\x1b[A\x1b[")
    (['j', 'up'], b'\x1b[')
    """
    found: list[str] = []
    while data:
        if not data.startswith(b"\x1b"):
            found.append(data[:1].decode("latin-1"))
            data = data[1:]
            continue
        end = _end(data)
        if end is None:
            return found, data
        if data[:end] in _SEQUENCES:
            found.append(_SEQUENCES[data[:end]])
        data = data[end:]
    return found, b""


def _end(data: bytes) -> int | None:
    """Length of the sequence that data begins with, None where it has not come whole."""
    if len(data) < 2:
        return None
    if data[1:2] not in (b"[", b"O"):
        return 1  # the key Escape, and then another
    for place, byte in enumerate(data[2:], 2):
        if 0x40 <= byte <= 0x7E:
            return place + 1
    return None if len(data) < _LONGEST else len(data)


@contextlib.contextmanager
def keys(fd: int) -> Iterator[ReadKey]:
    """Yields a function that waits for a key; the terminal neither echoes nor waits for a whole line.

    Args:
        fd: of a terminal.
    """
    before = termios.tcgetattr(fd)
    waiting: collections.deque[str] = collections.deque()
    left = b""

    def read(timeout_s: float) -> str:
        nonlocal left
        if not waiting and select.select([fd], [], [], timeout_s)[0]:
            data = _read(fd)
            if not data:
                return END
            found, left = parsed(left + data)
            waiting.extend(found)
        return waiting.popleft() if waiting else ""

    try:
        tty.setcbreak(fd)
        yield read
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 64)
    except OSError:  # hung up
        return b""
