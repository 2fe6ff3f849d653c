"""`keystage simulate`: presets, files, policies, recorded decisions, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from keystage.bench.paper_arrivals import COUNTS, TIMES
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        (["demo", "--seed", "-1"], "--seed must be 0 or more, got -1"),
        (["demo", "--effort", "0"], "--effort must be positive and finite, got 0.0"),
        (["demo", "--effort", "nan"], "--effort must be positive and finite, got nan"),
        (["demo", "--effort", "inf"], "--effort must be positive and finite, got inf"),
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


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["inferline", "cocktail", "infless", "static"])
def test_effort_multiplies_what_was_tuned(world: Path, tmp_path: Path, policy: str) -> None:
    used = []
    for effort in ("0.7", "2"):
        out = tmp_path / effort
        arguments = ["simulate", str(world), "--policy", policy, "--effort", effort, "--out", str(out)]
        result = RUNNER.invoke(app, arguments)
        assert result.exit_code == 0, result.output
        used.append(json.loads((out / "report.json").read_bytes())["gpu_s"])
    assert used[0] < 0.95 * used[1]


@pytest.mark.parametrize("command", [["simulate", "demo"], ["bench", "tick", "--quick"]])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "out"
    result = RUNNER.invoke(app, [*command, "--out", str(path)])
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert f"{path} cannot be made a folder" in " ".join(result.output.replace("\n", "").split())


def test_a_log_that_cannot_be_written_is_one_line(world: Path, tmp_path: Path) -> None:
    path = tmp_path / "none" / "events.log"
    arguments = ["simulate", str(world), "--out", str(tmp_path / "out"), "--log", str(path)]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 1
    assert f"{path} cannot be written" in result.output.replace("\n", "")


def test_traces_that_are_no_text_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (COUNTS, TIMES):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(b"a,b\n\xff\xfe,1\n")
    monkeypatch.setenv("KEYSTAGE_TRACE_FOLDER", str(tmp_path))
    result = RUNNER.invoke(app, ["simulate", "paper-bert-trace", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "is no UTF-8 text" in " ".join(result.output.split())
