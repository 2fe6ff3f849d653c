"""Paths, and which sessions should change theirs. Pure.

A path is one worker per stage. `PathBook` numbers them; `plan_moves` answers a new, ready replica
(sessions even out over the stage's replicas) or a draining one (its sessions leave).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from keystage.router.fleet import Fleet
from keystage.wire.api import Hello


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


def waves_over(workers: Iterable[Hello], node: str, cores: int) -> int:
    """How many waves keep a path busy: one for each distinct device on it.

    Args:
        workers: those on the path, each once or more.
        node: the router's own node.
        cores: CPU cores of it, which workers on a CPU there share.

    Returns:
        At least 1. Workers that share a GPU count once: two waves on one device only halve each other's rows.
        Workers on CPUs of other nodes, and emulated ones, have a device each.
    """
    known = {worker.address: worker for worker in workers}.values()
    shared = {(w.node, w.device) for w in known if w.device.startswith("cuda")}
    here = sum(w.device == "cpu" and w.node == node for w in known)
    others = sum(not w.device.startswith("cuda") for w in known) - here
    return max(1, len(shared) + min(here, cores) + others)


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


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """A running session and what it needs.

    Attributes:
        session: its number.
        addresses: workers of its path.
        kv_tokens: KV positions of credit.
        most_kv: KV positions it can ever need.
        is_fixed: it counts where it is, and is not to be moved.
    """

    session: int
    addresses: tuple[str, ...]
    kv_tokens: int
    most_kv: int = 0
    is_fixed: bool = False


def is_copied(fleet: Fleet, before: Sequence[str], stage: int, target: str) -> bool:
    """Whether a session's KV state of a stage can go to another worker by a copy.

    Both are on one node; each serves the session in that stage only, so that waves enter the other
    workers of the path where they did before.
    """
    source = before[stage]
    if target in before or before.count(source) > 1:
        return False
    workers = fleet.workers
    return source in workers and workers[source].hello.node == workers[target].hello.node


def plan_moves(
    fleet: Fleet,
    stage: int,
    sessions: Sequence[Bound],
) -> list[PlannedMove]:
    """Moves that even out the sessions of a stage over its ready replicas.

    Sessions leave the most loaded replica for the least loaded while the difference is at least
    two, and leave those that take nothing new altogether; never more than the credit of the target.

    Args:
        fleet: the workers with their credit.
        stage: stage to even out.
        sessions: those that run, longest running first; the last are moved first, because the
            shortest replay is theirs when they started late.
    """
    load: dict[str, int] = {a: 0 for a, w in fleet.of_stage(stage) if w.takes_new}
    queues: dict[str, list[Bound]] = {}
    for entry in sessions:
        address = entry.addresses[stage]
        if not entry.is_fixed:
            queues.setdefault(address, []).append(entry)
        if address in load:
            load[address] += 1
    room = {a: [fleet.workers[a].free_slots, _free_kv(fleet, a)] for a in load}
    moves: list[PlannedMove] = []
    leaving = [entry for address, queue in queues.items() if address not in load for entry in queue]
    for entry in leaving:
        target = _least(fleet, load, room, entry)
        if target is not None:
            moves.append(_move(entry, stage, target, load, room))
    while len(load) > 1:
        source = max(load, key=lambda a: (load[a], a))
        if not queues.get(source):
            break
        entry = queues[source][-1]
        target = _least(fleet, {a: n for a, n in load.items() if a != source}, room, entry)
        if target is None or load[source] - load[target] < 2:
            break
        queues[source].pop()
        load[source] -= 1
        moves.append(_move(entry, stage, target, load, room))
    return moves


def _free_kv(fleet: Fleet, address: str) -> int:
    worker = fleet.workers[address]
    return worker.granted_kv - worker.held_kv


def _least(fleet: Fleet, load: Mapping[str, int], room: Mapping[str, list[int]], entry: Bound) -> str | None:
    """Least loaded worker with credit; a worker that serves the session elsewhere needs none."""
    fits = [
        a
        for a in load
        if a in entry.addresses
        or (
            room[a][0] > 0
            and room[a][1] >= entry.kv_tokens
            and fleet.workers[a].hello.kv_tokens >= entry.most_kv
        )
    ]
    return min(fits, key=lambda a: (load[a], a)) if fits else None


def _move(
    entry: Bound,
    stage: int,
    target: str,
    load: dict[str, int],
    room: dict[str, list[int]],
) -> PlannedMove:
    load[target] += 1
    if target not in entry.addresses:
        room[target][0] -= 1
        room[target][1] -= entry.kv_tokens
    addresses = (*entry.addresses[:stage], target, *entry.addresses[stage + 1 :])
    return PlannedMove(entry.session, addresses)
