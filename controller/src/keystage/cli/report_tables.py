"""What the tables of a report hold: pipelines, stages, functions, nodes. Pure; `columns` makes them fit.

A key stage has the word `key` beside its number, so that nothing is told by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from keystage.cli import judging
from keystage.cli.columns import Column, Row
from keystage.cli.figures import clean, duration, number, objective, percent, rate, size
from keystage.observability.api import FunctionReport, NodeReport, PipelineReport, StageReport

KEY = "key"
BAR = 10
"""Columns of a queue's bar."""
SHOWN_KEYS = 3

Replicas = StageReport | FunctionReport

PIPELINES = (
    Column("pipeline", is_text=True, least=14),
    Column("replicas"),
    Column("arrivals", 1),
    Column("latency", 2),
    Column("objective", 5),
    Column("met", 3),
    Column("stages", 4),
    Column("key stages", 2, is_text=True, least=4),
    Column("what is wrong", 6, is_text=True, least=20),
)
STAGES = (
    Column("stage", is_text=True, least=9),
    Column("replicas"),
    Column("queue", 1),
    Column("", 4, is_text=True, least=BAR),
    Column("wait", 2),
    Column("busy", 1),
    Column("arrivals", 3),
    Column("CV", 4),
    Column("service", 5),
    Column("in flight", 6),
    Column("function", 7, is_text=True, least=12),
    Column("why", 8, is_text=True, least=24),
)
FUNCTIONS = (Column("function", is_text=True), Column("replicas"), Column("why", 1, is_text=True, least=20))
NODES = (
    Column("node", is_text=True),
    Column("GPUs"),
    Column("GPU memory free", 1),
    Column("cores free", 2),
    Column("memory free", 3),
    Column("parameters in memory", 4, is_text=True, least=12),
    Column("on disk", 5, is_text=True, least=12),
)


def pipeline_row(pipeline: PipelineReport) -> Row:
    """A pipeline in one line, for `PIPELINES`."""
    wrong = [str(fault) for fault in judging.of_pipeline(pipeline)]
    ready, desired, starting = (
        sum(getattr(stage, name) for stage in pipeline.stages) for name in ("ready", "desired", "starting")
    )
    return (
        Text(clean(pipeline.pipeline), style="bold"),
        Text(_counts(ready, desired, starting, 0), style="" if ready >= desired else "yellow"),
        Text(rate(pipeline.arrival_rps)),
        Text(duration(pipeline.latency_s)),
        Text(objective(pipeline)),
        Text(percent(pipeline.attainment_ratio)),
        Text(str(len(pipeline.stages))),
        Text(key_stages(pipeline), style="magenta"),
        Text("; ".join(wrong[:SHOWN_KEYS]), style="red"),
    )


def key_stages(pipeline: PipelineReport) -> str:
    """Numbers of its key stages, the most critical first."""
    keys = sorted(
        (stage for stage in pipeline.stages if stage.is_key),
        key=lambda stage: (stage.rank is None, stage.rank, stage.stage),
    )
    more = f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
    return ", ".join(str(stage.stage) for stage in keys[:SHOWN_KEYS]) + more


def longest_queue(stages: Sequence[StageReport]) -> float:
    """What a full bar stands for."""
    return max((stage.queue or 0.0 for stage in stages), default=0.0)


def stage_row(stage: StageReport, longest: float, *, is_plain: bool = False) -> Row:
    """A stage in one line, for `STAGES`.

    Args:
        stage: of a pipeline.
        longest: queue of a full bar, see `longest_queue`.
        is_plain: ASCII alone.
    """
    wrong = judging.of_stage(stage)
    busy = stage.utilisation_ratio
    return (
        Text(
            f"{stage.stage} {KEY}" if stage.is_key else str(stage.stage), style="magenta bold" * stage.is_key
        ),
        Text(replicas(stage), style="" if stage.ready >= stage.desired else "yellow"),
        Text(number(stage.queue)),
        Text(_bar(stage.queue, longest, is_plain=is_plain), style="red" if wrong else "cyan"),
        Text(duration(stage.wait_s)),
        Text(percent(busy), style="red" if busy is not None and busy > 1 else ""),
        Text(rate(stage.arrival_rps)),
        Text(number(stage.arrival_cv)),
        Text(duration(stage.service_s)),
        Text(number(stage.in_flight)),
        Text(clean(stage.function)),
        Text(clean(stage.reason)),
    )


def function_row(function: FunctionReport) -> Row:
    """A function that is no stage, for `FUNCTIONS`."""
    return (Text(clean(function.function)), Text(replicas(function)), Text(clean(function.reason)))


def node_row(node: NodeReport) -> Row:
    """A node in one line, for `NODES`."""
    free = sum(gpu.free_bytes for gpu in node.gpus)
    total = sum(gpu.total_bytes for gpu in node.gpus)
    return (
        Text(clean(node.node)),
        Text(str(len(node.gpus))),
        Text(f"{size(free)} of {size(total)}" if node.gpus else "-"),
        Text(number(node.cores_free)),
        Text(size(node.memory_free_bytes)),
        Text(clean(", ".join(node.in_memory)) or "-"),
        Text(clean(", ".join(node.on_disk)) or "-"),
    )


def replicas(what: Replicas) -> str:
    """`2/4 +1 -1`: 2 of 4 ready, 1 starting, 1 draining."""
    draining = what.draining if isinstance(what, StageReport) else 0
    return _counts(what.ready, what.desired, what.starting, draining)


def _counts(ready: int, desired: int, starting: int, draining: int) -> str:
    more = (f" +{starting}" if starting else "") + (f" -{draining}" if draining else "")
    return f"{ready}/{desired}{more}"


def _bar(queue: float | None, longest: float, *, is_plain: bool) -> str:
    if not queue or longest <= 0:
        return ""
    full = "#" if is_plain else "\N{BLACK RECTANGLE}"
    return full * max(1, round(BAR * min(1.0, queue / longest)))
