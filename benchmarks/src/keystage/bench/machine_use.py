"""How much of the machine other programs used while a benchmark ran: what makes a figure no result."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil


class MachineUse:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._busy_s = _busy_s()
        self._mine_s = _mine_s()

    def others_cores(self) -> float:
        """Cores that were busy with anything but this process and its children."""
        elapsed_s = time.monotonic() - self._begin_s
        mine_s = sum(now - self._mine_s.get(pid, 0.0) for pid, now in _mine_s().items())
        return max(0.0, (_busy_s() - self._busy_s - mine_s) / elapsed_s)


def _busy_s() -> float:
    """Seconds of processor time the machine has spent on anything, since it started."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    irq, softirq = rest[:2]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _mine_s() -> dict[int, float]:
    """Processor time of this process and all below it, by process."""
    here = psutil.Process()
    times: dict[int, float] = {}
    for process in (here, *here.children(recursive=True)):
        try:
            spent = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        times[process.pid] = spent.user + spent.system
    return times
