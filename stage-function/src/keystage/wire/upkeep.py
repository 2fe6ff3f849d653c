"""What a lasting process does now and then so that its memory stays as it is: garbage, names, free pages.

Four things grow under a steady load although nothing more is in use. Objects in cycles that live through a
collection are older then, and Python looks at older ones only once a quarter of all objects are new: hours,
in a server that seldom makes lasting ones. What libraries below Python free stays in glibc's heaps, which
grow into new pages all the same. And Python's cache of attributes (`type_cache` of CPython, 4,096 names)
holds every name that C code made for one look-up, as each opening of a file as text does: a third of a
megabyte in the first hours, scattered over as many pages. And a trim reaches the end of the first heap alone:
of the heaps that glibc makes for other threads the end keeps every page that was touched once, by an answer
larger than all before. Together it is megabytes in an hour, which nobody can tell from a leak.

From a loop that turns anyway. Pages cost a tenth of a millisecond, and page faults of what is wanted again;
all objects cost a millisecond for ten thousand of them, and are looked at so seldom that it is a thousandth
of the time at most. Names go before pages, in ten microseconds; a name that is wanted again is looked up
once. One heap for all threads (`one_heap`) is set before they begin. A libc without `malloc_trim` keeps its
pages, a Python without `_clear_type_cache` its names.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time

TRIM_EVERY_S = 20.0
COLLECT_EVERY_S = 60.0
COLLECT_SHARE = 0.001
"""Of the time, at most, for looking at all objects."""

_M_ARENA_MAX = -8
"""`mallopt`'s number for the most heaps (glibc's malloc.h)."""


def one_heap() -> None:
    """Has all threads of this process, and of those forked from it, use one heap of the C library.

    To be called before other threads allocate: after that nothing changes, nor where the C library is none of
    GNU's. Threads wait for each other where two allocate at once; most is had from Python's own pools, from
    what each thread keeps back (tcaches), or in whole mappings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


class Upkeep:
    """Looks at old objects, lets names go and trims the heap of this process, every so many seconds at most.

    Args:
        trim_every_s: seconds between two trims, and names let go; the first comes so long after the begin.
        collect_every_s: likewise between two looks at all objects, at least.

    Attributes:
        trims: how often it trimmed.
        collections: how often it looked at all objects.
    """

    def __init__(self, trim_every_s: float = TRIM_EVERY_S, collect_every_s: float = COLLECT_EVERY_S) -> None:
        now_s = time.monotonic()
        self._trim_every_s = trim_every_s
        self._collect_every_s = collect_every_s
        self._trim_s = now_s + trim_every_s
        self._collect_s = now_s + collect_every_s
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._forget_names = getattr(sys, "_clear_type_cache", None)
        self.trims = self.collections = 0

    def now_and_then(self) -> None:
        """Does what is due; cheap otherwise."""
        now_s = time.monotonic()
        if now_s >= self._collect_s:
            gc.collect()
            took_s = time.monotonic() - now_s
            self._collect_s = now_s + max(self._collect_every_s, took_s / COLLECT_SHARE)
            self.collections += 1
        if now_s >= self._trim_s:
            if self._forget_names is not None:
                self._forget_names()
            if self._trim is not None:
                self._trim(0)
            self._trim_s = now_s + self._trim_every_s
            self.trims += 1
