"""Finds the pipeline, stage or function that a person means in a report, and names near misses. Pure."""

from __future__ import annotations

import dataclasses
import difflib

from keystage.cli.figures import clean
from keystage.observability.api import FunctionReport, PipelineReport, Report, StageReport

NEAR = 3
"""Names that are offered in place of one that is not there."""


class Unknown(Exception):
    """There is no such thing; names what comes near."""


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """What was meant.

    Attributes:
        function: its function's name; the pipeline's for a pipeline.
        pipeline: where it belongs, None for a function that is no stage.
        stage: None for a pipeline as a whole, and for a function that is no stage.
        alone: the function that is no stage.
    """

    function: str
    pipeline: PipelineReport | None = None
    stage: StageReport | None = None
    alone: FunctionReport | None = None


def pipeline(report: Report, name: str) -> PipelineReport:
    """The pipeline of a name.

    Raises:
        Unknown: there is none.
    """
    for one in report.pipelines:
        if one.pipeline == name:
            return one
    raise _unknown("pipeline", name, [one.pipeline for one in report.pipelines])


def stage(report: Report, name: str) -> Named:
    """The stage, function or pipeline of a name: `FUNCTION`, `PIPELINE/INDEX` or `PIPELINE`.

    Raises:
        Unknown: there is none.
    """
    names: list[str] = []
    for one in report.pipelines:
        if one.pipeline == name:
            return Named(name, one)
        for each in one.stages:
            short = f"{one.pipeline}/{each.stage}"
            if name in (each.function, short):
                return Named(each.function, one, each)
            names += [each.function, short]
    for alone in report.functions:
        if alone.function == name:
            return Named(name, alone=alone)
    owner, slash, _ = name.rpartition("/")
    for one in report.pipelines:
        if slash and one.pipeline == owner:
            last = f"{len(one.stages) - 1}" if one.stages else "none"
            raise Unknown(f"no stage {clean(name)!r}: pipeline {clean(owner)!r} has stages 0 to {last}")
    heads = [one.pipeline for one in report.pipelines]
    raise _unknown("stage or function", name, [*heads, *(one.function for one in report.functions), *names])


def _unknown(what: str, name: str, names: list[str]) -> Unknown:
    near = difflib.get_close_matches(name, dict.fromkeys(names), NEAR, 0.5)
    if near:
        told = f"did you mean {' or '.join(map(clean, near))}?"
    elif names:
        shown = [clean(one) for one in dict.fromkeys(names)]
        told = f"there are {', '.join(shown[:10])}" + (
            f" and {len(shown) - 10} more" if len(shown) > 10 else ""
        )
    else:
        told = "nothing is deployed"
    return Unknown(f"no {what} {clean(name)!r}: {told}")
