"""`split --method time` measures every kind of layer once, and the ends by what they add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from keystage.bundle.plan import roles
from keystage.bundle.random_shapes import shape_config
from keystage.models import layer_time
from keystage.models.base import Family, StageRole
from keystage.models.families import family_of

KINDS = [
    ("llama-tiny", [0, 0, 0, 0]),
    ("gpt2-tiny", [0, 0, 0, 0]),
    ("bert-tiny", [0, 0, 0, 0]),
    ("whisper-mini", [0, 1, 2, 2]),
    ("wide_resnet-tiny", [0, 1, 2, 3]),
    ("wide_resnet50_2", [0, 1, 1, 2, 3, 3, 3, 4, 5, 5, 5, 5, 5, 6, 7, 7]),
]


@pytest.mark.parametrize(("shape", "kinds"), KINDS)
def test_layers_of_a_kind_have_the_same_parameters(shape: str, kinds: list[int]) -> None:
    config = shape_config(shape)
    family = family_of(config)
    found = [layer_time.layer_kind(family, config, layer) for layer in range(family.shape(config).layers)]
    order = list(dict.fromkeys(found))
    assert [order.index(kind) for kind in found] == kinds


@pytest.mark.parametrize("shape", [shape for shape, _ in KINDS if shape.endswith(("-tiny", "-mini"))])
def test_every_family_is_measured(shape: str) -> None:
    config = shape_config(shape)
    times = layer_time.measure_parts(family_of(config), config, "float32")
    assert len(times.layers_s) == 4
    assert min(times.layers_s) > 0
    assert min(times.embedding_s, times.head_s) >= 0


def _seconds(_family: Family, _config: Mapping[str, Any], role: StageRole, _dtype: str) -> float:
    """Encoder layers take 4, decoder layers 1, the embedding 2 and the head 3."""
    return (4.0 if role.first_layer < 2 else 1.0) + 2.0 * role.is_first + 3.0 * role.is_last


def test_stages_are_balanced_by_the_time_of_each_layer_and_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_time, "_part_s", _seconds)
    config = shape_config("whisper-mini")
    family = family_of(config)
    times = layer_time.measure_parts(family, config, "float32")
    assert (times.layers_s, times.embedding_s, times.head_s) == ([4.0, 4.0, 1.0, 1.0], 2.0, 3.0)
    found, chosen_by = roles(family, config, 2, "time", "float32")
    # [6, 4, 1, 4]: cut after the first layer the halves are 6 and 9, after the second 10 and 5.
    assert [(role.first_layer, role.end_layer) for role in found] == [(0, 1), (1, 4)]
    assert chosen_by == "keystage"
