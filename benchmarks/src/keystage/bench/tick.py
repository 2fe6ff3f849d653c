"""`keystage bench tick`: what one tick of the policy costs, from 10 to 1,000 pipelines of eight stages.

Before it: nothing; the world is made here. After it: the frame reports. A tick is `decide`: estimates,
correction, smoothing, compensation, placement, actions. Snapshots are made outside the timed part, as a
platform hands them over. Writing the decisions log is timed apart. Nodes: ten a pipeline, four GPUs each.

In one tick one stage in twenty, drawn over all pipelines, has new counters (`some`), or every stage has
(`all`); now and then 400 items wait at one, so that replicas come and go and are placed. Clocks of the
routers move in every tick, as they do in a world that is polled. The process runs on one core: nothing in
`decide` starts threads but numpy's linear algebra, which it does not use.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Iterator

import msgspec
import numpy as np

from keystage.bench.frame import BenchResult, Figure
from keystage.controller.decisions import Record
from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.snapshot import (
    BatchProfile,
    Counters,
    FunctionView,
    GpuView,
    NodeView,
    PipelineView,
    Placed,
    RouterSample,
    Slo,
    Snapshot,
    StageView,
    StartTimes,
    WorkerSample,
)
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings

STAGES = 8
NODES_A_PIPELINE = 10
GPUS = 4
GPU_BYTES = 80 << 30
TICK_S = 0.25
CHANGING_RATIO = 0.05
SIZES = (10, 30, 100, 300, 1000)
TICKS = 24
WARM_TICKS = 32
"""Ticks before the timed ones (8 s): the first looks at everything, and what follows, are not steady."""
TARGET_S = 0.25


class TickWorld:
    """Pipelines whose counters grow where a tick says so, on nodes that hold their replicas.

    Args:
        pipelines: how many.
        changing_ratio: part of the stages that change in a tick.
    """

    def __init__(self, pipelines: int, changing_ratio: float) -> None:
        self._random = np.random.default_rng(1)
        self._changing_ratio = changing_ratio
        self._stages = pipelines * STAGES
        self._replicas = [2] * self._stages
        self._busy_ticks = [0] * self._stages
        self._rates_rps = np.repeat(self._random.uniform(10, 60, pipelines), STAGES).tolist()
        self._at_s = 1000.0
        self._nodes_count = pipelines * NODES_A_PIPELINE
        self._free = [GPUS] * self._nodes_count
        self._placed: list[tuple[Placed, ...]] = [()] * self._stages
        self._nodes = [NodeView(node=f"node-{j}") for j in range(self._nodes_count)]
        for i in range(self._stages):
            self._place(i, [(i * 2 + r) % self._nodes_count for r in range(2)])
        for j in range(self._nodes_count):
            self._view_node(j)

    def snapshots(self, ticks: int) -> Iterator[Snapshot]:
        """One snapshot a tick; `apply` in between changes the next."""
        for _ in range(ticks):
            self._at_s += TICK_S
            count = round(self._changing_ratio * self._stages)
            changing = (
                range(self._stages)
                if count == self._stages
                else self._random.choice(self._stages, count, replace=False)
            )
            for i in changing:
                self._busy_ticks[i] += 1
            yield self._snapshot()

    def apply(self, actions: tuple[object, ...]) -> None:
        """Replicas come and go at once: what a start costs is not measured here."""
        for action in actions:
            if not isinstance(action, SetReplicas):
                continue
            pipeline, stage = action.function[1:].split("-stage-")
            i = int(pipeline) * STAGES + int(stage)
            while len(self._placed[i]) > action.replicas:
                gone = self._placed[i][-1]
                self._placed[i] = self._placed[i][:-1]
                j = int(gone.node[5:])
                self._free[j] += 1
                self._view_node(j)
            sites = [int(site.node[5:]) for site in action.sites]
            more = action.replicas - len(self._placed[i])
            if more > 0:
                self._place(i, sites[:more] + self._anywhere(more - len(sites)))
            self._replicas[i] = action.replicas

    def _anywhere(self, count: int) -> list[int]:
        nodes: list[int] = []
        for j, free in enumerate(self._free):
            if len(nodes) >= count:
                break
            if free:
                nodes.append(j)
        return nodes

    def _place(self, i: int, nodes: list[int]) -> None:
        for j in nodes:
            self._free[j] -= 1
            name = f"r{i}-{len(self._placed[i])}"
            self._placed[i] = (*self._placed[i], Placed(name, f"node-{j}", (self._free[j] % GPUS,)))
            self._view_node(j)

    def _view_node(self, j: int) -> None:
        free = self._free[j]
        gpus = tuple(
            GpuView(GPU_BYTES, GPU_BYTES if g < free else 0, 0 if g < free else 1) for g in range(GPUS)
        )
        self._nodes[j] = NodeView(node=f"node-{j}", gpus=gpus, cores_free=64.0)

    def _snapshot(self) -> Snapshot:
        views = []
        for p in range(self._stages // STAGES):
            stages = tuple(self._stage(p, k) for k in range(STAGES))
            views.append(
                PipelineView(
                    pipeline=f"p{p}", execution="single-pass", slo=Slo(deadline_s=0.5), stages=stages
                )
            )
        return Snapshot(at_s=self._at_s, pipelines=tuple(views), nodes=tuple(self._nodes))

    def _stage(self, p: int, k: int) -> StageView:
        i = p * STAGES + k
        service_s = 0.01 + 0.001 * k
        count = float(round(self._busy_ticks[i] * self._rates_rps[i] * TICK_S))
        gap_s = 1 / self._rates_rps[i]
        counters = Counters(
            arrivals=count,
            gap_sum_s=count * gap_s,
            gap_sq_sum_s2=3 * count * gap_s**2,
            services=count,
            service_sum_s=count * service_s,
            service_sq_sum_s2=1.1 * count * service_s**2,
            sojourn_sum_s=count * 1.3 * service_s,
            queue=400.0 if (7 * self._busy_ticks[i] + i) % 50 == 0 else float(self._busy_ticks[i] % 3),
            in_flight=1.0,
        )
        ready = len(self._placed[i])
        workers = tuple(
            WorkerSample(
                replica=r.replica,
                slots=4,
                held_slots=1,
                busy_s=count * service_s / ready,
                rows=count / ready,
            )
            for r in self._placed[i]
        )
        return StageView(
            stage=k,
            scale=FunctionView(
                function=f"p{p}-stage-{k}", desired=self._replicas[i], ready=ready, placed=self._placed[i]
            ),
            start_s=1.0,
            profile_s=service_s,
            routers=(RouterSample(incarnation=f"r{p}", at_s=self._at_s, counters=counters),),
            workers=workers,
            batch=BatchProfile(service_s * 0.6, service_s * 0.4, 4),
            starts=StartTimes(memory_s=1.0, disk_s=5.0),
            gpu_bytes=GPU_BYTES,
            gpus=1,
            parameter_bytes=5 << 30,
        )


def run(*, quick: bool) -> BenchResult:
    """Times ticks for growing numbers of pipelines."""
    rows: list[dict[str, object]] = []
    figures: dict[str, Figure] = {}
    for pipelines in SIZES:
        some = _ticks(pipelines, CHANGING_RATIO, 8 if quick else TICKS)
        every = _ticks(pipelines, 1.0, 4 if quick else TICKS // 2)
        rows.append(
            {
                "pipelines": pipelines,
                "stages": pipelines * STAGES,
                "nodes": pipelines * NODES_A_PIPELINE,
                "tick s, 1 in 20 changing": float(np.median(some)),
                "worst": max(some),
                "tick s, all changing": float(np.median(every)),
                "us a stage, all changing": float(np.median(every)) / (pipelines * STAGES) * 1e6,
            }
        )
        if pipelines == SIZES[-1]:
            meaning = f"one tick of {pipelines} pipelines of {STAGES} stages, one stage in twenty changing, s"
            figures["seconds_1000x8"] = Figure(some, meaning, f"<= {TARGET_S}")
            figures["seconds_1000x8_all"] = Figure(every, "the same with every stage changing, s")
    state_mib, snapshot_mib, log_s = _memory_and_log(SIZES[-1])
    figures["state_mib"] = Figure([state_mib], "memory of the policy's state at the largest size, MiB")
    figures["snapshot_mib"] = Figure([snapshot_mib], "memory of one snapshot there, nodes included, MiB")
    figures["log_line_s"] = Figure([log_s], "making one line of the decisions log there, s (not in the tick)")
    return BenchResult(
        rows,
        figures,
        [
            "a tick is decide(): estimates to actions, placement included; one core; memory by tracemalloc",
            "garbage is collected between the ticks, not in them",
            "a pipeline that shows nothing new is looked at every 5 s (2 s while a surplus is held), in turn",
        ],
    )


def _ticks(pipelines: int, changing_ratio: float, ticks: int) -> list[float]:
    """Seconds of each tick once the world is steady."""
    world, settings, state = TickWorld(pipelines, changing_ratio), PolicySettings(), PolicyState()
    taken: list[float] = []
    for n, snapshot in enumerate(world.snapshots(WARM_TICKS + ticks)):
        gc.collect()
        gc.disable()
        began_s = time.perf_counter()
        decision = decide(settings, snapshot, state)
        ended_s = time.perf_counter()
        gc.enable()
        state = decision.state
        world.apply(decision.actions)
        if n >= WARM_TICKS:
            taken.append(ended_s - began_s)
    return taken


def _memory_and_log(pipelines: int) -> tuple[float, float, float]:
    """MiB of state and of a snapshot, and seconds to make a line of the log."""
    world, settings, state = TickWorld(pipelines, CHANGING_RATIO), PolicySettings(), PolicyState()
    for snapshot in world.snapshots(3):
        before = state
        decision = decide(settings, snapshot, before)
        state = decision.state
        world.apply(decision.actions)
    record = Record(settings=settings, before=before, snapshot=snapshot, decision=decision)
    began_s = time.perf_counter()
    msgspec.json.encode(record)
    log_s = time.perf_counter() - began_s
    tracemalloc.start()
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=PolicyState)
    state_mib = tracemalloc.get_traced_memory()[0] / 2**20
    shown = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot)
    snapshot_mib = tracemalloc.get_traced_memory()[0] / 2**20 - state_mib
    tracemalloc.stop()
    assert len(copy.stages) == len(shown.pipelines) * STAGES
    return state_mib, snapshot_mib, log_s
