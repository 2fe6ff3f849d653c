"""Stages that are in memory already: taken as they are, warmed by one token; the others are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.keysmanager_forks import random_bundle

from keystage.bundle.api import Pipeline
from keystage.bundle.store import load
from keystage.models.base import LoadedStage
from keystage.models.loading import load_stage
from keystage.wire.api import StepRows
from keystage.worker.executor import Activation
from keystage.worker.supply import Phase
from keystage.worker.torch_executor import TorchExecutor


class Supply:
    """Has the stages it is given; notes what it is asked and told."""

    def __init__(self, models: dict[int, LoadedStage]) -> None:
        self.models = models
        self.asked: list[tuple[int, str, str]] = []
        self.released = 0

    def stage(self, pipeline: Pipeline, index: int, device: str, dtype: str) -> LoadedStage | None:
        self.asked.append((index, device, dtype))
        return self.models.get(index)

    def report(self, phase: Phase, note: str = "") -> None:
        raise AssertionError("the executor does not report")

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return random_bundle(tmp_path / "b", stages=2)


def counted(model: LoadedStage, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward pass that follows."""
    tokens: list[int] = []
    forward = model.forward

    def count(x: torch.Tensor, *rest: object) -> torch.Tensor:
        tokens.append(int(x.shape[0]))
        return forward(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "forward", count)
    return tokens


def test_supplied_stages_are_used_and_warmed_by_one_token(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = load(bundle)
    model = load_stage(bundle, pipeline, 1)
    supply = Supply({1: model})
    (bundle / pipeline.stages[1].file).unlink()  # nobody may read it
    executor = TorchExecutor(bundle, pipeline, (0, 1), "cpu", "float32", 1, supply)
    assert supply.asked == [(0, "cpu", "float32"), (1, "cpu", "float32")]
    assert supply.released == 0  # on a CPU the host copy is what computes
    tokens = counted(model, monkeypatch)
    executor.first_forward()
    assert tokens == [1]
    executor.warm_up()
    assert tokens == [1]  # whoever supplied it has warmed it


def test_with_and_without_a_supply_the_same_is_computed(bundle: Path) -> None:
    pipeline = load(bundle)
    models = {stage: load_stage(bundle, pipeline, stage) for stage in (0, 1)}
    plain = TorchExecutor(bundle, pipeline, (0, 1), "cpu", "float32", 1)
    supplied = TorchExecutor(bundle, pipeline, (0, 1), "cpu", "float32", 1, Supply(models))
    assert plain.kv_token_bytes == supplied.kv_token_bytes
    rows = StepRows([7], [1], [0], [4], [True], [0], [0.0], [1.0], [3])
    answers = []
    for executor in (plain, supplied):
        executor.first_forward()
        executor.warm_up()
        executor.open(7, 8)
        hidden: Activation | None = executor.step(0, 0, [3, 1, 4, 1], None, rows).activation
        assert hidden is not None
        answers.append((bytes(hidden.data), executor.step(1, 1, (), hidden, rows).tokens))
    assert answers[0] == answers[1]
