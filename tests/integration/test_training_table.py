"""Propagation of variation against the simulator, and the training command, both in short.

The full table is what `keystage train-cv` prints (12 chains per CV, whole runs); here runs are a quarter as
long, so that a minute is enough. Seeds and rates are ones that the shipped weights have never seen.
"""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from keystage.controller.maths.attention import Weights, shipped
from keystage.training.report import compare, text
from keystage.training.session import TrainOptions, held_out


@pytest.fixture(scope="module")
def rows():
    return {r.name: r for r in compare(held_out(8, TrainOptions(workers=1, scale=0.2)), shipped())}


@pytest.mark.slow
def test_the_formula_has_at_most_half_the_error_of_the_guess(rows):
    assert rows["qna"].all <= 0.5 * rows["same as upstream"].all, text(list(rows.values()))


@pytest.mark.slow
def test_the_formula_is_better_than_the_printed_one(rows):
    assert rows["qna"].all < 0.7 * rows["whitt as printed"].all, text(list(rows.values()))


def test_attention_is_better_than_the_formula(rows):
    assert rows["attention"].all < rows["qna"].all, text(list(rows.values()))


def test_a_single_step_of_the_formula_beats_the_single_step_of_the_guess(rows):
    assert rows["one step: qna"].all < rows["one step: same as upstream"].all


def test_the_table_names_every_entry_cv(rows):
    assert sorted(rows["qna"].by_cv) == [0.1, 1.0, 2.0, 4.0, 8.0]
    assert "CV 8" in text(list(rows.values()))


def test_the_command_trains_tests_and_writes(tmp_path):
    pytest.importorskip("torch")
    import typer

    from keystage.cli.train import train_cv

    app = typer.Typer()
    app.command()(train_cv)
    out = tmp_path / "w.json"
    arguments = ["--quick", "--seeds", "16", "--held-out", "2", "--epochs", "3", "--workers", "1"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert result.exit_code in (0, 3), result.output
    weights = msgspec.json.decode(out.read_bytes(), type=Weights)
    assert weights.metrics is not None
    assert weights.metrics.chains == 16
    assert "one step: qna" in result.output
    refused = CliRunner().invoke(app, ["--seeds", "2", "--out", str(out)])
    assert refused.exit_code == 2
    assert "seeds must be in 16.." in refused.output
