"""`keystage load`: every flag reaches the options, and contradictions end with 2 and one line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from keystage.cli.main import app as command
from keystage.loadgen import app
from keystage.loadgen.options import LoadOptions

URL = "http://127.0.0.1:9/function/p"


def asked(monkeypatch: pytest.MonkeyPatch, *flags: str) -> LoadOptions:
    """The options that a command line comes to."""
    seen: list[LoadOptions] = []

    def load(options: LoadOptions, *, as_json: bool) -> int:
        assert not as_json
        seen.append(options)
        return 0

    monkeypatch.setattr(app, "load", load)
    done = CliRunner().invoke(command, ["load", URL, *flags])
    assert done.exit_code == 0, done.output
    return seen[0]


def test_defaults_are_those_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch) == LoadOptions(url=URL)


def test_flags_of_traces_and_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(
        monkeypatch,
        *("--trace", "t.csv.gz", "--trace-kind", "mooncake", "--functions", "a/f, a/g", "--apps", "a"),
        *("--triggers", "http,queue", "--top", "7", "--from", "60", "--to", "90", "--within", "gamma:4"),
        *("--map", "a/f=p", "--map", "hash:q,r", "--speed", "10", "--arrivals", "poisson"),
    )
    assert found == LoadOptions(
        url=URL,
        trace=Path("t.csv.gz"),
        trace_kind="mooncake",
        functions=("a/f", "a/g"),
        apps=("a",),
        triggers=("http", "queue"),
        top=7,
        from_s=60.0,
        to_s=90.0,
        within="gamma:4",
        mapping=("a/f=p", "hash:q,r"),
        speed=10.0,
        arrivals="poisson",
    )


def test_flags_of_modes_and_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(
        monkeypatch,
        *("--closed-loop", "8", "--think-s", "0.5", "--search-rate", "--search-attainment", "0.9"),
        *("--search-repeats", "5", "--search-precision", "0.1", "--processes", "3", "--http", "2"),
        *("--retries", "1"),
    )
    assert found == LoadOptions(
        url=URL,
        closed_loop=8,
        think_s=0.5,
        search_rate=True,
        search_attainment=0.9,
        search_repeats=5,
        search_precision=0.1,
        processes=3,
        http="2",
        retries=1,
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--processes", "many"], "--processes must be a number or auto, got 'many'"),
        (["--http", "3"], "--http must be 1.1 or 2, got '3'"),
        (["--target", "x", "--rate", "1"], "--target must be one of"),
        (["--rate", "1", "--arrivals", "poisson:rate=2"], "--rate 1 contradicts 'poisson:rate=2'"),
        (["--rate", "1", "--arrivals", "gamma:cv=-2"], "cv must be finite and at least 0, got -2"),
        (["--closed-loop", "2", "--rate", "1"], "--closed-loop and --rate contradict each other"),
        (["--rate", "1", "--search-rate"], "--search-rate looks for the highest rate that meets an SLO"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv"),
    ],
)
def test_bad_flags_end_with_2_and_are_named(flags: list[str], told: str) -> None:
    done = CliRunner().invoke(command, ["load", URL, *flags])
    assert done.exit_code == 2
    assert told in done.output.replace("\n", " ").replace("  ", " ")
