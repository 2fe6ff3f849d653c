"""A looping pipeline: sessions hold a slot of every stage for their whole life and step in waves.

Before it: drawn arrivals. After it: counters as a router keeps them (sessions are counted at entry only;
service is their residence). A session is bound to a path, one replica per stage, once every stage has a
slot for it: per stage the replica with most free slots, but among those nearly as free one that continues
a known path. The sessions of a path step together: its first replica forms waves while it has nothing else
to do, of at most a fair share of the path's sessions, with as many waves under way as the path has stages.
One wave is one event at every stage. A wave that comes back has made one step for each of its sessions.

When a replica becomes ready or drains, sessions move to even the load out, at the boundary of their step;
the move takes the slot at the target at once. What a move costs to compute again is left out. When one
dies its sessions go back to the front of the queue and keep the steps they have made. Binding, waves and
moves share every field of a session, so they stay in one module.
"""

from __future__ import annotations

import array
import math
from collections.abc import Callable, Sequence
from heapq import heappush

from keystage.simulator.api import Floats, PipelineSpec, World
from keystage.simulator.engine import COMES
from keystage.simulator.replica import Replica
from keystage.simulator.ring_stage import Path, RingStage, Wave

NEAR_SLOTS = 1
"""A known path wins over a replica that has so many more free slots."""

MOVE_SLOTS = 2
"""Sessions move while the load of two replicas differs by as much."""


class Ring:
    """Sessions of one looping pipeline.

    Args:
        world: hop and network times.
        spec: the pipeline.
        stages: its stages.
        arrived_s: arrival times, ascending.
        steps: waves of each session.
        on_served: told when the last session has left.

    Attributes:
        arrived_s: arrival times.
        finished_s: finish time by session, NaN until then.
        left: sessions not finished.
        steps_made: steps of all sessions so far.
    """

    def __init__(
        self,
        world: World,
        spec: PipelineSpec,
        stages: Sequence[RingStage],
        arrived_s: Floats,
        steps: list[int],
        on_served: Callable[[], None],
    ) -> None:
        self._world = world
        self._spec = spec
        self._stages = stages
        self._entry = stages[0]
        self._engine = stages[0].engine
        self._on_served = on_served
        self._arrivals_s = array.array("d", arrived_s.tobytes())
        self.arrived_s = arrived_s
        self.finished_s = array.array("d", [math.nan]) * len(arrived_s)
        self.left = len(arrived_s)
        self.steps_made = 0
        self._steps = steps
        self._bound_s = array.array("d", bytes(8 * len(arrived_s)))
        self._paths: dict[tuple[str, ...], Path] = {}
        self._path_of: dict[int, Path] = {}
        self._going: dict[int, Path] = {}  # sessions that move at the end of their step
        self._stepping: set[int] = set()
        for stage in stages:
            stage.ring = self

    def open(self) -> None:
        """Puts the first arrival into the heap."""
        if self._arrivals_s:
            engine = self._engine
            heappush(engine.heap, (self._arrivals_s[0], COMES, next(engine.order), self._arrive, 0))

    # ------------------------------------------------------------------ sessions

    def _arrive(self, at_s: float, item: int) -> None:
        following = item + 1
        if following < len(self._arrivals_s):
            engine = self._engine
            next_s = self._arrivals_s[following]
            heappush(engine.heap, (next_s, COMES, next(engine.order), self._arrive, following))
        if self._engine.log is not None:
            self._engine.log.write(at_s, "arrive", self._entry.function, item)
        self._entry.arrive(at_s, item)
        self.bind(at_s)

    def bind(self, at_s: float) -> None:
        """Binds waiting sessions, first come first served, while every stage has a slot."""
        entry = self._entry
        owners: dict[str, Replica] = {}
        while entry.queue:
            replicas = self._choose()
            if replicas is None:
                break
            entry.grow_area(at_s)
            item = entry.queue.popleft()
            entry.in_flight += 1
            entry.wait_sum_s += at_s - entry.came_s[item]
            self._bound_s[item] = at_s
            for replica in replicas:
                replica.held += 1
            self._join(item, self._path(replicas))
            owners[replicas[0].name] = replicas[0]
        for owner in owners.values():
            entry.next_wave(at_s, owner)

    def _choose(self) -> tuple[Replica, ...] | None:
        """One ready replica with a free slot per stage, None where a stage has none."""
        slots = self._spec.slots
        known = list(self._paths.values())
        chosen: list[Replica] = []
        for k, stage in enumerate(self._stages):
            free = [r for r in stage.replicas.values() if r.state == "ready" and r.held < slots]
            if not free:
                return None
            least = min(r.held for r in free)
            continuing = {path.replicas[k].name for path in known}
            near = [r for r in free if r.held <= least + NEAR_SLOTS]
            best = min(near, key=lambda r: (r.name not in continuing, r.held, r.number))
            chosen.append(best)
            known = [path for path in known if path.replicas[k] is best]
        return tuple(chosen)

    def _path(self, replicas: tuple[Replica, ...]) -> Path:
        names = tuple(replica.name for replica in replicas)
        path = self._paths.get(names)
        if path is None:
            path = self._paths[names] = Path(replicas)
        return path

    def _join(self, item: int, path: Path) -> None:
        self._path_of[item] = path
        path.sessions.add(item)
        path.waiting.append(item)

    def _part(self, at_s: float, replicas: Sequence[Replica]) -> None:
        """A session gives its slots up at some replicas; a draining one without sessions may go."""
        for replica in replicas:
            replica.held -= 1
            if replica.held == 0 and replica.state == "draining" and replica.items is None:
                replica.stage.on_drained(at_s, replica)

    def _finish(self, at_s: float, item: int) -> None:
        path = self._path_of.pop(item)
        path.sessions.discard(item)
        target = self._going.pop(item, None)
        held = set(path.replicas) | (set(target.replicas) if target is not None else set())
        entry, residence_s = self._entry, at_s - self._bound_s[item]
        entry.in_flight -= 1
        entry.services += 1
        entry.service_sum_s += residence_s
        entry.service_sq_sum_s2 += residence_s * residence_s
        entry.sojourn_sum_s += at_s - entry.came_s[item]
        self.finished_s[item] = at_s
        self.left -= 1
        self._part(at_s, sorted(held, key=lambda r: r.name))
        if not self.left:
            self._on_served()

    # ------------------------------------------------------------------ waves

    def form(self, owner: Replica) -> Wave | None:
        """The next wave of a first-stage replica; its paths take turns."""
        most = self._entry.most
        for path in self._paths.values():
            if path.replicas[0] is not owner or not path.waiting or path.waves >= len(path.replicas):
                continue
            share = min(most, -(-len(path.sessions) // len(path.replicas)))
            rows = [path.waiting.popleft() for _ in range(min(share, len(path.waiting)))]
            path.waves += 1
            self._stepping.update(rows)
            names = tuple(r.name for r in path.replicas)
            self._paths[names] = self._paths.pop(names)  # to the end: paths of one owner take turns
            return path, rows
        return None

    def pass_on(self, at_s: float, k: int, replica: Replica, wave: Wave) -> None:
        """A wave leaves stage `k`."""
        path, rows = wave
        is_last = k + 1 == len(self._stages)
        engine = self._engine
        if is_last:
            delay_s = self._delay_s(replica, path.replicas[0], 0)
            heappush(engine.heap, (at_s + delay_s, COMES, next(engine.order), self._returned, wave))
            return
        delay_s = self._delay_s(replica, path.replicas[k + 1], len(rows))
        following = self._stages[k + 1]
        if delay_s:
            heappush(engine.heap, (at_s + delay_s, COMES, next(engine.order), following.come, wave))
        else:
            following.come(at_s, wave)

    def _delay_s(self, here: Replica, there: Replica, rows: int) -> float:
        world = self._world
        if here.node is there.node:
            return world.hop_s
        sent_bytes = rows * here.stage.spec.activation_bytes
        return world.network_s + (sent_bytes / world.network_bps if world.network_bps else 0.0)

    def _returned(self, at_s: float, wave: Wave) -> None:
        """A wave is back: each of its sessions has made a step."""
        path, rows = wave
        if path.is_broken:
            return
        path.waves -= 1
        owners = {path.replicas[0].name: path.replicas[0]}
        has_room = False
        for item in rows:
            self._stepping.discard(item)
            self.steps_made += 1
            self._steps[item] -= 1
            if self._steps[item] == 0:
                self._finish(at_s, item)
                has_room = True
                continue
            target = self._going.pop(item, None)
            if target is None:
                path.waiting.append(item)
                continue
            self._move(at_s, item, path, target)
            owners[target.replicas[0].name] = target.replicas[0]
            has_room = True
        if has_room:
            self.bind(at_s)
        for owner in owners.values():
            self._entry.next_wave(at_s, owner)

    # ------------------------------------------------------------------ moves and deaths

    def joined(self, at_s: float, k: int) -> None:
        """A replica of stage `k` is ready: sessions move to it, and those that wait may find a slot."""
        self._forget_paths()
        self.even_out(at_s, k)
        self.bind(at_s)

    def _forget_paths(self) -> None:
        """Forgets paths over replicas that are gone."""
        self._paths = {names: path for names, path in self._paths.items() if not path.is_broken}

    def even_out(self, at_s: float, k: int) -> None:
        """Plans moves that even the sessions of a stage out over its ready replicas."""
        slots = self._spec.slots
        ready = [r for r in self._stages[k].replicas.values() if r.state == "ready"]
        loads = {r.name: 0 for r in ready}
        queues: dict[str, list[int]] = {}
        for item, path in self._path_of.items():
            at = self._going.get(item, path).replicas[k].name
            queues.setdefault(at, []).append(item)
            if at in loads:
                loads[at] += 1
        leaving = [item for at, items in queues.items() if at not in loads for item in items]
        for item in leaving:
            target = min(ready, key=lambda r: (loads[r.name], r.number), default=None)
            if target is None or target.held >= slots:
                break
            loads[target.name] += 1
            self._plan(at_s, item, k, target)
        while len(ready) > 1:
            source = max(ready, key=lambda r: (loads[r.name], r.number))
            target = min(ready, key=lambda r: (loads[r.name], r.number))
            items = queues.get(source.name)
            if not items or loads[source.name] - loads[target.name] < MOVE_SLOTS or target.held >= slots:
                break
            loads[source.name] -= 1
            loads[target.name] += 1
            self._plan(at_s, items.pop(), k, target)

    def _plan(self, at_s: float, item: int, k: int, target: Replica) -> None:
        """A session shall go on at another replica of stage `k`: now, or after the step it is in."""
        path = self._path_of[item]
        before = self._going.get(item, path)
        left = before.replicas[k]
        replicas = (*before.replicas[:k], target, *before.replicas[k + 1 :])
        if target is not path.replicas[k]:
            target.held += 1
        going = self._path(replicas)
        if left is not path.replicas[k]:  # it was to go elsewhere: that slot is free again
            self._part(at_s, [left])
        if item in self._stepping:
            self._going[item] = going
            return
        path.waiting.remove(item)
        self._move(at_s, item, path, going)
        self._entry.next_wave(at_s, going.replicas[0])

    def _move(self, at_s: float, item: int, path: Path, target: Path) -> None:
        path.sessions.discard(item)
        self._join(item, target)
        left = [old for old, new in zip(path.replicas, target.replicas, strict=True) if old is not new]
        self._part(at_s, left)

    def unbind(self, at_s: float, dead: Replica) -> None:
        """The sessions of a dead replica wait at the entry again, before all others."""
        entry = self._entry
        entry.grow_area(at_s)
        freed: dict[str, Replica] = {}
        for item, target in list(self._going.items()):
            path = self._path_of[item]
            if dead in target.replicas and dead not in path.replicas:  # it stays where it is
                del self._going[item]
                self._part(at_s, [r for r in target.replicas if r not in path.replicas and r is not dead])
        lost = [item for item, path in self._path_of.items() if dead in path.replicas]
        for item in sorted(lost, reverse=True):
            path = self._path_of.pop(item)
            target = self._going.pop(item, path)
            self._stepping.discard(item)
            held = {r.name: r for r in (*path.replicas, *target.replicas) if r is not dead}
            freed |= held
            self._part(at_s, list(held.values()))
            entry.queue.appendleft(item)
            entry.in_flight -= 1
            entry.wait_sum_s -= at_s - entry.came_s[item]
        self._forget_paths()
        for replica in freed.values():  # a wave of lost sessions may have stood before others
            self._stages[replica.stage.index].next_wave(at_s, replica)
        self.bind(at_s)
