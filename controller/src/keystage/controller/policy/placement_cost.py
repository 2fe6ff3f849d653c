"""What a place for one replica of a stage costs, in nats: start time, spread, closeness, memory.

Before it: a stage that wants replicas. After it: `policy.placement` takes the cheapest place.
The terms, and what they are worth against each other:

    start     seconds from wanted to ready there / TRADE_S: a nat of divergence is worth 0.3 s. A load
              n log(n / q) with q = capacity share * exp(-start / TRADE_S) is the same thing.
    spread    key stages: regime `spare`: the part of the node's GPUs that is taken;
              regime `contended`, and stages without GPUs, of which no regime speaks: marginal of
              n log(n / capacity share) (`maths.divergence`).
    packing   other stages: the part of the node's GPUs that is free, and a nat on nodes that host key
              stages, so that these can grow there.
    reserve   other stages: what key stages may want next is taken only where there is nothing else.
    near      a tenth of a nat less on a node that hosts both neighbours: hops are milliseconds.
    memory    key stages: log 2 more where host memory cannot keep the parameters for the next start.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from keystage.controller.domain.snapshot import StageView, StartTimes
from keystage.controller.maths import divergence
from keystage.controller.maths.estimator import is_number
from keystage.controller.policy.placement_index import NodeIndex

TRADE_S = 0.3
NEAR = 0.1
FORGETFUL = math.log(2)
MOST_START_S = 1e6
"""Longer start times are not believed."""

HOST = 1.0
RESERVE = 1e3
ASSUMED_CORES = 1.0
"""Cores of a replica without GPUs whose cores nobody tells: a process."""


@dataclasses.dataclass(frozen=True, slots=True)
class Want:
    """A stage that wants a place.

    Attributes:
        function: its name.
        gpus: GPUs of a replica.
        gpu_bytes: memory on each.
        cores: CPU cores of a replica.
        parameter_bytes: size of its parameters.
        starts: seconds by source, in order GPU, host memory, disk, elsewhere; infinite where there is none.
        is_key: whether it is a key stage.
        ready_on: nodes where a replica serves.
        near: nodes of neighbouring stages with the part of the neighbours there.
    """

    function: str
    gpus: int
    gpu_bytes: int
    cores: float
    parameter_bytes: int
    starts: tuple[float, float, float, float]
    is_key: bool
    ready_on: frozenset[int]
    near: Mapping[int, float]

    @property
    def key_units(self) -> int:
        """What a replica adds to its node's key-stage load."""
        return max(1, self.gpus) if self.is_key else 0


def want_of(stage: StageView, is_key: bool, ready_on: frozenset[int], near: Mapping[int, float]) -> Want:
    """Reads what placement needs of a stage."""
    cores = ASSUMED_CORES if stage.gpus <= 0 else 0.0
    if stage.cpu is not None and is_number(stage.cpu.cores):
        cores = max(0.0, stage.cpu.cores)
    return Want(
        function=stage.scale.function,
        gpus=max(0, stage.gpus),
        gpu_bytes=stage.gpu_bytes,
        cores=cores,
        parameter_bytes=stage.parameter_bytes,
        starts=_starts(stage.starts),
        is_key=is_key,
        ready_on=ready_on,
        near=near,
    )


def _starts(starts: StartTimes | None) -> tuple[float, float, float, float]:
    if starts is None:
        return math.inf, math.inf, math.inf, 0.0
    gpu, memory, disk, remote = (
        value if is_number(value) and 0 <= value <= MOST_START_S else math.inf
        for value in (starts.gpu_s, starts.memory_s, starts.disk_s, starts.remote_s)
    )
    if math.isinf(remote):  # nobody tells: not sooner than from any source that is told
        remote = max((v for v in (gpu, memory, disk) if math.isfinite(v)), default=0.0)
    return gpu, memory, disk, remote


def start_s(want: Want, index: NodeIndex, j: int) -> float:
    """Seconds a replica takes to start on a node, from the fastest source that has its parameters."""
    gpu, memory, disk, best_s = want.starts
    if gpu < best_s and j in want.ready_on:
        best_s = gpu
    if memory < best_s and index.memory.holds(j, want.function):
        best_s = memory
    if disk < best_s and index.disk.holds(j, want.function):
        best_s = disk
    return best_s


def place_cost(want: Want, index: NodeIndex, j: int, contended: bool) -> float:
    """Cost of one more replica on a node that has room, in nats."""
    cost = start_s(want, index, j) / TRADE_S - NEAR * want.near.get(j, 0.0)
    if want.is_key:
        can_keep = 2 * want.parameter_bytes <= 1 << index.memory_level(j)
        if not can_keep and not index.memory.holds(j, want.function):
            cost += FORGETFUL
        return cost + _spread(want, index, j, contended)
    cost += _room(want, index, j)
    if index.key_gpus[j] or index.key_cpu[j]:
        cost += HOST
    if want.gpus and index.free[j] - min(index.reserved[j], index.free[j]) < want.gpus:
        cost += RESERVE
    return cost


def _spread(want: Want, index: NodeIndex, j: int, contended: bool) -> float:
    if want.gpus and not contended:
        return 1 - _room(want, index, j)
    if want.gpus:
        share = len(index.gpus[j]) / index.total_gpus
        return divergence.marginal(index.key_gpus[j], want.gpus, share)
    return divergence.marginal(index.key_cpu[j], 1, 1 / len(index.nodes))


def _room(want: Want, index: NodeIndex, j: int) -> float:
    """The part of a node that is free, by GPUs or (coarsely, 256 cores count as all) by cores."""
    if want.gpus:
        return index.free[j] / len(index.gpus[j]) if index.gpus[j] else 0.0
    return min(1.0, index.cores_level(j) / 8)
