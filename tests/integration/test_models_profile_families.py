"""A profile of every kind of stage: single-pass, with a prefix of frames; and a split by what it found."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support import tiny_bert, tiny_llama, tiny_whisper, tiny_wide_resnet
from typer.testing import CliRunner

from keystage.bundle import store
from keystage.bundle.errors import SplitError
from keystage.bundle.split import split
from keystage.cli.main import app
from keystage.models.profile import Grid, measure_bundle
from keystage.models.profiled_time import ROWS

GRID = Grid(batches=(1, 2), tokens=4, chunks=(2, 4), repeats=3)


def wide_resnet(folder: Path) -> Path:
    return tiny_wide_resnet.write_folder(*tiny_wide_resnet.tiny_wide_resnet(), folder)


@pytest.mark.parametrize(
    "write", [lambda folder: tiny_bert.write_folder(tiny_bert.tiny_bert(), folder), wide_resnet]
)
def test_a_single_pass_stage_has_a_line_and_no_prefill(write: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = split(write(tmp_path / "m"), 2, "uniform", tmp_path / "bundle", "tiny")
    for result in measure_bundle(folder, grid=GRID, write=True):
        assert {key: len(times) for key, times in result.batches.items()} == {(1, 1): 3, (1, 2): 3}
        assert result.profile.alpha_s + result.profile.beta_s > 0
        assert (result.profile.prefill_token_s, result.profile.kv_token_s, result.prefill) == (0, 0, {})
    shown = CliRunner().invoke(app, ["profile", str(folder), "--batches", "1,2", "--repeats", "3"])
    assert shown.exit_code == 0, shown.output
    assert all(stage.profile is not None for stage in store.load(folder).stages)


def test_a_stage_with_frames_is_measured_behind_them(tmp_path: Path) -> None:
    model = tiny_whisper.write_folder(tiny_whisper.tiny_model(), tmp_path / "m")
    folder = split(model, 2, "uniform", tmp_path / "bundle", "tiny")
    for result in measure_bundle(folder, grid=GRID):
        assert result.profile.tokens == 4
        assert sorted(result.prefill) == [2, 4]
        assert min(itertools.chain(*result.prefill.values())) > 0


def test_a_split_by_profile_balances_what_was_measured(tmp_path: Path) -> None:
    model = tiny_llama.write_folder(tiny_llama.tiny_model(num_hidden_layers=8), tmp_path / "m")
    first = split(model, 4, "uniform", tmp_path / "first", "tiny")
    with pytest.raises(SplitError, match="has no profile"):
        split(model, 2, "time", tmp_path / "second", "tiny", profile=first)
    profiled = measure_bundle(first, grid=GRID, write=True)
    second = split(model, 2, "time", tmp_path / "second", "tiny", profile=first)
    seconds = [ROWS * result.profile.alpha_s + result.profile.beta_s for result in profiled]
    layers = store.load(second).stages[0].layers[1]
    assert 1 <= layers <= 7
    # The cut lies where the heavier of the two halves is lightest, by the times of the profiled stages.
    inner = [seconds[1] / 2] * 4 + [seconds[2] / 2] * 4
    weights = [*inner]
    weights[0] += max(0.0, seconds[0] - seconds[1])
    weights[-1] += max(0.0, seconds[3] - seconds[2])
    heaviest = {cut: max(sum(weights[:cut]), sum(weights[cut:])) for cut in range(1, 8)}
    assert heaviest[layers] == pytest.approx(min(heaviest.values()))
    made = (second / "pipeline.json").stat().st_mtime_ns
    assert split(model, 2, "time", tmp_path / "second", "tiny", profile=first) == second
    assert (second / "pipeline.json").stat().st_mtime_ns == made


def test_a_profile_of_another_model_or_for_another_method_is_refused(tmp_path: Path) -> None:
    model = tiny_llama.write_folder(tiny_llama.tiny_model(), tmp_path / "m")
    other = tiny_llama.write_folder(tiny_llama.tiny_model(num_hidden_layers=4), tmp_path / "o")
    bundle = split(other, 3, "uniform", tmp_path / "bundle", "tiny")
    measure_bundle(bundle, grid=GRID, write=True)
    with pytest.raises(SplitError, match="has 4 layers, the model has 5"):
        split(model, 2, "time", tmp_path / "second", "tiny", profile=bundle)
    arguments = ["split", str(model), "--stages", "2", "--out", str(tmp_path / "second")]
    result = CliRunner().invoke(app, [*arguments, "--profile", str(bundle)])
    assert result.exit_code != 0
    assert "a profile is for method time" in result.output
    result = CliRunner().invoke(app, ["profile", str(bundle), "--json", "--repeats", "3", "--batches", "1,2"])
    assert len(json.loads(result.stdout)["stages"]) == 3
