"""Paths, and which sessions should change theirs. Pure.

A path is one worker per stage. `PathBook` numbers them; `plan_moves` answers a new, ready replica
(sessions even out over the stage's replicas) or a draining one (its sessions leave).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from keystage.router.fleet import Fleet


@dataclasses.dataclass(frozen=True, slots=True)
class Path:
    """A numbered path.

    Attributes:
        number: never reused.
        addresses: worker per stage.
    """

    number: int
    addresses: tuple[str, ...]

    @property
    def owner(self) -> str:
        """The worker that forms its waves."""
        return self.addresses[0]


class PathBook:
    """Paths by number and by workers.

    Args:
        first: number of the first path (a base unique to this incarnation of the router).
    """

    def __init__(self, first: int) -> None:
        self._next = first
        self.by_number: dict[int, Path] = {}
        self._by_workers: dict[tuple[str, ...], Path] = {}

    def workers(self) -> list[tuple[str, ...]]:
        """Every path as its workers."""
        return list(self._by_workers)

    def get(self, addresses: tuple[str, ...]) -> tuple[Path, bool]:
        """The path over these workers, and whether it is new (and needs a `Route`)."""
        path = self._by_workers.get(addresses)
        if path is not None:
            return path, False
        path = Path(self._next, addresses)
        self._next += 1
        self.by_number[path.number] = self._by_workers[addresses] = path
        return path, True

    def remove_through(self, address: str) -> list[Path]:
        """Forgets all paths over a worker and returns them."""
        gone = [path for path in self.by_number.values() if address in path.addresses]
        for path in gone:
            del self.by_number[path.number]
            del self._by_workers[path.addresses]
        return gone


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedMove:
    """One session's change of path."""

    session: int
    addresses: tuple[str, ...]


def plan_moves(
    fleet: Fleet,
    stage: int,
    sessions: Sequence[tuple[int, tuple[str, ...], int]],
) -> list[PlannedMove]:
    """Moves that even out the sessions of a stage over its ready replicas.

    Sessions leave the most loaded replica for the least loaded while the difference is at least
    two, and leave draining replicas altogether; never more than the credit of the target.

    Args:
        fleet: the workers with their credit.
        stage: stage to even out.
        sessions: (session, addresses of its path, KV positions), longest running last; the last
            are moved first, because the shortest replay is theirs when they started late.
    """
    load: dict[str, int] = {a: 0 for a, w in fleet.of_stage(stage) if w.is_ready}
    queues: dict[str, list[tuple[int, tuple[str, ...], int]]] = {}
    for entry in sessions:
        address = entry[1][stage]
        queues.setdefault(address, []).append(entry)
        if address in load:
            load[address] += 1
    room = {a: [fleet.workers[a].free_slots, _free_kv(fleet, a)] for a in load}
    moves: list[PlannedMove] = []
    leaving = [entry for address, queue in queues.items() if address not in load for entry in queue]
    for entry in leaving:
        target = _least(load, room, entry)
        if target is not None:
            moves.append(_move(entry, stage, target, load, room))
    while len(load) > 1:
        source = max(load, key=lambda a: (load[a], a))
        if not queues.get(source):
            break
        entry = queues[source][-1]
        target = _least({a: n for a, n in load.items() if a != source}, room, entry)
        if target is None or load[source] - load[target] < 2:
            break
        queues[source].pop()
        load[source] -= 1
        moves.append(_move(entry, stage, target, load, room))
    return moves


def _free_kv(fleet: Fleet, address: str) -> int:
    worker = fleet.workers[address]
    return worker.granted_kv - worker.held_kv


def _least(
    load: Mapping[str, int], room: Mapping[str, list[int]], entry: tuple[int, tuple[str, ...], int]
) -> str | None:
    """Least loaded worker with credit; a worker that serves the session elsewhere needs none."""
    fits = [a for a in load if a in entry[1] or (room[a][0] > 0 and room[a][1] >= entry[2])]
    return min(fits, key=lambda a: (load[a], a)) if fits else None


def _move(
    entry: tuple[int, tuple[str, ...], int],
    stage: int,
    target: str,
    load: dict[str, int],
    room: dict[str, list[int]],
) -> PlannedMove:
    session, addresses, kv_tokens = entry
    load[target] += 1
    if target not in addresses:
        room[target][0] -= 1
        room[target][1] -= kv_tokens
    return PlannedMove(session, (*addresses[:stage], target, *addresses[stage + 1 :]))
