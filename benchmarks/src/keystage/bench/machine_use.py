"""How much of the machine other programs used while a benchmark ran: what makes a figure no result."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

MOST_OTHERS_CORES = 0.2
"""Cores that other programs may use before a run is no result."""


class MachineUse:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._busy_s = _busy_s()
        self._mine_s = used_s_of_all()

    def others_cores(self) -> float:
        """Cores that were busy with anything but this process and its children, ended ones included."""
        elapsed_s = time.monotonic() - self._begin_s
        mine_s = used_s_of_all() - self._mine_s
        return max(0.0, (_busy_s() - self._busy_s - mine_s) / elapsed_s)

    def disturbance(self) -> str:
        """Words for a result that other programs disturbed, empty where none did."""
        others = self.others_cores()
        return f"other programs used {others:.2f} cores" if others > MOST_OTHERS_CORES else ""


def used_s_of_all() -> float:
    """Processor time of this process and all below it, ended children included."""
    here = psutil.Process()
    total = 0.0
    for process in (here, *here.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue  # it ended while we looked; its parent counts it from now on
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _busy_s() -> float:
    """Seconds of processor time the machine has spent on anything, since it started."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    irq, softirq = rest[:2]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
