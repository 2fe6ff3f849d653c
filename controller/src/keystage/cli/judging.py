"""What is wrong in a report, in words. Pure.

`keystage status` ends with code 1 where this finds anything; `keystage top` shows it. A number that was not
measured is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from keystage.cli.figures import NOTHING, clean, duration, number, objective, percent
from keystage.observability.api import FunctionReport, PipelineReport, Report, StageReport

LEAST_ATTAINMENT_RATIO = 0.9
"""Of requests that should meet their objective. Bursts cost some; below this more than a burst is wrong."""


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong.

    Attributes:
        about: `controller`, a pipeline, or a function.
        text: what, with bound and actual value.
    """

    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.about}: {self.text}"


def faults(report: Report, old: str = "") -> tuple[Fault, ...]:
    """Everything that is wrong.

    Args:
        report: of a gateway.
        old: in words how old it is, empty where it is fresh.
    """
    found = [Fault("controller", text) for text in (old, clean(report.trouble)) if text]
    found += [fault for pipeline in report.pipelines for fault in of_pipeline(pipeline)]
    found += [Fault(clean(f.function), text) for f in report.functions if (text := of_function(f))]
    return tuple(found)


def of_pipeline(pipeline: PipelineReport) -> Iterator[Fault]:
    """What is wrong with one pipeline and its stages."""
    name = clean(pipeline.pipeline)
    if pipeline.missing:
        yield Fault(name, f"its numbers stay as they are: {clean(pipeline.missing)}")
    met, aim_s = pipeline.attainment_ratio, pipeline.deadline_s
    if met is not None and met < LEAST_ATTAINMENT_RATIO:
        aim = objective(pipeline)
        of = f" of {aim}" if aim != NOTHING else ""
        yield Fault(
            name,
            f"{percent(met)} of requests met the objective{of}, at least {percent(LEAST_ATTAINMENT_RATIO)}",
        )
    elif met is None and aim_s is not None and (pipeline.latency_s or 0.0) > aim_s:
        yield Fault(name, f"latency {duration(pipeline.latency_s)} > objective {duration(aim_s)}")
    if text := _waiting(pipeline):
        yield Fault(name, text)
    for stage in pipeline.stages:
        text = of_stage(stage)
        if text:
            yield Fault(f"{name}/{stage.stage}", text)


def _waiting(pipeline: PipelineReport) -> str:
    """Sessions that wait for a slot longer than the first token, or the answer, may take; else empty.

    What was measured is of the last minutes: it counts only while something waits.
    """
    aim_s = pipeline.ttft_s if pipeline.ttft_s is not None else pipeline.deadline_s
    if pipeline.execution != "looping" or aim_s is None or not pipeline.stages:
        return ""
    entry = pipeline.stages[0]
    if not entry.queue:
        return ""
    queue, bound = number(entry.queue), f"objective {objective(pipeline)}"
    if (pipeline.entry_wait_s or 0.0) > aim_s:
        return f"queue {queue}: the last waits about {duration(pipeline.entry_wait_s)} > {bound}"
    if (entry.wait_s or 0.0) > aim_s:
        return f"queue {queue}: those served waited {duration(entry.wait_s)} > {bound}"
    return ""


def of_stage(stage: StageReport) -> str:
    """What is wrong with one stage, empty where nothing is."""
    if text := _serving(stage):
        return text
    busy = stage.utilisation_ratio
    if busy is not None and busy > 1 and not stage.starting:
        return f"utilisation {percent(busy)} > 100 % and no replica is starting: its queue grows"
    return ""


def of_function(function: FunctionReport) -> str:
    """What is wrong with a function that is no stage, empty where nothing is."""
    return _serving(function)


def _serving(what: StageReport | FunctionReport) -> str:
    """Replicas that are wanted and neither serve nor start."""
    count = f"{what.ready} of {what.desired} replicas ready"
    if what.desired > 0 and what.ready == 0:
        return f"{count}, {what.starting} starting: nothing is served"
    if what.ready + what.starting < what.desired:
        return f"{count}, {what.starting} starting"
    return ""
