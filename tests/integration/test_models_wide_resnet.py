"""Wide residual networks in stages against the unsplit one: splits, sizes, types, parameters in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_bert import Chain
from support.tiny_wide_resnet import TINY, normalised, randomize, tiny_wide_resnet, write_folder

from keystage.bundle.errors import SplitError
from keystage.bundle.split import split
from keystage.models.base import StageError
from keystage.models.named_tensors import NamedTensors
from keystage.models.wide_resnet_config import parse


def images(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8) for size in sizes]


def expected_of(network: Any, image: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = network(normalised(image)[None])[0]
    return logits


def close(found: torch.Tensor, expected: torch.Tensor, ratio: float = 1e-4) -> bool:
    return bool((found - expected).abs().max() < ratio * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 6])
def test_logits_are_those_of_the_unsplit_network(tmp_path: Path, stages: int) -> None:
    network, config = tiny_wide_resnet()
    bundle = split(
        write_folder(network, config, tmp_path / "model"), stages, "parameters", tmp_path / "b", "n"
    )
    chain = Chain(bundle)
    assert (chain.pipeline.execution, chain.pipeline.vocab_size) == ("single-pass", 11)
    batch = images((64, 64), (40, 96), (64, 64), (33, 35), (64, 64), (64, 64), (64, 64))
    for image, found in zip(batch, chain(batch), strict=True):
        assert close(found, expected_of(network, image))
    for spec, stage in zip(chain.pipeline.stages[:-1], chain.stages[:-1], strict=True):
        batch = stage.forward(batch)
        assert spec.activation_bytes == batch[0].nbytes


def test_normalised_images_and_raw_ones_share_a_batch(tmp_path: Path) -> None:
    network, config = tiny_wide_resnet()
    chain = Chain(split(write_folder(network, config, tmp_path / "model"), 2, "uniform", tmp_path / "b", "n"))
    image = images((64, 64))[0]
    for found in chain([image, normalised(image), image]):
        assert close(found, expected_of(network, image))


def test_half_types_stay_near_the_unsplit_network(tmp_path: Path) -> None:
    network, config = tiny_wide_resnet()
    folder = write_folder(network, config, tmp_path / "model")
    chain = Chain(split(folder, 3, "uniform", tmp_path / "b", "n", "bf16"))
    for image, found in zip(images((64, 64)), chain(images((64, 64))), strict=True):
        assert found.dtype is torch.float32
        assert close(found, expected_of(network, image), 0.05)


def test_parameters_that_arrive_later_are_used_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose arena is filled after the stage was built: nothing may have been combined before."""
    from keystage.bundle import store
    from keystage.models.loading import build_stage, read_stage
    from keystage.models.single_pass import single_pass_stage

    network, config = tiny_wide_resnet()
    bundle = split(write_folder(network, config, tmp_path / "model"), 1, "uniform", tmp_path / "b", "n")
    pipeline = store.load(bundle)
    monkeypatch.setattr(NamedTensors, "is_in_place", True)
    monkeypatch.setattr(NamedTensors, "_moved", lambda _self, tensor: tensor)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in read_stage(bundle, pipeline, 0).items()}
    stage = single_pass_stage(build_stage(pipeline, 0, tensors))
    head = {"fc.weight", "fc.bias"}  # packed on a CPU
    for name, tensor in read_stage(bundle, pipeline, 0).items():
        tensors[name].copy_(tensor)
    assert head < set(tensors)
    image = images((64, 64))[0]
    with torch.inference_mode():
        features = torch.nn.Sequential(*list(network.children())[:2])(normalised(image)[None])
        found = stage._stem(normalised(image)[None])  # type: ignore[attr-defined]
    assert close(found, features.relu())


@pytest.mark.parametrize(
    "item",
    [
        torch.zeros(3, 31, 64, dtype=torch.uint8),
        torch.zeros(3, 64, 129, dtype=torch.uint8),
        torch.zeros(1, 64, 64, dtype=torch.uint8),
        torch.zeros(3, 64, 64, dtype=torch.float64),
        torch.zeros(64, 64, dtype=torch.uint8),
    ],
)
def test_images_that_do_not_fit_are_refused_by_name(tmp_path: Path, item: torch.Tensor) -> None:
    network, config = tiny_wide_resnet()
    chain = Chain(split(write_folder(network, config, tmp_path / "model"), 2, "uniform", tmp_path / "b", "n"))
    with pytest.raises(StageError, match=r"\[3, H, W\] is expected, H and W from 32 to 128"):
        chain([*images((64, 64)), item])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [1, 2, 3]}, "layers must be four numbers"),
        ({"num_classes": 0}, "num_classes must be a whole number from 1 to"),
        ({"image_std": [1, 0, 1]}, "image_std must be a number above 0, got 0"),
    ],
)
def test_what_is_no_such_network_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        parse({**TINY, **changes})


@pytest.mark.extra
def test_torchvisions_network_where_it_is_installed(tmp_path: Path) -> None:
    resnet = pytest.importorskip("torchvision.models.resnet")
    network = randomize(resnet.wide_resnet50_2())
    config = {**TINY, "layers": [3, 4, 6, 3], "width_per_group": 128, "num_classes": 1000, "image_size": 224}
    chain = Chain(
        split(write_folder(network, config, tmp_path / "model"), 4, "parameters", tmp_path / "b", "n")
    )
    image = images((224, 224))[0]
    assert close(chain([image])[0], expected_of(network, image))
