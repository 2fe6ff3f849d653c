"""What a function's replicas use: CPU time and memory of their process groups, read from /proc.

Asked by `local.supervisor`. A replica leads a process group, so whatever it started counts.
Memory is PSS where the kernel tells it: pages that several replicas share (parameters) count once in all.
It must not keep anything running between two questions.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from keystage.local.api import Usage

SPAN_S = 0.5
"""Least time between two readings of CPU time, which the kernel counts in hundredths of a second."""
MOST_SPAN_S = 30.0
"""A reading older than this says nothing of the last seconds."""
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PGRP, _UTIME, _CSTIME, _RSS = 2, 11, 14, 21
"""Fields of /proc/<pid>/stat, counted from the state on (proc(5) counts that as the third)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds by process group at one moment, and the memory of all, in bytes."""

    at_s: float
    cpu_s: Mapping[int, float]
    memory_bytes: int


class Meter:
    """Answers what process groups use, and keeps each function's last reading for the next question.

    However many ask, a function is measured once at a time, and one reading at a time has a thread: what
    else needs one must not wait for us.
    """

    def __init__(self) -> None:
        self._last: dict[str, Reading] = {}
        self._running: dict[str, asyncio.Task[Usage]] = {}
        self._turn = asyncio.Lock()

    async def measure(self, function: str, groups: Callable[[], Collection[int]]) -> Usage:
        """Reads once if the last reading is of the last seconds, else twice, half a second apart.

        Args:
            function: whose.
            groups: asked for the process groups at each reading.
        """
        task = self._running.get(function)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._measure(function, groups))
            self._running[function] = task
        return await asyncio.shield(task)  # a client that goes away is not the only one

    async def _measure(self, function: str, groups: Callable[[], Collection[int]]) -> Usage:
        mine = asyncio.current_task()
        try:
            before = self._last.get(function)
            if before is None or not SPAN_S <= time.monotonic() - before.at_s <= MOST_SPAN_S:
                before = await self._read(groups(), with_memory=False)
                await asyncio.sleep(SPAN_S)
            now = await self._read(groups())
            if self._running.get(function) is mine:
                self._last[function] = now
        finally:
            if self._running.get(function) is mine:
                del self._running[function]
        span_s = now.at_s - before.at_s
        # A group that is new since then began with nothing.
        used_s = sum(max(0.0, cpu_s - before.cpu_s.get(group, 0.0)) for group, cpu_s in now.cpu_s.items())
        return Usage(cpu_cores=round(used_s / span_s, 4), memory_bytes=now.memory_bytes)

    async def _read(self, groups: Collection[int], *, with_memory: bool = True) -> Reading:
        async with self._turn:
            return await asyncio.to_thread(read, groups, with_memory=with_memory)

    def forget(self, function: str) -> None:
        """The function is removed."""
        self._last.pop(function, None)
        self._running.pop(function, None)


def read(groups: Collection[int], *, with_memory: bool = True) -> Reading:
    """Reads all processes of some groups; one that has ended counts through its parent, who waits for it."""
    cpu_s = dict.fromkeys(groups, 0.0)
    memory_bytes = 0
    at_s = time.monotonic()
    for pid, fields in _processes() if groups else ():
        group = int(fields[_PGRP])
        if group in cpu_s:
            cpu_s[group] += sum(int(ticks) for ticks in fields[_UTIME : _CSTIME + 1]) * _TICK_S
            memory_bytes += _memory_bytes(pid, fields) if with_memory else 0
    return Reading(at_s, cpu_s, memory_bytes)


def _processes() -> Iterator[tuple[int, list[bytes]]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_bytes()
            except OSError:  # it ended meanwhile
                continue
            # The command stands in parentheses and may hold any character.
            yield int(entry.name), text[text.rindex(b")") + 2 :].split()


def _memory_bytes(pid: int, fields: list[bytes]) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
    except OSError:  # older kernels, other users, a process that ends
        rollup = b""
    for line in rollup.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    return int(fields[_RSS]) * _PAGE_BYTES
