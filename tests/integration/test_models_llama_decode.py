"""The static decode step gives what the eager stage gives, also when the two alternate."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from support.tiny_llama import Chain, tiny_model, write_folder

from keystage.bundle.split import split
from keystage.models.base import Row, StageError
from keystage.models.llama import LlamaStage
from keystage.models.llama_decode import PooledStage

ROWS = 4


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decode")
    return split(write_folder(tiny_model(), folder / "m"), 2, "uniform", folder / "bundle", "tiny")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def chains(bundle: Path, request: pytest.FixtureRequest) -> tuple[Chain, Chain]:
    """(eager, pooled) on the same device."""
    pooled = Chain(bundle, request.param)
    stages = [PooledStage(cast("LlamaStage", stage), ROWS, 63) for stage in pooled.stages]
    for stage in stages:
        stage.capture()
    pooled.stages = list(stages)
    return Chain(bundle, request.param), pooled


def test_pooled_generation_equals_eager(chains: tuple[Chain, Chain]) -> None:
    eager, pooled = chains
    prompts = [[5, 9, 11, 40], [3], [90, 2, 2, 17, 33, 60, 1]]
    assert pooled.generate(prompts, 12) == eager.generate(prompts, 12)
    assert all(cast("PooledStage", stage).replays == 11 for stage in pooled.stages)


def test_logits_agree_where_eager_and_static_steps_alternate(chains: tuple[Chain, Chain]) -> None:
    found: list[list[torch.Tensor]] = []
    for chain in chains:
        for slot in (7, 8, 9):
            chain.open(slot, 40)
        mine = [chain.forward([1, 2, 3, 4], [Row(7, 0, 3), Row(8, 0, 1)], [0, 1])]
        mine.append(chain.forward([5, 6], [Row(8, 1, 1), Row(7, 3, 1)], [1, 0]))
        mine.append(chain.forward([7, 8, 9], [Row(7, 4, 2), Row(8, 2, 1)], [0]))  # mixed: eager
        mine.append(chain.forward([10], [Row(9, 0, 1)], [0]))  # the others rest
        mine.append(chain.forward([11, 12, 13], [Row(7, 6, 1), Row(8, 3, 1), Row(9, 1, 1)], [0, 1, 2]))
        mine.append(chain.forward([14], [Row(8, 4, 1)], []))
        found.append([one.cpu() for one in mine])
    for expected, have in zip(*found, strict=True):
        torch.testing.assert_close(have, expected, atol=2e-4, rtol=2e-4)


def test_sessions_beyond_the_pool_run_eagerly(chains: tuple[Chain, Chain]) -> None:
    eager, pooled = chains
    prompts = [[slot + 1, 4, 9] for slot in range(ROWS + 2)]
    assert pooled.generate(prompts, 3) == eager.generate(prompts, 3)
    for slot in range(ROWS + 2):
        for stage in pooled.stages:
            stage.close(slot)
    assert pooled.generate([[1] * 80], 3) == eager.generate([[1] * 80], 3)  # longer than a row
    assert pooled.generate([[1, 2]], 3, slot=50) == eager.generate([[1, 2]], 3, slot=50)


def test_wrong_rows_are_refused_and_change_nothing(chains: tuple[Chain, Chain]) -> None:
    _, pooled = chains
    stage = pooled.stages[0]
    stage.open(1, 8)
    stage.forward(torch.tensor([1, 2]), [Row(1, 0, 2)], [])
    with pytest.raises(StageError, match="row starts at position 5, the slot holds 2"):
        stage.forward(torch.tensor([1]), [Row(1, 5, 1)], [])
    with pytest.raises(StageError, match="token ids 97 to 97"):
        stage.forward(torch.tensor([97]), [Row(1, 2, 1)], [])
    with pytest.raises(StageError, match=r"input of shape \(2,\)"):
        stage.forward(torch.tensor([1, 2]), [Row(1, 2, 1)], [])
    stage.forward(torch.tensor([1]), [Row(1, 2, 1)], [])
