"""Reports of a controller that never ran, for what reads them."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from keystage.observability.api import (
    DecisionReport,
    FunctionReport,
    GpuReport,
    NodeReport,
    PipelineReport,
    Report,
    StageReport,
)

GIB = 1 << 30


def stage(index: int, pipeline: str = "llm", **changes: Any) -> StageReport:
    """A stage that is well: 2 of 2 ready."""
    well: dict[str, Any] = {
        "desired": 2,
        "ready": 2,
        "queue": 1.0,
        "in_flight": 3.0,
        "arrival_rps": 14.2,
        "arrival_cv": 3.1,
        "service_s": 0.061,
        "wait_s": 0.02,
        "utilisation_ratio": 0.43,
        "share_s": 0.2,
        "reason": "waits within 80 ms",
    }
    return StageReport(stage=index, function=f"{pipeline}-stage-{index}", **{**well, **changes})


def pipeline(name: str = "llm", count: int = 4, **changes: Any) -> PipelineReport:
    """A pipeline that is well, whose stage 3 is key where it has so many."""
    stages = tuple(stage(i, name, **({"is_key": True, "rank": 0} if i == 3 else {})) for i in range(count))
    well: dict[str, Any] = {
        "execution": "looping",
        "stages": stages,
        "arrival_rps": 14.2,
        "latency_s": 0.41,
        "deadline_s": 2.0,
        "attainment_ratio": 0.99,
    }
    return PipelineReport(pipeline=name, **{**well, **changes})


def decision(number: int, at_s: float, function: str = "llm-stage-3", **changes: Any) -> DecisionReport:
    """One more replica."""
    told: dict[str, Any] = {
        "kind": "replicas",
        "before": float(number),
        "after": float(number + 1),
        "text": f"stage 3: {number} -> {number + 1}, predicted wait 310 ms > 80 ms",
        "inputs": {"predicted_wait_s": 0.31, "arrival_rps": 14.2, "arrival_cv": 3.1, "ready_replicas": 2.0},
    }
    return DecisionReport(number=number, at_s=at_s, function=function, **{**told, **changes})


def report(*pipelines: PipelineReport, at_s: float | None = None, **changes: Any) -> Report:
    """All that is given, a function, two nodes and two decisions, looked at now."""
    now_s = time.time() if at_s is None else at_s
    told: dict[str, Any] = {
        "controller": "c-1",
        "number": 7,
        "version": "0.1.0",
        "pipelines": pipelines or (pipeline(),),
        "functions": (FunctionReport(function="echo", desired=1, ready=1),),
        "nodes": (
            NodeReport(
                node="a",
                gpus=(GpuReport(total_bytes=80 * GIB, free_bytes=12 * GIB, replicas=3),),
                cores_free=6.0,
                memory_free_bytes=20 * GIB,
                in_memory=("llm-stage-3",),
            ),
            NodeReport(node="b", cores_free=2.5),
        ),
        "decisions": (
            decision(1, now_s - 40, "llm", kind="key-stages", text="key stages in order: 3", inputs={}),
            decision(2, now_s - 4),
        ),
    }
    return Report(at_s=now_s, **{**told, **changes})


def encoded(value: Report) -> bytes:
    """As a gateway sends it."""
    return msgspec.json.encode(value)
