"""The life of replicas: wanted, starting, ready, draining, gone; and the places they hold.

Before it: `platform` applies desired numbers, failures come from the engine. After it: stages get ready
replicas. A replica holds its place from wanted to gone. One that finds no room holds nothing and starts
as soon as room appears, first wanted first. When there are too many, starting ones go first, then those
the decision names, then the youngest idle, then the youngest busy, which finish their batch before they
leave. It chooses numbers for nobody. All changes of a replica's state are in this one module, so that no
place is ever lost or held twice.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from heapq import heappush

from keystage.controller.domain.decision import Site
from keystage.simulator import draws
from keystage.simulator.api import LoadSpec
from keystage.simulator.cluster import Cluster, Node
from keystage.simulator.engine import DONE, OUTSIDE, Engine
from keystage.simulator.errors import WorldError
from keystage.simulator.parameters import Parameters
from keystage.simulator.prefetch import Prefetch
from keystage.simulator.replica import Replica
from keystage.simulator.stage import Stage
from keystage.simulator.tally import Tally

LEAST_CORES = 0.01
"""A replica gets no less; it is the least that container quotas grant (10 ms in a second)."""

_ROUNDING = 1e-9
"""Cores that may be lost in sums and quotients."""

_DRAWN = 256
"""Factors on start times drawn at a time."""


class Unit:
    """A stage with its replica numbers.

    Attributes:
        stage: the stage.
        tally: its numbers over time.
        is_key: whether it is a key stage: it once was among the first of a published ranking, or was given
            more replicas than its minimum (QUART section 6.1). Nodes keep the parameters of key stages where
            the world says so; where it says `ran`, of every stage.
        last_number: number of the replica made last.
        version: grows with every change of its replicas, for views.
    """

    __slots__ = ("_random", "_spreads", "is_key", "last_number", "stage", "tally", "version")

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage = stage
        self.tally = Tally(stage.cores)
        self.is_key = False
        self.last_number = 0
        self.version = 0
        self._random = draws.stream(seed, draws.STARTS, stage.pipeline, stage.index)
        self._spreads: list[float] = []

    def spread(self, number: int, sigma: float) -> float:
        """The factor on the start time of a replica; it depends on its number alone."""
        if sigma <= 0:
            return 1.0
        while len(self._spreads) < number:
            self._spreads += [float(x) for x in self._random.standard_normal(_DRAWN)]
        return math.exp(sigma * self._spreads[number - 1])


class Fleet:
    """All replicas.

    Args:
        engine: clock and heap.
        cluster: the nodes.
        load: start times.
        units: stages with their numbers, in the world's order.

    Attributes:
        parameters: where parameters lie, and start times.
    """

    def __init__(self, engine: Engine, cluster: Cluster, load: LoadSpec, units: Sequence[Unit]) -> None:
        self._engine = engine
        self._cluster = cluster
        self._load = load
        self.parameters = Parameters(load, cluster.has_nodes)
        self._prefetch = Prefetch(engine, self.parameters, len(cluster.nodes))
        self._units = {unit.stage.function: unit for unit in units}
        self._short: dict[str, None] = {}  # functions that lack room for a replica, first wanted first
        for unit in units:
            unit.stage.on_drained = self._drained

    # ------------------------------------------------------------------ desired numbers

    def open(self, unit: Unit) -> None:
        """The replicas that are ready at the start; their starts are not counted.

        Raises:
            WorldError: there is no room for them.
        """
        for _ in range(unit.stage.spec.replicas):
            place = self._cluster.find(unit.stage.spec, unit.stage.cores)
            if place is None:
                raise WorldError(
                    f"{unit.stage.function}: no room for {unit.stage.spec.replicas} replicas at the start, "
                    f"only for {unit.tally.held}"
                )
            replica = self._make(unit, place, 0.0)
            replica.state = "ready"
            unit.tally.change(0.0, ready=1)
            if self.parameters.is_kept(unit.is_key):
                self.parameters.keep(unit.stage, replica.node)
            unit.stage.serve(0.0, replica)
        unit.tally.change(0.0)

    def scale(
        self,
        at_s: float,
        unit: Unit,
        replicas: int,
        sites: Sequence[Site] = (),
        victims: Sequence[str] = (),
    ) -> None:
        """States the desired number of a stage."""
        replicas = max(0, replicas)
        if unit.tally.desired != replicas:
            unit.tally.change(at_s, desired=replicas)
            unit.version += 1
        if replicas > unit.stage.spec.min_replicas:
            self._make_key(at_s, unit)
        alive = unit.stage.alive()
        if len(alive) > replicas:
            self._short.pop(unit.stage.function, None)
            ranks = {name: rank for rank, name in enumerate(victims)}
            order = sorted(alive, key=lambda r: _leaving_order(r, ranks))
            for replica in order[: len(alive) - replicas]:
                self._leave(at_s, replica)
            return
        for i in range(replicas - len(alive)):
            place = self._cluster.at(sites[i], unit.stage.spec, unit.stage.cores) if i < len(sites) else None
            place = place or self._cluster.find(unit.stage.spec, unit.stage.cores)
            if place is None:
                self._short.setdefault(unit.stage.function)
                return
            self._start(at_s, unit, place)
        self._short.pop(unit.stage.function, None)

    def set_cores(self, at_s: float, unit: Unit, cores: float) -> None:
        """Cores of every replica of a stage, as many as its bound and every node of it have room for."""
        if not cores > 0:
            return
        stage = unit.stage
        counts: dict[int, int] = {}
        for replica in stage.replicas.values():
            counts[replica.node.index] = counts.get(replica.node.index, 0) + 1
        cores = min(cores, stage.spec.most_cores, self._cluster.most_cores(stage.spec))
        for index, count in counts.items():
            cores = min(cores, stage.cores + self._cluster.nodes[index].cores_free / count)
        cores = max(cores, min(LEAST_CORES, stage.cores))
        if cores == stage.cores:
            return
        for index, count in counts.items():
            node = self._cluster.nodes[index]
            left = node.cores_free - count * (cores - stage.cores)
            assert left >= -_ROUNDING, f"{node.name}: {stage.function} takes {-left} cores too many"
            node.cores_free = max(0.0, left)
            node.version += 1
        unit.tally.change(at_s, cores=cores)
        stage.set_cores(cores)
        self._note(at_s, "cores", stage.function, cores)
        self._fill(at_s)

    def publish(self, at_s: float, key: Sequence[str]) -> None:
        """Which functions are key stages; nodes where they serve keep their parameters."""
        for function in key:
            self._make_key(at_s, self._units[function])
        self._note(at_s, "key", ",".join(key) or "-")

    def _make_key(self, at_s: float, unit: Unit) -> None:
        """A stage that once was a key stage stays one: its parameters leave a memory by age only."""
        if unit.is_key:
            return
        unit.is_key = True
        for replica in unit.stage.replicas.values():
            if replica.state == "ready":
                self.parameters.keep(unit.stage, replica.node)
        if not self.parameters.is_prewarming:
            return
        for node in self._cluster.nodes:
            if unit.stage.function not in node.memory and not node.is_away:
                self._prefetch.want(at_s, unit.stage, node)

    # ------------------------------------------------------------------ failures

    def fail_replica(self, at_s: float, function: str) -> None:
        """The oldest ready replica of a function dies; the desired number stands."""
        ready = [r for r in self._units[function].stage.replicas.values() if r.state == "ready"]
        if ready:
            self._die(at_s, ready[0])
            self._fill(at_s)

    def fail_node(self, at_s: float, name: str, for_s: float) -> None:
        """A node goes away with its replicas and what its host memory held, and comes back later."""
        node = self._cluster.by_name[name]
        node.is_away = True
        node.back_s = max(node.back_s, at_s + for_s)
        node.lose_memory()
        self._prefetch.forget(node)
        self._note(at_s, "away", name, for_s)
        for unit in self._units.values():
            for replica in [r for r in unit.stage.replicas.values() if r.node is node]:
                self._die(at_s, replica)
        engine = self._engine
        heappush(engine.heap, (at_s + for_s, OUTSIDE, next(engine.order), self._come_back, node))
        self._fill(at_s)

    def _come_back(self, at_s: float, node: Node) -> None:
        """A node is there again, unless it failed anew meanwhile; it fetches what key stages need."""
        if not node.is_away or at_s < node.back_s:
            return
        node.is_away = False
        node.version += 1
        self._note(at_s, "back", node.name)
        if self.parameters.is_prewarming:
            for unit in self._units.values():
                if unit.is_key:
                    self._prefetch.want(at_s, unit.stage, node)
        self._fill(at_s)

    def _die(self, at_s: float, replica: Replica) -> None:
        self._note(at_s, "die", replica.name)
        was_ready = replica.state == "ready"
        if replica.state != "draining":
            self._short.setdefault(replica.stage.function)
        self._remove(at_s, replica, was_ready)
        replica.stage.lose(at_s, replica)

    # ------------------------------------------------------------------ life

    def _make(self, unit: Unit, place: tuple[Node, tuple[int, ...]], at_s: float) -> Replica:
        node, gpus = place
        stage = unit.stage
        unit.last_number += 1
        replica = Replica(stage, unit.last_number, node, gpus, self.parameters.source(stage, node), at_s)
        self._cluster.take(node, gpus, stage.spec, stage.cores, at_s)
        stage.replicas[replica.number] = replica
        unit.version += 1
        unit.tally.change(at_s, held=1)
        return replica

    def _start(self, at_s: float, unit: Unit, place: tuple[Node, tuple[int, ...]]) -> None:
        replica = self._make(unit, place, at_s)
        nominal_s = self.parameters.start_s(unit.stage.spec, replica.source)
        took_s = nominal_s * unit.spread(replica.number, self._load.spread_s)
        replica.ready_s = at_s + nominal_s
        if replica.source == "memory":
            self.parameters.keep(unit.stage, replica.node)
        self._prefetch.started(at_s, took_s, replica.source, replica.node)
        unit.tally.starts[replica.source] += 1
        self._note(at_s, "start", replica.name, f"{replica.node.name} {replica.gpus} {replica.source}")
        if took_s == 0:
            self._serve(at_s, replica)
            return
        engine = self._engine
        heappush(engine.heap, (at_s + took_s, DONE, next(engine.order), self._serve, replica))

    def _serve(self, at_s: float, replica: Replica) -> None:
        """A replica is ready; nothing if it was given up meanwhile."""
        if replica.state != "starting":
            return
        unit = self._units[replica.stage.function]
        replica.state = "ready"
        bisect.insort(unit.tally.starts_s, at_s - replica.wanted_s)
        replica.ready_s = at_s
        unit.version += 1
        unit.tally.change(at_s, ready=1)
        self._note(at_s, "ready", replica.name)
        if self.parameters.is_kept(unit.is_key):
            self.parameters.keep(unit.stage, replica.node)
        replica.stage.serve(at_s, replica)

    def _leave(self, at_s: float, replica: Replica) -> None:
        """A replica is wanted no more."""
        self._note(at_s, "leave", replica.name)
        if replica.state == "ready" and (replica.items is not None or replica.held):
            unit = self._units[replica.stage.function]
            replica.state = "draining"
            unit.version += 1
            unit.tally.change(at_s, ready=-1)
            replica.stage.vacate(at_s, replica)
        else:
            self._remove(at_s, replica, replica.state == "ready")
            self._fill(at_s)

    def _drained(self, at_s: float, replica: Replica) -> None:
        self._remove(at_s, replica, False)
        self._fill(at_s)

    def _remove(self, at_s: float, replica: Replica, was_ready: bool) -> None:
        unit = self._units[replica.stage.function]
        stage = replica.stage
        replica.state = "gone"
        del stage.replicas[replica.number]
        stage.busy_s += replica.busy_s
        self._cluster.give_back(replica.node, replica.gpus, stage.spec, stage.cores, at_s)
        unit.version += 1
        unit.tally.change(at_s, held=-1, ready=-1 if was_ready else 0)
        self._note(at_s, "gone", replica.name)

    def _fill(self, at_s: float) -> None:
        """Room has appeared: starts what waits for it, first wanted first."""
        for function in list(self._short):
            unit = self._units[function]
            desired = unit.tally.desired
            if desired is None:
                desired = unit.stage.spec.replicas
            missing = desired - len(unit.stage.alive())
            while missing > 0:
                place = self._cluster.find(unit.stage.spec, unit.stage.cores)
                if place is None:
                    break
                self._start(at_s, unit, place)
                missing -= 1
            if missing <= 0:
                self._short.pop(function, None)

    def _note(self, at_s: float, kind: str, subject: str, detail: object = "") -> None:
        if self._engine.log is not None:
            self._engine.log.write(at_s, kind, subject, detail)


def _leaving_order(replica: Replica, ranks: dict[str, int]) -> tuple[int, int, int, int]:
    """Sort key: starting, then named in their order, then idle, then busy; the youngest first in each."""
    is_starting = replica.state == "starting"
    rank = ranks.get(replica.name, len(ranks))
    is_busy = replica.items is not None or replica.held > 0
    return (0 if is_starting else 1, rank, int(is_busy and not is_starting), -replica.number)
