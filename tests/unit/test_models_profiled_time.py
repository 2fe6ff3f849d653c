"""Layer times from a profiled bundle: what was put in comes out, what cannot be told is refused."""

from __future__ import annotations

import msgspec
import pytest

from keystage.bundle.api import Pipeline, StageProfile, emulated
from keystage.bundle.errors import SplitError
from keystage.bundle.partition import balanced, with_ends
from keystage.models.profiled_time import ROWS, part_times

LAYER_S, EMBEDDING_S, HEAD_S = 0.003, 0.001, 0.012


def profiled(bounds: list[int], *, missing: int | None = None) -> Pipeline:
    stages = []
    for stage in emulated("model", len(bounds) - 1, execution="looping").stages:
        first, end = bounds[stage.index], bounds[stage.index + 1]
        seconds = LAYER_S * (end - first) + EMBEDDING_S * (first == 0) + HEAD_S * (end == bounds[-1])
        profile = StageProfile("cpu", seconds / 2 / ROWS, seconds / 2)
        stages.append(
            msgspec.structs.replace(
                stage, layers=(first, end), profile=None if stage.index == missing else profile
            )
        )
    pipeline = emulated("model", len(bounds) - 1, execution="looping")
    return msgspec.structs.replace(pipeline, stages=stages)


@pytest.mark.parametrize("bounds", [[0, 3, 6, 9, 12], [0, 1, 11, 12], [0, 5, 6, 7, 12]])
def test_the_times_that_made_the_stages_are_found_again(bounds: list[int]) -> None:
    found = part_times(profiled(bounds))
    assert found.layers_s == pytest.approx([LAYER_S] * 12)
    assert found.embedding_s == pytest.approx(EMBEDDING_S)
    assert found.head_s == pytest.approx(HEAD_S)


def test_a_split_by_them_gives_the_stage_with_the_head_fewer_layers() -> None:
    found = part_times(profiled([0, 3, 6, 9, 12]))
    bounds = balanced(with_ends(found.layers_s, found.embedding_s, found.head_s), 4)
    assert bounds[-1] - bounds[-2] < bounds[1] - bounds[0]


def test_an_end_never_costs_less_than_nothing() -> None:
    pipeline = profiled([0, 3, 6, 9, 12])
    fast = StageProfile("cpu", 0.0, 1e-6)
    stages = [
        msgspec.structs.replace(stage, profile=fast) if not stage.index else stage
        for stage in pipeline.stages
    ]
    assert part_times(msgspec.structs.replace(pipeline, stages=stages)).embedding_s == 0


def test_what_cannot_be_told_is_refused_by_name() -> None:
    with pytest.raises(SplitError, match="stage 2 of model has no profile"):
        part_times(profiled([0, 3, 6, 9, 12], missing=2))
    with pytest.raises(SplitError, match="2 stages, at least 3"):
        part_times(profiled([0, 6, 12]))
