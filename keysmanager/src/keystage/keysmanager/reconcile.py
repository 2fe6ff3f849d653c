"""What the ledger believes against what runs: deaths nobody told, processes nobody knows.

`daemon` compares every few seconds. Outcomes normally arrive over sockets and pidfds; this is the
net beneath them, for a fork server that died with an answer unsent, a holder that hangs and heard no
end of file, a process left by a daemon before. Replicas are not looked at: their owner reaps them.

Pure: `proc_children` reads the processes, the daemon sends the events and signals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from keystage.keysmanager.events import HolderGone, StandbyGone


@dataclasses.dataclass(frozen=True, slots=True)
class Believed:
    """A process the ledger counts on.

    Attributes:
        role: what it is.
        key: identity of a holder; number of a standby, as text; empty for the fork server.
        pid: as it was told.
    """

    role: Literal["holder", "standby", "fork-server"]
    key: str
    pid: int


@dataclasses.dataclass(frozen=True, slots=True)
class Actual:
    """A process that runs.

    Attributes:
        pid: its id.
        started: kernel clock ticks at its start; a reused id has another.
        is_zombie: it has ended and waits for its parent.
        is_ours: it descends from this daemon; only those are ever killed.
    """

    pid: int
    started: int
    is_zombie: bool = False
    is_ours: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Memo:
    """What is carried from one comparison to the next.

    Attributes:
        started: start of each believed process when it was first seen.
        strays: start of each unknown process seen last time.
    """

    started: Mapping[int, int] = dataclasses.field(default_factory=dict)
    strays: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Differences:
    """What to do, and what to remember.

    Attributes:
        events: deaths the ledger has not heard of.
        is_fork_server_gone: it must be started again.
        kill: unknown descendants, to be ended with SIGKILL.
        memo: for the next comparison.
    """

    events: tuple[HolderGone | StandbyGone, ...]
    is_fork_server_gone: bool
    kill: tuple[int, ...]
    memo: Memo


def reconcile(
    believed: tuple[Believed, ...], actual: Mapping[int, Actual], memo: Memo, forking: int = 0
) -> Differences:
    """Compares.

    Args:
        believed: what the ledger counts on.
        actual: what runs, by process id; read after `believed` was noted, or a new one looks dead.
        memo: of the last comparison.
        forking: forks under way, whose processes cannot be known yet; while there are any, unknown
            processes are left alone.

    A stray is killed when it is found twice in a row, as the same process: one may have been forked
    between the two readings.
    """
    gone: list[HolderGone | StandbyGone] = []
    is_fork_server_gone = False
    started: dict[int, int] = {}
    for process in believed:
        why = _why_dead(process.pid, actual, memo)
        if not why:
            started[process.pid] = actual[process.pid].started
        elif process.role == "holder":
            gone.append(HolderGone(process.key, why))
        elif process.role == "standby":
            gone.append(StandbyGone(int(process.key), why))
        else:
            is_fork_server_gone = True
    strays = {
        pid: found.started
        for pid, found in actual.items()
        if found.is_ours and not found.is_zombie and pid not in started
    }
    kill = tuple(sorted(pid for pid, at in strays.items() if not forking and memo.strays.get(pid) == at))
    kept = {} if forking else strays
    return Differences(tuple(gone), is_fork_server_gone, kill, Memo(started, kept))


def _why_dead(pid: int, actual: Mapping[int, Actual], memo: Memo) -> str:
    """Empty: it lives."""
    found = actual.get(pid)
    if found is None:
        return f"process {pid} is not there"
    if found.is_zombie:
        return f"process {pid} has ended"
    if memo.started.get(pid, found.started) != found.started:
        return f"process {pid} ended, and its number was given to another"
    return ""
