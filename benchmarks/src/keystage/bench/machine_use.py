"""How much of the machine other programs used while a benchmark ran: what makes a figure no result."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

MOST_OTHERS_CORES = 0.2
"""Cores that other programs may use before a run is no result."""
KERNEL_SHARE = 0.25
"""Of our processor time: as much again, charged to no process, is taken for the kernel's work for us.

Interrupts and wakings are charged to nobody, nor is an ended child whose parent ignores its end; where the
kernel counts by ticks, one that finds a process just woken counts whole. Measured: 0.14 of ours where ten
processes a second start and end. Beyond it, it is programs that we do not see: of another container, of
the host.
"""


class MachineUse:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._used = _used()

    def others_cores(self) -> float:
        """Cores that were busy with anything but this process and its children, ended ones included."""
        elapsed_s = time.monotonic() - self._begin_s
        busy_s, seen_s, mine_s = (now - then for now, then in zip(_used(), self._used, strict=True))
        unseen_s = max(0.0, busy_s - seen_s - KERNEL_SHARE * mine_s)
        return (max(0.0, seen_s - mine_s) + unseen_s) / elapsed_s

    def disturbance(self) -> str:
        """Words for a result that other programs disturbed, empty where none did."""
        others = self.others_cores()
        return f"other programs used {others:.2f} cores" if others > MOST_OTHERS_CORES else ""


def used_s_of_all() -> float:
    """Processor time of this process and all below it, ended children included."""
    here = psutil.Process()
    return _sum_s((here, *here.children(recursive=True)))


def _used() -> tuple[float, float, float]:
    """Seconds so far: in which the machine was busy, of all processes that we see, of ours."""
    return _busy_s(), _sum_s(psutil.process_iter()), used_s_of_all()


def _sum_s(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended while we looked; its parent counts it from now on
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _busy_s() -> float:
    """Seconds of processor time the machine has spent on anything, since it started."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    irq, softirq = rest[:2]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
