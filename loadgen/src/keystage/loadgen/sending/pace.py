"""Keeps the schedule of one process: hands each request over at its moment, whatever the answers do.

Comes before `client`. It knows times only; nothing that happens to a request reaches it.

The loops' own timers count in whole milliseconds (uvloop's too), so a request would be a millisecond
late as a rule; spinning until the moment costs a core. Linux's timerfd, watched as any other descriptor,
wakes the loop at an absolute time of the monotonic clock for one system call.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable, Sequence

MOST_AT_ONCE = 16
"""After so many requests in a row answers are read, however late the next is: a late schedule must not
stop the clock of answers that are here already."""


_CLOCK_MONOTONIC = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK | TFD_CLOEXEC have these values
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


_libc = ctypes.CDLL(None, use_errno=True)


class PreciseTimer:
    """Calls back at a moment of `time.monotonic()`, again and again as it is set.

    Args:
        loop: whose thread the callback runs in.
        due: called at the moment, and again until it sets the timer anew or closes it (setting is what
            takes the ring back, so that no call is needed to read it).

    Raises:
        OSError: the kernel has no timerfd, or no descriptor is left.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, due: Callable[[], None]) -> None:
        self._loop = loop
        self._spec = _Itimerspec()
        self._settime = _libc.timerfd_settime
        self._at = ctypes.byref(self._spec)
        self._fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timerfd_create: {os.strerror(number)}")
        loop.add_reader(self._fd, due)

    def set(self, moment_s: float) -> None:
        """Rings at `moment_s`, at once if that is past; replaces what was set before."""
        value = self._spec.it_value
        nanoseconds = max(int(moment_s * 1e9), 1)
        value.tv_sec, value.tv_nsec = divmod(nanoseconds, 1_000_000_000)
        if self._settime(self._fd, _TFD_TIMER_ABSTIME, self._at, None):
            number = ctypes.get_errno()
            raise OSError(number, f"timerfd_settime: {os.strerror(number)}")

    def close(self) -> None:
        """Rings no more."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


async def keep(times_s: Sequence[float], start_s: float, send: Callable[[int], None]) -> None:
    """Calls `send(i)` at `start_s + times_s[i]` for each, and returns after the last.

    Args:
        times_s: seconds from the start, ascending.
        start_s: `time.monotonic()` of the start.
        send: hands a request over; it must not wait.

    Raises:
        OSError: no timer to be had.
    """
    if not len(times_s):
        return
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    count = len(times_s)
    place = 0

    def due() -> None:
        nonlocal place
        try:
            stop = min(place + MOST_AT_ONCE, count)
            while place < stop and start_s + times_s[place] <= time.monotonic():
                send(place)
                place += 1
            if place < count:
                timer.set(start_s + times_s[place])
            elif not done.done():
                done.set_result(None)
        except Exception as error:  # noqa: BLE001 -- a bug must end the run, not only this callback
            if not done.done():
                done.set_exception(error)

    timer = PreciseTimer(loop, due)
    try:
        timer.set(start_s + times_s[0])
        await done
    finally:
        timer.close()
