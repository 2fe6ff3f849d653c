"""`keystage trace info`: text, JSON, plots, selection, and one line for what cannot be used."""

import json
from pathlib import Path

import pytest
from support.traces import COUNTS_2019, DURATIONS_2019, EVENTS_2021, GOOD, MEMORY_2019
from typer.testing import CliRunner

from keystage.cli.main import app


def run(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["trace", "info", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    for name, text in (("counts", COUNTS_2019), ("durations", DURATIONS_2019), ("memory", MEMORY_2019)):
        (tmp_path / name).write_text(text)
    return tmp_path / "counts"


@pytest.mark.parametrize("kind", GOOD)
def test_every_kind_is_described(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    path.write_text(GOOD[kind])
    code, out, _ = run(path)
    assert code == 0
    assert kind in out
    assert "CV of gaps" in out
    assert ("context tokens" in out) == ("functions" not in kind)
    assert ("busiest functions" in out) == ("functions" in kind)


def test_joined_files_selection_and_json(counts: Path) -> None:
    code, out, err = run(
        counts, "--durations", counts.with_name("durations"), "--memory", counts.with_name("memory"),
        "--apps", "a1", "--triggers", "http, queue", "--from", "0", "--to", "120", "--within", "gamma:2",
        "--seed", "3", "--json", "--plots", counts.with_name("plots"),
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    assert (found["rows"], found["window_s"]) == (3, 120.0)
    assert found["arrivals"] == "gamma:2 within each minute, seed 3"
    assert found["memory_mb"]["mean"] == 128.5
    assert [one["function"] for one in found["top"]] == ["a1/f1"]
    assert "plots in" in err
    assert (counts.with_name("plots") / "rate.png").is_file()


def test_functions_and_the_busiest_are_chosen(counts: Path) -> None:
    for flags, rows in ((["--top", "1"], 40), (["--functions", "f2,a2/f3"], 43)):
        code, out, _ = run(counts, "--json", *flags)
        assert (code, json.loads(out)["rows"]) == (0, rows)


def test_within_is_refused_where_rows_have_times(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(EVENTS_2021)
    code, _, err = run(path, "--within", "uniform")
    assert code == 2
    assert "--within turns counts per minute into arrivals" in err


def test_nothing_selected_is_said(counts: Path) -> None:
    code, out, _ = run(counts, "--from", "1e6")
    assert code == 0
    assert "0: nothing is selected" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--functions", "f9"], "has no function 'f9'"),
        (["--within", "normal"], "poisson, uniform or gamma:CV"),
        (["--top", "0"], "at least 1, got 0"),
        (["--from", "9", "--to", "3"], "must end after its start at 9 s, got 3"),
        (["--kind", "azure-llm"], "line 1: expected the header TIMESTAMP"),
        (["--kind", "vhive"], "kind must be one of"),
        (["--durations", "/nowhere"], "line 0: cannot be read: No such file"),
    ],
)
def test_refusals_are_one_line_and_exit_2(counts: Path, flags: list[str], said: str) -> None:
    code, out, err = run(counts, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("keystage: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_bad_file_is_one_line_and_exit_2(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(EVENTS_2021 + "a,b,c\n")
    code, out, err = run(path)
    assert (code, out) == (2, "")
    assert err == f"keystage: trace {path}, line 6: expected 4 fields, found 3: 'a,b,c'\n"


def test_a_folder_for_plots_that_cannot_be_made_is_exit_1(counts: Path) -> None:
    code, _, err = run(counts, "--plots", counts)
    assert code == 1
    assert f"--plots {counts}: File exists" in err
