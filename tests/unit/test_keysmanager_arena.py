"""Arenas and shape classes: equal layouts share, whatever their layers are called."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from keystage.bench.load_bundles import STAGE, write_bundle
from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError
from keystage.keysmanager.arena import Arena, check_equal, layout_for, layout_of
from keystage.keysmanager.device_copy import load_stage_from_segment
from keystage.keysmanager.segment_copy import Copy
from keystage.keysmanager.shape import shape_of
from keystage.models.base import Row
from keystage.models.loading import load_stage, sample_input

SHAPES = {
    "model.layers.7.a.weight": (4, 3),
    "model.layers.7.b.weight": (5,),
    "model.layers.8.a.weight": (4, 3),
}


def renamed(by: int) -> dict[str, tuple[int, ...]]:
    return {
        name.replace("7", str(7 + by)).replace("s.8", f"s.{8 + by}"): shape for name, shape in SHAPES.items()
    }


def described(pipeline: Pipeline, **config: object) -> Pipeline:
    return msgspec.structs.replace(pipeline, config={**pipeline.config, **config})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pipeline]:
    folder = tmp_path_factory.mktemp("arena") / "b"
    return folder, write_bundle(folder, "b", 0.012, "float32", 1)


def test_layers_are_counted_from_the_first() -> None:
    check_equal(layout_for(SHAPES, "float32"), layout_for(renamed(93), "float32"))
    wrong = {**SHAPES}
    wrong["model.layers.7.b.weight"] = (6,)
    with pytest.raises(BundleError, match=r"layers\.0\.b\.weight"):
        check_equal(layout_for(SHAPES, "float32"), layout_for(wrong, "float32"))
    with pytest.raises(BundleError, match="float16"):
        check_equal(layout_for(SHAPES, "float32"), layout_for(SHAPES, "float16"))
    with pytest.raises(BundleError, match="2 parameters, this arena has places for 3"):
        check_equal(layout_for(SHAPES, "float32"), layout_for(dict(list(SHAPES.items())[:2]), "float32"))


def test_a_file_in_memory_has_the_layout_of_its_shapes(bundle: tuple[Path, Pipeline]) -> None:
    folder, pipeline = bundle
    content = (folder / pipeline.stages[STAGE].file).read_bytes()
    found = layout_of(memoryview(content))
    made = layout_for({place.name: place.shape for place in found.places}, "float32")
    assert made == found
    with pytest.raises(BundleError, match="truncated"):
        layout_of(memoryview(content)[:9000])
    with pytest.raises(BundleError, match="the arena has 10"):
        Arena(10, "cpu").views(found)


def test_views_lie_where_the_file_has_them(bundle: tuple[Path, Pipeline]) -> None:
    folder, pipeline = bundle
    content = (folder / pipeline.stages[STAGE].file).read_bytes()
    layout = layout_of(memoryview(content))
    arena = Arena(layout.data_bytes, "cpu")
    copied = Copy(memoryview(content), layout.data_start, arena, None).wait()
    assert (copied.nbytes, copied.way) == (layout.data_bytes, "memory")
    for name, view in arena.views(layout).items():
        place = next(p for p in layout.places if p.name == name)
        start = layout.data_start + place.offset
        raw = np.frombuffer(content, np.float32, view.numel(), start)
        assert np.array_equal(view.numpy().ravel(), raw)
        assert view.untyped_storage().data_ptr() == arena.data.untyped_storage().data_ptr()


def test_a_stage_from_a_segment_computes_what_a_loaded_one_does(bundle: tuple[Path, Pipeline]) -> None:
    folder, pipeline = bundle
    content = memoryview((folder / pipeline.stages[STAGE].file).read_bytes())
    gone: list[int] = []
    stages = [
        load_stage(folder, pipeline, STAGE),
        load_stage_from_segment(pipeline, STAGE, content, "cpu", "float32", unmapped=lambda: gone.append(1)),
    ]
    found = []
    for stage in stages:
        stage.open(0, 8)
        found.append(stage.forward(sample_input(stage, 4), [Row(0, 0, 4)], []))
    assert torch.equal(*found)
    assert gone == [1]


def test_shape_classes(bundle: tuple[Path, Pipeline]) -> None:
    _, pipeline = bundle
    name = shape_of(pipeline, STAGE, "cuda:0", "")
    assert name == shape_of(pipeline, STAGE, "cuda:0", "float32")
    assert name == shape_of(msgspec.structs.replace(pipeline, name="other"), STAGE, "cuda:0", "")
    assert name == shape_of(described(pipeline, num_hidden_layers=99), STAGE, "cuda:0", "")
    moved = [
        *pipeline.stages[:STAGE],
        msgspec.structs.replace(pipeline.stages[STAGE], layers=(11, 10 + pipeline.stages[STAGE].layers[1])),
        *pipeline.stages[STAGE + 1 :],
    ]
    assert name == shape_of(msgspec.structs.replace(pipeline, stages=moved), STAGE, "cuda:0", "")
    others = {
        shape_of(pipeline, STAGE, "cuda:1", ""),
        shape_of(pipeline, STAGE, "cuda:0", "bfloat16"),
        shape_of(pipeline, 0, "cuda:0", ""),
        shape_of(described(pipeline, rope_theta=5e5), STAGE, "cuda:0", ""),
        shape_of(described(pipeline, num_key_value_heads=1), STAGE, "cuda:0", ""),
    }
    assert len(others) == 5
    assert name not in others
    with pytest.raises(BundleError, match="stage 3"):
        shape_of(pipeline, 3, "cpu", "")


def test_places_are_comparable() -> None:
    place = layout_for(SHAPES, "float32").places[0]
    assert dataclasses.replace(place, offset=1) != place
