"""Seconds of layers and ends from a profile: `keystage split --method time --profile BUNDLE`.

`models.layer_time` measures layers alone, with random parameters, before there is a bundle; here the
stages of a bundle that has been profiled (`keystage profile --write`) tell what they cost on the device
that matters. Pure arithmetic. What a stage's layers cost together is spread over them evenly; the layers of
the first and the last stage are taken to cost what those of their inner neighbour do, and what is left of
their stages' time is the embedding's and the head's.
"""

from __future__ import annotations

from keystage.bundle.api import Pipeline, StageSpec
from keystage.bundle.errors import SplitError
from keystage.models.layer_time import PartTimes

ROWS = 8
"""Rows of the decode step, or items of the batch, whose time counts."""
_LEAST_STAGES = 3


def part_times(pipeline: Pipeline) -> PartTimes:
    """Takes a profiled bundle apart.

    Args:
        pipeline: its description.

    Raises:
        SplitError: a stage has no profile, or there is no stage without an end.
    """
    stages = pipeline.stages
    if len(stages) < _LEAST_STAGES:
        raise SplitError(
            f"bundle {pipeline.name} has {len(stages)} stages, at least {_LEAST_STAGES} are needed to tell "
            "the time of layers from that of embedding and head"
        )
    inner = [_seconds(pipeline, stage) / _layers(stage) for stage in stages[1:-1]]
    layers_s = [inner[0]] * _layers(stages[0])
    for stage, layer_s in zip(stages[1:-1], inner, strict=True):
        layers_s += [layer_s] * _layers(stage)
    layers_s += [inner[-1]] * _layers(stages[-1])
    first, last = stages[0], stages[-1]
    return PartTimes(
        layers_s,
        max(0.0, _seconds(pipeline, first) - inner[0] * _layers(first)),
        max(0.0, _seconds(pipeline, last) - inner[-1] * _layers(last)),
    )


def _layers(stage: StageSpec) -> int:
    first, end = stage.layers
    return end - first


def _seconds(pipeline: Pipeline, stage: StageSpec) -> float:
    profile = stage.profile
    if profile is None:
        raise SplitError(
            f"stage {stage.index} of {pipeline.name} has no profile: `keystage profile --write` makes it"
        )
    return ROWS * profile.alpha_s + profile.beta_s
