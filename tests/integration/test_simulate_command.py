"""`keystage simulate`: presets, files, policies, recorded decisions, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from keystage.bench.presets import demo_world, preset_world, presets
from keystage.cli.main import app
from keystage.simulator.api import ArrivalSpec, PipelineSpec, StageSpec, World
from keystage.simulator.check import check_world

RUNNER = CliRunner()


@pytest.fixture
def world(tmp_path: Path) -> Path:
    pipeline = PipelineSpec(
        name="p",
        stages=(StageSpec(alpha_s=0.02), StageSpec(alpha_s=0.04)),
        arrivals=ArrivalSpec(rate_rps=40.0, cv=2.0, count=800),
    )
    path = tmp_path / "world.json"
    path.write_bytes(msgspec.json.encode(World(pipelines=(pipeline,))))
    return path


@pytest.mark.parametrize("policy", ["keystage", "inferline", "cocktail", "infless", "static"])
def test_every_policy_runs_a_world_from_a_file(world: Path, tmp_path: Path, policy: str) -> None:
    out = tmp_path / policy
    result = RUNNER.invoke(app, ["simulate", str(world), "--policy", policy, "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads((out / "report.json").read_bytes())
    assert report["policy"] == policy
    assert report["pipelines"][0]["unanswered"] == 0
    assert {p.name for p in out.iterdir()} == {
        "report.json", "requests.csv", "latency.png", "arrivals.png", "stages.png",
    }  # fmt: skip


def test_decisions_can_be_replayed_and_logs_are_identical(world: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        arguments = [
            "simulate",
            str(world),
            "--out",
            str(tmp_path / "out"),
            "--log",
            str(tmp_path / f"{name}.log"),
        ]
        result = RUNNER.invoke(app, [*arguments, "--decisions", str(tmp_path / f"{name}.jsonl")])
        assert result.exit_code == 0, result.output
    assert (tmp_path / "a.log").read_bytes() == (tmp_path / "b.log").read_bytes()
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    replayed = RUNNER.invoke(app, ["replay-decisions", str(tmp_path / "a.jsonl")])
    assert replayed.exit_code == 0, replayed.output
    assert len((tmp_path / "a.jsonl").read_bytes().splitlines()) > 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json"], "no preset and no file 'nowhere.json'"),
        (["demo", "--policy", "luck"], "--policy must be one of"),
        (["demo", "--policy", "infless", "--decisions", "d.jsonl"], "not those of 'infless'"),
        (["demo", "--table", "C"], "--table must be A or B"),
    ],
)
def test_refusals_name_what_is_wrong(arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["simulate", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_garbled_world_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "world.json"
    path.write_text('{"pipelines": 3}')
    result = RUNNER.invoke(app, ["simulate", str(path)])
    assert result.exit_code == 2
    assert "is no world" in " ".join(result.output.split())


def test_presets_are_worlds_that_can_be() -> None:
    assert len(presets()) == 31
    check_world(demo_world(0))
    for policy in ("keystage", "infless", "none"):
        check_world(preset_world("paper-opt-cv8", policy, 1, "A"))


def test_presets_are_listed() -> None:
    result = RUNNER.invoke(app, ["simulate", "--list"])
    assert result.exit_code == 0
    assert "paper-bert-cv4" in result.output
