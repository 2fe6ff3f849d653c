"""Processes below this daemon, and those it asks for by id, as `/proc` tells.

For `reconcile`, which compares them with what the ledger believes. A process may end while it is
being read: then it is not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from keystage.keysmanager.reconcile import Actual


def read(root: int, asked: Iterable[int] = (), proc: Path = Path("/proc")) -> dict[int, Actual]:
    """Descendants of a process, without itself, and whatever else was asked for.

    Args:
        root: the daemon's process id.
        asked: ids of processes that need not descend from it (standbys belong to their owner).
        proc: where `/proc` is mounted.
    """
    stats: dict[int, tuple[int, int, str]] = {}
    for folder in proc.iterdir():
        if folder.name.isdigit() and (stat := _stat(folder / "stat")) is not None:
            stats[int(folder.name)] = stat
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    ours: set[int] = set()
    rest = [root]
    while rest:
        for pid in children.get(rest.pop(), []):
            if pid not in ours:
                ours.add(pid)
                rest.append(pid)
    return {
        pid: Actual(pid, stats[pid][1], stats[pid][2] in "ZX", pid in ours)
        for pid in {*ours, *asked}
        if pid in stats
    }


def _stat(path: Path) -> tuple[int, int, str] | None:
    """Parent, start in clock ticks, state; None: it has ended. See proc(5)."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:  # ended, or not ours to see (hidepid)
        return None
    # The name in parentheses may hold anything, parentheses too.
    words = text[text.rindex(")") + 2 :].split()
    return int(words[1]), int(words[19]), words[0]
