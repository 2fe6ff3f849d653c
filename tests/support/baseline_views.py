"""Snapshots for the rivals' unit tests: stages with given counters, and what a rival sees of one."""

from __future__ import annotations

from keystage.baselines.seen import Seen
from keystage.controller.domain.snapshot import (
    BatchProfile,
    Counters,
    FunctionView,
    PipelineView,
    RouterSample,
    Slo,
    Snapshot,
    StageView,
)

ONE_S = BatchProfile(alpha_s=1.0, beta_s=0.0, most=1)
TENTH = BatchProfile(alpha_s=0.1, beta_s=0.0, most=1)


def stage(
    index: int = 0,
    arrivals: float | None = 0.0,
    *,
    queue: float = 0.0,
    services: float = 0.0,
    sojourn_s: float = 0.0,
    desired: int = 1,
    batch: BatchProfile | None = TENTH,
    incarnation: str = "a",
    **scale: object,
) -> StageView:
    function = FunctionView(
        function=f"p-stage-{index}",
        desired=desired,
        ready=desired,
        **scale,  # type: ignore[arg-type]
    )
    counters = Counters(
        arrivals=arrivals,
        services=services,
        service_sum_s=services * 0.1,
        sojourn_sum_s=sojourn_s,
        queue=queue,
    )
    sample = RouterSample(incarnation=incarnation, at_s=arrivals, counters=counters)
    return StageView(stage=index, scale=function, routers=(sample,), batch=batch, start_s=2.0)


def snapshot(at_s: float, *stages: StageView, slo_s: float = 2.0, **more: object) -> Snapshot:
    view = PipelineView(pipeline="p", execution="single-pass", slo=Slo(deadline_s=slo_s), stages=stages)
    return Snapshot(at_s=at_s, pipelines=(view,), **more)  # type: ignore[arg-type]


def seen(scale: FunctionView | None = None, **changes: object) -> Seen:
    fields: dict[str, object] = {
        "function": "p-stage-0", "scale": scale or FunctionView(function="p-stage-0", desired=1, ready=1),
        "arrivals": 0.0, "services": 0.0, "sojourn_s": 0.0, "queue": 0.0, "batch": TENTH, "gpus": 1,
        "gpu_bytes": 0, "start_s": 2.0,
    }  # fmt: skip
    return Seen(**{**fields, **changes})  # type: ignore[arg-type]
