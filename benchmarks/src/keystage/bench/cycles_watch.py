"""What the processes of a local world hold at one moment: descriptors, threads, memory, shared memory, files.

Before it: `cycles_world` runs a world below one process. After it: one reading by name, which `cycles`
fits lines through. It reads /proc and folders, and must not change anything.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from keystage.keysmanager import inventory

_MIB = 1 << 20
_SHM = Path("/dev/shm")  # noqa: S108  (looked at, never written)
_MODULES = {
    "keystage.gateway.app": "gateway",
    "keystage.controller.app": "controller",
    "keystage.keysmanager.app": "keysmanager",
}
"""Roles of kept processes by the module that their command line names."""
PARTS = (
    "supervisor", "gateway", "controller", "keysmanager", "fork server", "holders", "router", "workers",
)  # fmt: skip
_BOUNDED = ("logs/", "decisions.jsonl")
"""In the state folder, and not read: files that turn over at a bound of their own, which cannot be told from
growth before they have reached it."""
Reading = dict[str, float]


class WorldWatch:
    """Reads everything below one `keystage up`.

    Args:
        up: its process.
        home: its state folder.
        run: its run folder.
    """

    def __init__(self, up: psutil.Process, home: Path, run: Path) -> None:
        self._up = up
        self._home = home
        self._run = run

    def parts(self, routers: Iterable[int], workers: Iterable[int]) -> dict[str, list[int]]:
        """Process ids of the lasting parts by role, of those in `PARTS`.

        Args:
            routers: process ids of routers, which are known by their records alone.
            workers: likewise of workers that stay.
        """
        found: dict[str, list[int]] = {"supervisor": [self._up.pid]}
        for child in self._up.children():
            with contextlib.suppress(psutil.Error):
                role = next((r for m, r in _MODULES.items() if m in child.cmdline()), "")
                if role:
                    found[role] = [child.pid]
        for daemon in found.get("keysmanager", ()):
            with contextlib.suppress(psutil.Error):
                servers = psutil.Process(daemon).children()
                found["fork server"] = [one.pid for one in servers]
                found["holders"] = [one.pid for server in servers for one in server.children()]
        found |= {"router": list(routers), "workers": list(workers)}
        return {role: sorted(found[role]) for role in PARTS if found.get(role)}

    def read(self, parts: Mapping[str, Iterable[int]]) -> Reading:
        """One reading, summed over the processes of a role.

        Raises:
            psutil.Error: a lasting part has ended meanwhile.
            OSError: likewise.
        """
        found: Reading = {}
        segments: dict[tuple[int, int], int] = {}
        for role, pids in parts.items():
            sums = dict.fromkeys(("files", "threads", "anonymous MiB", "PSS MiB"), 0.0)
            for pid in pids:
                folder = Path(f"/proc/{pid}")
                sums["files"] += _descriptors(folder / "fd", segments)
                sums["threads"] += sum(1 for _ in (folder / "task").iterdir())
                pss, anonymous = memory_bytes(pid)
                sums["PSS MiB"] += pss / _MIB
                sums["anonymous MiB"] += anonymous / _MIB
            found |= {f"{role}: {what}": value for what, value in sums.items()}
        below = self._below()
        found["processes"] = float(len(below))
        found["zombies"] = float(sum(is_dead for is_dead in below))
        found["memfds"] = float(len(segments))
        found["memfds MiB"] = sum(segments.values()) / _MIB
        names = list(_SHM.iterdir()) if _SHM.is_dir() else []
        found["shared memory names"] = float(len(names))
        run_files, _ = _folder(self._run)
        found["run folder: entries"] = float(run_files)
        state_files, state_bytes = _folder(self._home, but=_BOUNDED)
        found["state folder: entries"] = float(state_files)
        found["state folder: MiB"] = state_bytes / _MIB
        return found | {
            f"GPU {g.index} MiB": (g.total_bytes - g.free_bytes) / _MIB for g in inventory.gpus()[0]
        }

    def _below(self) -> list[bool]:
        """For every process below, whether it is dead and not reaped."""
        found = []
        for process in self._up.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found.append(process.status() == psutil.STATUS_ZOMBIE)
        return found


def memory_bytes(pid: int) -> tuple[int, int]:
    """(PSS, anonymous) bytes of a process: shared pages in parts; pages of no file, as heaps and stacks have.

    What a fork inherited is anonymous from its begin on. Its private memory would be no measure: it grows
    with every inherited page that is written to, until all of them are copies.

    Raises:
        OSError: it has ended.
    """
    pss = anonymous = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines():
        name, _, rest = line.partition(b":")
        if name == b"Pss":
            pss = int(rest.split()[0]) << 10
        elif name == b"Anonymous":
            anonymous = int(rest.split()[0]) << 10
    return pss, anonymous


def cpu_s(pid: int) -> tuple[float, float]:
    """Processor seconds of a process, and of its children that have ended and were waited for.

    Raises:
        psutil.Error: it has ended.
    """
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system, times.children_user + times.children_system


def _descriptors(folder: Path, segments: dict[tuple[int, int], int]) -> int:
    """How many are open; memfds are put into `segments`: bytes by device and inode."""
    number = 0
    for entry in folder.iterdir():
        number += 1
        with contextlib.suppress(FileNotFoundError):
            if str(entry.readlink()).startswith("/memfd:"):
                told = entry.stat()
                segments[told.st_dev, told.st_ino] = 512 * told.st_blocks
    return number


def _folder(folder: Path, but: tuple[str, ...] = ()) -> tuple[int, int]:
    """Entries and bytes below a folder, but for those whose path begins so; what vanishes is not there."""
    number = total = 0
    for where, folders, names in os.walk(folder):
        files = [name for name in names if not str(Path(where, name).relative_to(folder)).startswith(but)]
        number += len(folders) + len(files)
        for name in files:
            with contextlib.suppress(OSError):
                told = Path(where, name).lstat()
                total += told.st_size if stat.S_ISREG(told.st_mode) else 0
    return number, total
