"""What a controller sees of the simulated world: the snapshot, built of cached parts.

Before it: `platform.observe`. After it: a steering decides on it. It shows what the local world shows
and no more: cumulative counters, workers, replica numbers, nodes. Parts that did not change since the last
look (replica lists, nodes) are the same objects again.
"""

from __future__ import annotations

from keystage.controller.domain.snapshot import (
    BatchProfile,
    Counters,
    CpuView,
    FunctionView,
    GpuView,
    NodeView,
    Placed,
    RouterSample,
    StageView,
    Starting,
    StartTimes,
    WorkerSample,
)
from keystage.simulator.api import LoadSpec, World
from keystage.simulator.cluster import Cluster, Node, gpu_share_bytes
from keystage.simulator.fleet import Fleet, Unit
from keystage.simulator.scheduled import ScheduledStage
from keystage.simulator.stage import Stage
from keystage.simulator.tally import Source


class StageEye:
    """Looks at one stage.

    Args:
        world: the world.
        fleet: start times.
        cluster: whether replicas have places worth telling, and the sizes of GPUs.
        unit: the stage with its numbers.
        epoch_s: Unix seconds of the world's 0.
        slots: sessions a replica holds, None in single-pass pipelines.
    """

    def __init__(
        self,
        world: World,
        fleet: Fleet,
        cluster: Cluster,
        unit: Unit,
        epoch_s: float,
        slots: int | None,
    ) -> None:
        self._unit = unit
        self._epoch_s = epoch_s
        self._has_nodes = cluster.has_nodes
        self._slots = slots
        spec = unit.stage.spec
        self._incarnation = f"simulated-{unit.stage.pipeline}"
        self._starts = _start_times(world.load, fleet, unit)
        self._gpu_bytes = _gpu_bytes(cluster, unit.stage)
        first = next(iter(unit.stage.replicas.values()), None)
        self._first_start_s = fleet.parameters.start_s(spec, first.source) if first is not None else None
        self._seen_version = -1
        self._starting: tuple[Starting, ...] = ()
        self._placed: tuple[Placed, ...] = ()
        self._ready = 0

    def look(self, at_s: float, wake: bool, override: object = None) -> StageView:
        """The stage as it is now."""
        unit = self._unit
        stage, tally, spec = unit.stage, unit.tally, unit.stage.spec
        if self._seen_version != unit.version:
            self._refresh()
        cpu = None
        if spec.cpu_core_s:
            cost_s = spec.cpu_core_s
            cpu = CpuView(stage.cores, spec.most_cores, cost_s, cost_s, cost_s, base=spec.cores)
        return StageView(
            stage=stage.index,
            scale=FunctionView(
                function=stage.function,
                desired=tally.desired,
                ready=self._ready,
                starting=self._starting,
                min_replicas=spec.min_replicas,
                max_replicas=spec.max_replicas,
                override=override,  # type: ignore[arg-type]
                wake=wake,
                placed=self._placed,
            ),
            start_s=_median(tally.starts_s) if tally.starts_s else self._first_start_s,
            profile_s=stage.alpha_s + stage.beta_s,
            routers=(RouterSample(incarnation=self._incarnation, at_s=at_s, counters=_counters(stage)),),
            workers=self._workers(stage, at_s),
            batch=BatchProfile(stage.alpha_s, stage.beta_s, stage.most),
            starts=self._starts,
            cpu=cpu,
            gpu_bytes=self._gpu_bytes,
            gpus=spec.gpus if self._has_nodes else 0,
            parameter_bytes=spec.parameter_bytes,
        )

    def _workers(self, stage: Stage, at_s: float) -> tuple[WorkerSample, ...]:
        is_scheduled = isinstance(stage, ScheduledStage)
        slots = self._slots if self._slots is not None else stage.most
        return tuple(
            [
                WorkerSample(
                    replica=r.name,
                    slots=slots,
                    held_slots=r.held if self._slots is not None else len(r.items or ()),
                    busy_s=r.busy_s,
                    rows=r.rows,
                    served_s=at_s - r.ready_s if is_scheduled else None,
                    idle_s=max(0.0, at_s - r.ready_s - r.busy_s) if is_scheduled else None,
                )
                for r in stage.replicas.values()
                if r.state == "ready"
            ]
        )

    def _refresh(self) -> None:
        replicas = self._unit.stage.replicas.values()
        self._seen_version = self._unit.version
        self._ready = sum(r.state == "ready" for r in replicas)
        self._starting = tuple(
            Starting(r.name, self._epoch_s + r.ready_s) for r in replicas if r.state == "starting"
        )
        if self._has_nodes:
            self._placed = tuple(
                Placed(r.name, r.node.name, r.gpus, r.state == "ready")
                for r in replicas
                if r.state in ("starting", "ready")
            )


class NodeEye:
    """Looks at one node.

    Args:
        node: the node.
        functions: every stage function, whose parameters lie on a node with a disk.
        load: says who holds what.
    """

    def __init__(self, node: Node, functions: frozenset[str], load: LoadSpec) -> None:
        self._node = node
        self._on_disk = functions if node.spec.disk and load.disk_bps > 0 else frozenset()
        self._in_all = functions if load.holders == "all" and load.memory_bps > 0 else None
        self._seen_version = -1
        self._view = NodeView(node=node.name)

    @property
    def is_away(self) -> bool:
        """Whether there is nothing to see."""
        return self._node.is_away

    def look(self) -> NodeView:
        """The node as it is now; the same object as last time where nothing changed."""
        node = self._node
        if self._seen_version != node.version:
            self._seen_version = node.version
            self._view = NodeView(
                node=node.name,
                gpus=tuple(GpuView(g.total_bytes, g.free_bytes, g.holders) for g in node.gpus),
                cores_free=node.cores_free,
                memory_free_bytes=node.memory_free_bytes,
                in_memory=frozenset(node.memory) if self._in_all is None else self._in_all,
                on_disk=self._on_disk,
            )
        return self._view


def _counters(stage: Stage) -> Counters:
    return Counters(
        arrivals=stage.arrivals,
        gap_sum_s=stage.last_arrival_s - stage.first_arrival_s,
        gap_sq_sum_s2=stage.gap_sq_sum_s2,
        services=stage.services,
        service_sum_s=stage.service_sum_s,
        service_sq_sum_s2=stage.service_sq_sum_s2,
        sojourn_sum_s=stage.sojourn_sum_s,
        queue=len(stage.queue),
        in_flight=stage.in_flight,
        due=stage.due if isinstance(stage, ScheduledStage) else None,
        late=stage.late if isinstance(stage, ScheduledStage) else None,
        dropped=stage.dropped if isinstance(stage, ScheduledStage) else None,
    )


def _start_times(load: LoadSpec, fleet: Fleet, unit: Unit) -> StartTimes:
    spec = unit.stage.spec
    known: dict[Source, bool] = {
        "gpu": load.gpu_bps > 0 and spec.gpus > 0,
        "memory": load.memory_bps > 0 and load.holders != "none",
        "disk": load.disk_bps > 0,
        "remote": load.remote_bps > 0 or not (load.gpu_bps or load.memory_bps or load.disk_bps),
    }
    return StartTimes(
        **{f"{s}_s": fleet.parameters.start_s(spec, s) for s, is_known in known.items() if is_known}
    )


def _gpu_bytes(cluster: Cluster, stage: Stage) -> int:
    """GPU memory of a replica on each of its GPUs; alone on it: all of the smallest GPU that holds it."""
    share_bytes = gpu_share_bytes(stage.spec)
    if stage.spec.shared or not stage.spec.gpus:
        return share_bytes
    sizes = {gpu.total_bytes for node in cluster.nodes for gpu in node.gpus if gpu.total_bytes >= share_bytes}
    return min(sizes, default=share_bytes)


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
