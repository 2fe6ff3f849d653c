"""Profiles: measured per stage, written on request, with error bars, and read as they were before."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from support.tiny_llama import tiny_model, write_folder
from typer.testing import CliRunner

from keystage.bundle import store
from keystage.bundle.api import CPU_PROFILE, CpuProfile, StageProfile
from keystage.bundle.split import split
from keystage.cli.main import app
from keystage.models.loading import load_stage
from keystage.models.profile import Grid, measure, measure_bundle, profile_bundle
from keystage.models.stage_timing import STEPS, LoopingClock


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    return split(write_folder(tiny_model(), folder / "m"), 2, "uniform", folder / "bundle", "tiny")


def test_profile_is_written_only_when_asked(bundle: Path) -> None:
    threads = torch.get_num_threads()
    measured = profile_bundle(bundle)
    assert torch.get_num_threads() == threads
    assert [stage.profile for stage in store.load(bundle).stages] == [None, None]
    for profile in measured:
        assert profile.device == "cpu"
        assert profile.cores == 1
        assert profile.tokens == 64
        assert profile.alpha_s >= 0
        assert profile.alpha_s + profile.beta_s > 0
        assert profile.prefill_token_s + profile.prefill_beta_s > 0
        assert profile.alpha_error_s + profile.beta_error_s > 0
        assert profile.kv_token_s >= 0
    written = profile_bundle(bundle, write=True)
    assert [stage.profile for stage in store.load(bundle).stages] == written


def test_every_cell_of_the_grid_is_measured_and_sessions_are_left_alone(bundle: Path) -> None:
    model = load_stage(bundle, store.load(bundle), 0)
    model.open(3, 8)
    grid = Grid(batches=(1, 2), tokens=8, chunks=(4, 1000), cores=(1, 2), repeats=5)
    result = measure(model, grid, threads=2)
    assert {key: len(times) for key, times in result.batches.items()} == {
        (cores, rows): 5 for cores in (1, 2) for rows in (1, 2)
    }
    assert sorted(result.prefill) == [4, model.shape.context_length]
    assert result.profile.cores == 2
    model.close(3)


def test_a_context_too_short_for_the_grid_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    tiny = tiny_model(max_position_embeddings=STEPS + 2)
    folder = split(write_folder(tiny, tmp_path / "m"), 1, "uniform", tmp_path / "bundle", "tiny")
    (result,) = measure_bundle(folder, grid=Grid(batches=(1, 2), chunks=(64, 256), repeats=3))
    assert result.profile.tokens == 2
    assert list(result.prefill) == [STEPS + 2]
    assert result.profile.kv_token_s == 0
    assert result.profile.prefill_token_s > 0


@pytest.mark.slow
def test_a_session_is_begun_anew_when_it_is_full(bundle: Path) -> None:
    model = load_stage(bundle, store.load(bundle), 1)
    with LoopingClock(model, 2, 4) as clock:
        assert all(clock.batch_s(2) > 0 for _ in range(3 * STEPS))


def test_a_description_written_before_there_were_intervals_is_read() -> None:
    old = b'{"device":"cpu","alpha_s":0.1,"beta_s":0.2,"prefill_token_s":0.3}'
    assert msgspec.json.decode(old, type=StageProfile) == StageProfile("cpu", 0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"batches": (2, 2)}, "two batch sizes"), ({"repeats": 0}, "repeats"), ({"cores": (0, 1)}, "cores")],
)
def test_a_grid_that_cannot_be_fitted_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(**change)  # type: ignore[arg-type]


def test_the_command_prints_json_and_writes_both_files(bundle: Path) -> None:
    command = [
        "profile",
        str(bundle),
        "--cores",
        "1,2",
        "--batches",
        "1,4",
        "--tokens",
        "8",
        "--chunks",
        "8,16",
    ]
    result = CliRunner().invoke(app, [*command, "--repeats", "3", "--write", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert len(document["stages"]) == 2
    assert [(row["stage"], row["rows"]) for row in document["cores"]] == [(0, 1), (0, 4), (1, 1), (1, 4)]
    for row in document["cores"]:
        assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
    profiles = [stage.profile for stage in store.load(bundle).stages]
    assert [msgspec.to_builtins(profile) for profile in profiles] == [
        s["profile"] for s in document["stages"]
    ]
    rows = msgspec.json.decode((bundle / CPU_PROFILE).read_bytes(), type=CpuProfile)
    assert [len(stage) for stage in rows.stages] == [12, 12]
    plain = CliRunner().invoke(app, [*command, "--repeats", "3"])
    assert plain.exit_code == 0, plain.output
    assert "median change" in plain.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "one"], "--batches"),
        (["--batches", "4"], "two batch sizes"),
        (["--cores", "1,2", "--device", "cuda"], "--cores"),
    ],
)
def test_the_command_refuses_by_name(bundle: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["profile", str(bundle), *arguments])
    assert result.exit_code == 2
    assert message in result.output
