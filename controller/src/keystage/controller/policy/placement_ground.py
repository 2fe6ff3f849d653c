"""The cluster as placement sees it at the start of a tick: nodes, key-stage load, reserve.

Before it: `decide` has final numbers. After it: `placement` chooses places. It is kept between ticks for
speed alone: stages and nodes whose views are the same objects as last time are not read again.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from keystage.controller.domain.snapshot import NodeView, PipelineView, Placed, Snapshot, StageView
from keystage.controller.maths import divergence
from keystage.controller.policy.placement_index import NodeIndex
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.shares import Predecessors, predecessors
from keystage.controller.policy.smoother import KEY_RATIO


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One stage whose number changes.

    Attributes:
        at: place of its plan in the list of plans.
        plan: its plan.
        stage: as observed.
        around: its neighbours in the pipeline's graph.
        is_key: whether it is a key stage.
    """

    at: int
    plan: Plan
    stage: StageView
    around: tuple[StageView, ...]
    is_key: bool


Orders = Mapping[str, tuple[int, ...]]
"""Key-stage order by pipeline, as published."""


def key_stages(view: PipelineView, orders: Orders) -> frozenset[int]:
    """Indices of the stages of a pipeline that count as key stages."""
    return frozenset(orders.get(view.pipeline, ())[: math.ceil(KEY_RATIO * len(view.stages))])


def members(snapshot: Snapshot, plans: Sequence[Plan], orders: Orders) -> list[Member]:
    """The stages whose number changes."""
    views = {view.pipeline: view for view in snapshot.pipelines}
    graphs: dict[str, Predecessors] = {}
    found: list[Member] = []
    for at, plan in enumerate(plans):
        view = views.get(plan.pipeline) if plan.is_stage and plan.scale.desired != plan.wanted else None
        if view is None:
            continue
        stages = view.stages
        k = next((k for k, s in enumerate(stages) if s.scale.function == plan.scale.function), None)
        if k is not None:
            is_key = plan.stage in key_stages(view, orders)
            graph = graphs.get(view.pipeline)
            if graph is None:
                graph = graphs[view.pipeline] = predecessors(stages)
            found.append(Member(at, plan, stages[k], _neighbours(stages, graph, k), is_key))
    return found


def _neighbours(stages: Sequence[StageView], graph: Predecessors, k: int) -> tuple[StageView, ...]:
    """Stages that hand their output to the one at place k, and those that take its own."""
    return tuple(s for i, s in enumerate(stages) if i in graph[k] or k in graph[i])


class Ground:
    """Index of nodes plus key-stage load; see the module.

    Attributes:
        index: the nodes.
        key_gpus: GPUs the key stages' reserve needs (one more replica each).
    """

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self.index = NodeIndex(nodes)
        self.key_gpus = 0
        self._seen: dict[str, tuple[tuple[Placed, ...], bool, int]] = {}
        self._replicas: Counter[int] = Counter()

    def is_of(self, nodes: Sequence[NodeView]) -> bool:
        """Whether these seem to be the nodes it has: a cheap test, `update` makes sure."""
        mine = self.index.nodes
        return len(mine) == len(nodes) and mine[0].node == nodes[0].node and mine[-1].node == nodes[-1].node

    def update(self, snapshot: Snapshot, orders: Orders) -> bool:
        """Reads what changed; False if the nodes are others, then a new ground is needed."""
        if not self.index.update(snapshot.nodes):
            return False
        seen, touched, count = self._seen, set[int](), 0
        for view in snapshot.pipelines:
            keys = key_stages(view, orders)
            count += len(view.stages)
            for stage in view.stages:
                scale, is_key = stage.scale, stage.stage in keys
                before = seen.get(scale.function)
                if before is not None:
                    if before[0] is scale.placed and before[1] == is_key and before[2] == stage.gpus:
                        continue
                    self._count(before, -1, touched)
                now = (scale.placed, is_key, stage.gpus)
                seen[scale.function] = now
                self._count(now, 1, touched)
        if len(seen) > count:
            for gone in seen.keys() - {s.scale.function for v in snapshot.pipelines for s in v.stages}:
                self._count(seen.pop(gone), -1, touched)
        self.index.classify(touched)
        return True

    def _count(self, told: tuple[tuple[Placed, ...], bool, int], sign: int, touched: set[int]) -> None:
        placed, is_key, gpus = told
        if not is_key:
            return
        index, gpus = self.index, max(0, gpus)
        self.key_gpus += sign * gpus
        on = [j for j in (index.number.get(p.node) for p in placed) if j is not None]
        for j in on:
            index.load(j, gpus > 0, sign * max(1, gpus))
            touched.add(j)
        self._replicas[gpus] += sign * len(on)
        if on:  # its parameters are there: one more starts fastest on the node of the youngest
            index.reserved[on[-1]] += sign * gpus

    def where(self, placed: Sequence[Placed]) -> frozenset[int]:
        """Nodes on which some of these replicas serve."""
        number = self.index.number
        return frozenset(number[p.node] for p in placed if p.is_ready and p.node in number)

    def near(self, around: Sequence[StageView]) -> Mapping[int, float]:
        """Nodes of neighbouring stages with the part of the neighbours that is there."""
        found: dict[int, float] = {}
        for stage in around:
            for j in {self.index.number.get(p.node) for p in stage.scale.placed}:
                if j is not None:
                    found[j] = found.get(j, 0.0) + 1 / len(around)
        return found

    def reserve(self) -> tuple[int, int]:
        """GPUs kept for the key stages, and GPUs there is no room to keep."""
        index = self.index
        kept = sum(min(r, f) for r, f in zip(index.reserved, index.free, strict=True) if r)
        return kept, max(0, self.key_gpus - kept)

    def divergence(self, added: Mapping[int, int]) -> tuple[float, float]:
        """KL of the key-stage load against capacity share, and the least of so many replicas; nats.

        Args:
            added: replicas of key stages placed in this tick, by the GPUs of each.
        """
        index = self.index
        replicas = Counter(self._replicas)
        replicas.update(added)
        load = index.key_gpus
        if index.widths[0]:
            load = [n if width else 0 for n, width in zip(load, index.width, strict=True)]
        if any(load):
            del replicas[0]
            kl = divergence.kl(load, index.width)
            return kl, min(kl, divergence.least_kl(replicas, index.widths))
        count = len(index.nodes)
        kl = divergence.kl(index.key_cpu, [1] * count)
        return kl, min(kl, divergence.least_kl({1: replicas[0]}, {1: count}))
