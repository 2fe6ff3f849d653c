"""What is seen of the local world while a schedule runs: replicas, queues, and every process.

Before it: `whole_world` starts it with the schedule. After it: averages, and samples of processes for `soak`.
It reads and never writes: the supervisor's records, the routers' statistics (by `loadgen.monitor`), /proc.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from keystage.local.world import LocalWorld

Floats = npt.NDArray[np.float64]

ROLES = ("supervisor", "gateway", "controller", "keysmanager", "router", "worker", "other")
COLUMNS = ("at_s", "pid", "role", "private_bytes", "files", "threads", "shared_bytes")
"""Of a sample: seconds since the schedule's begin, process id, index in `ROLES`, resident bytes not shared
with files or shared memory, open descriptors, threads, resident bytes of shared memory (memfds)."""
MOST_PROCESSES = 128
_GONE = ("failed", "stopped")


class ReplicaWatch:
    """Integrates over time how many processes each function has: starting and draining ones too.

    Args:
        world: the world.
        functions: what is watched.
    """

    def __init__(self, world: LocalWorld, functions: Sequence[str]) -> None:
        self._world = world
        self._functions = tuple(functions)
        self._replica_s = dict.fromkeys(self._functions, 0.0)
        self._elapsed_s = 0.0
        self._seen: dict[str, float] = {}
        self._initial = {r.replica for name in self._functions for r in world.replicas(name)}
        self._most = 0

    def sample(self, dt_s: float) -> None:
        """Adds the last `dt_s` seconds."""
        self._elapsed_s += dt_s
        number = 0
        for name in self._functions:
            records = [r for r in self._world.replicas(name) if r.state not in _GONE]
            number += len(records)
            self._replica_s[name] += dt_s * len(records)
            for record in records:
                took_s = record.ready_at_s - record.started_at_s if record.ready_at_s else 0.0
                self._seen[record.replica] = max(took_s, self._seen.get(record.replica, 0.0))
        self._most = max(self._most, number)

    @property
    def averages(self) -> tuple[float, ...]:
        """Time-averaged processes by function."""
        return tuple(self._replica_s[name] / max(self._elapsed_s, 1e-9) for name in self._functions)

    @property
    def started(self) -> int:
        """Replicas that appeared since the watch began."""
        return len(self._seen.keys() - self._initial)

    @property
    def start_s(self) -> tuple[float, ...]:
        """Their times from start to ready, of those that became ready."""
        return tuple(s for name, s in self._seen.items() if name not in self._initial and s)

    @property
    def most(self) -> int:
        """Most processes at once."""
        return self._most


class ProcessWatch:
    """Samples this process and all below it, into memory taken beforehand so as not to look like a leak.

    Args:
        world: the world, which runs in this process.
        skip: processes that are none of the platform: the client.
        duration_s: how long samples are taken.
        every_s: seconds between samples, 0: none are taken.
    """

    def __init__(self, world: LocalWorld, skip: Sequence[int], duration_s: float, every_s: float) -> None:
        self._world = world
        self._skip = frozenset(skip)
        self._own = psutil.Process()
        self._page_bytes = os.sysconf("SC_PAGESIZE")
        self._every_s = every_s
        self._next_s = 0.0
        rows = math.ceil(duration_s / every_s + 2) * MOST_PROCESSES if every_s else 0
        self._kept = np.full((rows, len(COLUMNS)), np.nan)
        self._number = 0

    @property
    def samples(self) -> Floats:
        """Samples [n, 7] so far, see `COLUMNS`."""
        return self._kept[: self._number].copy()

    def sample(self, at_s: float) -> None:
        """Adds a sample of every process there is, if it is time for one."""
        if not self._every_s or at_s < self._next_s:
            return
        self._next_s += self._every_s
        roles = self._roles()
        for process in (self._own, *self._own.children(recursive=True)):
            if process.pid in self._skip or self._number >= len(self._kept):
                continue
            try:
                pages = Path(f"/proc/{process.pid}/statm").read_text().split()
                files, threads = process.num_fds(), process.num_threads()
                shared_bytes = _shared_bytes(process.pid)
            except (psutil.Error, OSError):
                continue  # it has ended
            if pages[0] == "0":
                continue  # it has ended, and nobody has asked after it yet
            private_bytes = (int(pages[1]) - int(pages[2])) * self._page_bytes
            role = ROLES.index(roles.get(process.pid, "other"))
            self._kept[self._number] = (
                at_s, process.pid, role, private_bytes, files, threads, shared_bytes
            )  # fmt: skip
            self._number += 1

    def _roles(self) -> dict[int, str]:
        roles = {self._own.pid: "supervisor"}
        for record in self._world.supervisor.view().replicas:
            roles[record.pid] = "worker" if "-stage-" in record.function else "router"
        kept = [("gateway", self._world.gateway), ("controller", self._world.controller)]
        kept += [("keysmanager", one) for one in self._world.keysmanagers.values()]
        for name, process in kept:
            if process is not None and process.process is not None:
                roles[process.process.pid] = name
        return roles


def _shared_bytes(pid: int) -> int:
    """Resident bytes of shared memory.

    Raises:
        OSError: it has ended.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) << 10
    return 0
