"""Snapshots and plans for tests of placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from keystage.controller.domain.decision import PlacementReport
from keystage.controller.domain.snapshot import (
    FunctionView,
    GpuView,
    NodeView,
    PipelineView,
    Placed,
    Slo,
    Snapshot,
    StageView,
    StartTimes,
)
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy.placement import place
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings

GB = 10**9
STARTS = StartTimes(memory_s=0.8, disk_s=5.6)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a stage's replica takes."""

    gpus: int = 1
    gpu_bytes: int = 48 * GB
    starts: StartTimes = STARTS
    parameter_bytes: int = 5 * GB


def node(
    name: str,
    gpus: Sequence[int] = (0, 0, 0, 0),
    memory: Sequence[str] = (),
    cores: float = 100.0,
    disk: Sequence[str] = (),
    gpu_bytes: int = 48 * GB,
) -> NodeView:
    """A node whose GPUs carry so many exclusive replicas each."""
    views = tuple(GpuView(gpu_bytes, 0 if n else gpu_bytes, n) for n in gpus)
    return NodeView(
        node=name, gpus=views, cores_free=cores, memory_free_bytes=100 * GB,
        in_memory=frozenset(memory), on_disk=frozenset(disk),
    )  # fmt: skip


def stage(k: int, placed: Sequence[Placed] = (), kind: Kind | None = None, pipeline: str = "p") -> StageView:
    kind = kind or Kind()
    ready = sum(p.is_ready for p in placed)
    scale = FunctionView(
        function=f"{pipeline}-stage-{k}", desired=len(placed), ready=ready, placed=tuple(placed)
    )
    return StageView(
        stage=k, scale=scale, starts=kind.starts, gpu_bytes=kind.gpu_bytes, gpus=kind.gpus,
        parameter_bytes=kind.parameter_bytes,
    )  # fmt: skip


def snapshot(nodes: Sequence[NodeView], *pipelines: Sequence[StageView]) -> Snapshot:
    views = tuple(
        PipelineView(
            pipeline="p" if i == 0 else f"p{i}", execution="single-pass", slo=Slo(), stages=tuple(stages)
        )
        for i, stages in enumerate(pipelines)
    )
    return Snapshot(at_s=0.0, pipelines=views, nodes=tuple(nodes))


def placed_by(
    seen: Snapshot,
    wanted: Sequence[int],
    order: Sequence[int] = (),
    settings: PolicySettings | None = None,
    contended: bool = False,
) -> tuple[list[Plan], PlacementReport]:
    """Places the wanted numbers of every stage; `order` is the key-stage list of every pipeline."""
    plans, numbers = [], iter(wanted)
    published = {}
    for view in seen.pipelines:
        ranks = list(order) or list(range(len(view.stages)))
        published[view.pipeline] = tuple(ranks)
        plans += [
            Plan(
                scale=s.scale, wanted=next(numbers), reason="", is_stage=True, pipeline=view.pipeline,
                stage=s.stage, rank=ranks.index(s.stage),
            )
            for s in view.stages
        ]  # fmt: skip
    state = PolicyState(published=published, is_contended=contended)
    result, report = place(settings or PolicySettings(), seen, plans, state, published)
    assert report is not None
    return result, msgspec.json.decode(msgspec.json.encode(report), type=PlacementReport)
