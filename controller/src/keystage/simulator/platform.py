"""The simulated world as a `Platform`: observed and acted on as the local world is, in its own time.

Before and after it: `run.simulate`, or a test. Time moves by `advance` only. It holds no policy: numbers
are stated by actions, places by actions or by the stated rule of `cluster`.
"""

from __future__ import annotations

import array
import itertools
import math
from collections.abc import Sequence
from heapq import heappush
from pathlib import Path
from typing import assert_never

import msgspec
import numpy as np

from keystage.controller.domain.decision import (
    Action,
    ClearWake,
    LiftOverride,
    PublishKeyStages,
    SetCpu,
    SetReplicas,
)
from keystage.controller.domain.platform import PlatformError
from keystage.controller.domain.snapshot import FunctionView, Override, PipelineView, Snapshot
from keystage.simulator import draws
from keystage.simulator.api import FailureSpec, Floats, Outcome, PipelineSpec, World
from keystage.simulator.check import check_world, predecessors
from keystage.simulator.cluster import Cluster
from keystage.simulator.engine import OUTSIDE, Engine
from keystage.simulator.errors import WorldError
from keystage.simulator.eventlog import EventLog
from keystage.simulator.fleet import Fleet, Unit
from keystage.simulator.flow import SinglePass
from keystage.simulator.measures import pipeline_outcome, stage_outcome
from keystage.simulator.ring import Ring
from keystage.simulator.ring_stage import RingStage
from keystage.simulator.scheduled import ScheduledStage, stage_shares
from keystage.simulator.stage import Stage
from keystage.simulator.view import NodeEye, StageEye


class SimulatedPlatform:
    """A world at work.

    Args:
        world: what it is made of.
        seed: of every draw.
        log: event log to write, None for none.
        epoch_s: Unix seconds of the world's 0.

    Raises:
        WorldError: the world cannot be.
    """

    def __init__(self, world: World, seed: int, *, log: Path | None = None, epoch_s: float = 0.0) -> None:
        check_world(world)
        if seed < 0:
            raise WorldError(f"seed must be 0 or more, not {seed}")
        self.world = world
        self._epoch_s = epoch_s
        self._log = EventLog(log) if log is not None else None
        self._engine = Engine(self._log)
        self._cluster = Cluster(world.nodes)
        self._is_closed = False
        self._unserved = 0
        self._flows: list[SinglePass | Ring] = []
        self._pipelines: list[list[Unit]] = []
        for p, spec in enumerate(world.pipelines):
            self._add_pipeline(p, spec, seed)
        units = list(itertools.chain.from_iterable(self._pipelines))
        self._units = {unit.stage.function: unit for unit in units}
        self.fleet = Fleet(self._engine, self._cluster, world.load, units)
        for unit in units:
            self.fleet.open(unit)
        self._eyes = [
            [StageEye(world, self.fleet, self._cluster, u, epoch_s, _slots(spec)) for u in stages]
            for spec, stages in zip(world.pipelines, self._pipelines, strict=True)
        ]
        functions = frozenset(self._units)
        nodes = self._cluster.nodes if self._cluster.has_nodes else []
        self._node_eyes = [NodeEye(node, functions, world.load) for node in nodes]
        self._plain = {p.function: FunctionView(function=p.function) for p in world.pipelines if p.function}
        self._overrides: dict[str, Override] = {}
        self._wakes: set[str] = set()
        for flow in self._flows:
            flow.open()
        self.has_traffic = self._unserved > 0
        for failure in world.failures:
            order = next(self._engine.order)
            heappush(self._engine.heap, (failure.at_s, OUTSIDE, order, self._fail, failure))

    def _add_pipeline(self, p: int, spec: PipelineSpec, seed: int) -> None:
        arrived_s = draws.arrivals_s(spec.arrivals, self.world.duration_s, seed, p)
        stages: Sequence[Stage]
        if spec.execution == "looping":
            rings = [
                RingStage(self._engine, f"{spec.name}-stage-{k}", p, k, spec, len(arrived_s), factors)
                for k, factors in enumerate(self._factors(p, spec, len(arrived_s), seed))
            ]
            steps = draws.steps(spec.steps, len(arrived_s), seed, p)
            self._flows.append(Ring(self.world, spec, rings, arrived_s, steps, self._served))
            stages = rings
        else:
            before = predecessors(spec)
            stages = self._single_pass_stages(p, spec, before, arrived_s, seed)
            self._set_distances(spec, stages, before)
            hop_s = self.world.hop_s
            self._flows.append(SinglePass(self._engine, stages, before, arrived_s, hop_s, self._served))
        self._pipelines.append([Unit(stage, seed) for stage in stages])
        self._unserved += len(arrived_s) > 0

    def _single_pass_stages(
        self, p: int, spec: PipelineSpec, before: Sequence[tuple[int, ...]], arrived_s: Floats, seed: int
    ) -> list[Stage]:
        """Stages that wait for nothing, and stages under a scheduler."""
        shares = stage_shares(spec.stages, before)
        due_s = spec.slo.deadline_s or math.inf
        times_s = array.array("d", arrived_s.tobytes())
        stages: list[Stage] = []
        for k, factors in enumerate(self._factors(p, spec, len(arrived_s), seed)):
            stage, function = spec.stages[k], f"{spec.name}-stage-{k}"
            if stage.batching == "eager":
                stages.append(Stage(self._engine, function, p, k, stage, len(arrived_s), factors))
            else:
                stages.append(
                    ScheduledStage(self._engine, function, p, k, stage, times_s, due_s, shares[k], factors)
                )
        return stages

    def _factors(self, p: int, spec: PipelineSpec, count: int, seed: int) -> list[array.array[float] | None]:
        return [draws.factors(stage.scv, count, seed, p, k) for k, stage in enumerate(spec.stages)]

    def _set_distances(
        self, spec: PipelineSpec, stages: Sequence[Stage], before: Sequence[tuple[int, ...]]
    ) -> None:
        """What the way between two nodes takes beyond a hop."""
        world = self.world
        if not self._cluster.has_nodes or (world.network_s <= world.hop_s and not world.network_bps):
            return
        further_s = max(0.0, world.network_s - world.hop_s)
        for k, stage in enumerate(stages):
            if before[k]:
                sent_bytes = max(spec.stages[j].activation_bytes for j in before[k])
                stage.set_distance(further_s + (sent_bytes / world.network_bps if world.network_bps else 0.0))

    # ------------------------------------------------------------------ time

    @property
    def now_s(self) -> float:
        """Seconds since the world's start."""
        return self._engine.now_s

    @property
    def is_served(self) -> bool:
        """Whether there was traffic and all of it has been served."""
        return self.has_traffic and not self._unserved

    @property
    def is_stuck(self) -> bool:
        """Whether nothing will ever happen unless somebody acts."""
        return not self._engine.heap

    def advance(self, to_s: float) -> None:
        """Lets the world run to a time; where all requests are served on the way, to that moment only."""
        self._engine.run_until(to_s)

    def _served(self) -> None:
        self._unserved -= 1
        if not self._unserved:
            self._engine.stop()

    def _fail(self, at_s: float, failure: FailureSpec) -> None:
        if failure.function:
            self.fleet.fail_replica(at_s, failure.function)
        else:
            self.fleet.fail_node(at_s, failure.node, failure.for_s)

    # ------------------------------------------------------------------ the port

    def observe(self) -> Snapshot:
        """See `Platform.observe`."""
        self._need_open()
        now_s = self._engine.now_s
        overrides = self._overrides
        pipelines = []
        for spec, eyes, stages in zip(self.world.pipelines, self._eyes, self._pipelines, strict=True):
            views = []
            for eye, unit in zip(eyes, stages, strict=True):
                function = unit.stage.function
                waits_at = stages[0].stage if spec.execution == "looping" else unit.stage
                if unit.tally.desired == 0 and waits_at.queue:
                    self._wakes.add(function)
                views.append(eye.look(now_s, function in self._wakes, overrides.get(function)))
            pipelines.append(
                PipelineView(
                    pipeline=spec.name,
                    execution=spec.execution,
                    slo=spec.slo,
                    stages=tuple(views),
                    batching=_batching(spec),
                )
            )
        return Snapshot(
            at_s=self._epoch_s + now_s,
            pipelines=tuple(pipelines),
            functions=tuple(
                msgspec.structs.replace(f, override=overrides.get(name), wake=name in self._wakes)
                for name, f in self._plain.items()
            ),
            budget_replicas=self.world.budget_replicas,
            nodes=tuple([eye.look() for eye in self._node_eyes if not eye.is_away]),
        )

    def apply(self, actions: Sequence[Action]) -> None:
        """See `Platform.apply`."""
        self._need_open()
        for action in actions:
            self._do(self._engine.now_s, action)

    def _do(self, at_s: float, action: Action) -> None:
        match action:
            case SetReplicas(function, replicas, sites, victims):
                if function in self._units:
                    self.fleet.scale(at_s, self._units[function], replicas, sites, victims)
                elif function in self._plain:
                    self._plain[function] = msgspec.structs.replace(
                        self._plain[function], desired=replicas, ready=replicas
                    )
            case SetCpu(function, cores):
                if function in self._units:
                    self.fleet.set_cores(at_s, self._units[function], cores)
            case PublishKeyStages(pipeline, ranking):
                for spec, stages in zip(self.world.pipelines, self._pipelines, strict=True):
                    if spec.name == pipeline:
                        names = [unit.stage.function for unit in stages]
                        first = ranking[: self.world.load.key_stages]
                        key = [names[entry.stage] for entry in first if 0 <= entry.stage < len(names)]
                        self.fleet.publish(at_s, key)
            case LiftOverride(function):
                self._overrides.pop(function, None)
            case ClearWake(function):
                self._wakes.discard(function)
            case _:
                assert_never(action)

    # ------------------------------------------------------------------ people

    def deploy(self, view: FunctionView) -> None:
        """Adds a function that is no stage; its replicas are ready at once."""
        self._plain[view.function] = view

    def intend(self, function: str, *, override: Override | None = None, wake: bool = False) -> None:
        """A person's scale request, or a request that waits for a function at zero."""
        if override is not None:
            self._overrides[function] = override
        if wake:
            self._wakes.add(function)

    def desired(self, function: str) -> int | None:
        """Replicas wanted last of a function."""
        unit = self._units.get(function)
        return unit.tally.desired if unit is not None else self._plain[function].desired

    # ------------------------------------------------------------------ end

    def close(self) -> str:
        """Ends the world; answers the digest of its log, empty without one."""
        self._is_closed = True
        return self._log.close() if self._log is not None else ""

    def outcome(self, wall_s: float = 0.0, digest: str = "") -> Outcome:
        """What happened until now."""
        at_s = self._engine.now_s
        pipelines = []
        for spec, flow, units in zip(self.world.pipelines, self._flows, self._pipelines, strict=True):
            finished_s = np.frombuffer(flow.finished_s, dtype=np.float64).copy()
            stages = [stage_outcome(unit, at_s) for unit in units]
            pipelines.append(pipeline_outcome(spec.name, flow.arrived_s, finished_s, stages, spec.tokens))
        units = list(self._units.values())
        on_gpus = [u.stage.spec.gpus > 0 for u in units]
        if self._cluster.has_nodes:
            gpu_s = self._cluster.gpu_s(at_s)
        else:
            gpu_s = math.fsum(u.tally.replica_s * u.stage.spec.gpus for u in units)
        gpu_s += math.fsum(u.tally.replica_s for u, on in zip(units, on_gpus, strict=True) if not on)
        return Outcome(
            pipelines=tuple(pipelines),
            ended_s=at_s,
            gpu_s=gpu_s,
            cpu_core_s=math.fsum(u.tally.core_s for u in units),
            events=self._engine.events,
            wall_s=wall_s,
            log_sha256=digest,
        )

    def _need_open(self) -> None:
        if self._is_closed:
            raise PlatformError("the simulated world has ended")


def _slots(spec: PipelineSpec) -> int | None:
    return spec.slots if spec.execution == "looping" else None


def _batching(spec: PipelineSpec) -> str:
    """The batch policy that all stages of a pipeline share, empty where they differ."""
    policies = {stage.batching for stage in spec.stages}
    return policies.pop() if len(policies) == 1 else ""
