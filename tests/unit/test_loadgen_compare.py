"""Comparing two runs: what is refused, what is said, and what is not said."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.load_reports import SPAN_S, queued, rows, saved, side, times
from typer.testing import CliRunner

from keystage.cli.main import app
from keystage.loadgen import comparison, requestlog
from keystage.loadgen.compare import CompareError, compare, sheet
from keystage.loadgen.comparison import METRICS, Comparison, compared
from keystage.loadgen.measures import Slo
from keystage.loadgen.sender import Row

AT_S = times(1200, 77)


def run(seed: int, **changes: Any) -> list[Row]:
    return rows(seed, 1200, at_s=AT_S, **changes)


def beside(a: list[Row], b: list[Row], **changes: Any) -> Comparison:
    given: dict[str, Any] = {"names": ("a", "b"), "slo": Slo(), "is_paired": True, "replicates": 2000}
    return compared(side(a), side(b), **(given | changes))


def verdicts(found: Comparison) -> dict[str, str]:
    return {line.metric: line.verdict for line in found.lines}


def test_a_run_beside_itself_has_no_difference_and_no_width() -> None:
    found = beside(run(1), run(1))
    assert set(verdicts(found).values()) == {"no difference"}
    times_ = [line for line in found.lines if line.unit == "s"]
    assert len(times_) == 12
    assert {(line.difference, line.low, line.high) for line in times_} == {(0.0, 0.0, 0.0)}


def test_a_fifth_slower_is_worse_and_the_other_way_better() -> None:
    """A shift of 20 % among 1,200 requests of sigma 0.5: found in every median and mean."""
    slow, quick = run(2, scale=1.2), run(1)
    worse, better = verdicts(beside(quick, slow)), verdicts(beside(slow, quick))
    for metric in ("latency_p50", "latency_mean", "ttft_p50", "ttft_mean", "tpot_p50", "tpot_mean"):
        assert (worse[metric], better[metric]) == ("worse", "better")
    assert worse["failure_share"] == "no difference"


def test_intervals_hold_the_difference_and_say_its_share() -> None:
    found = beside(run(1), run(2, scale=1.5), metrics=("latency_mean",))
    (line,) = found.lines
    assert line.difference is not None
    assert line.low is not None
    assert line.high is not None
    assert line.low < line.difference < line.high
    assert line.relative == pytest.approx(line.difference / (line.a or 0))
    assert found.intervals == 1


def test_more_goodput_is_better() -> None:
    found = beside(run(1), run(2, scale=1.5), slo=Slo(latency_s=0.4), metrics=("goodput",))
    (line,) = found.lines
    assert (line.verdict, line.unit) == ("worse", "requests/s")
    assert line.a is not None
    assert line.a > (line.b or 0)


def test_failures_by_exact_shares() -> None:
    none, some = run(1), run(2, failed_ratio=0.03)
    found = beside(none, some, metrics=("failure_share",))
    (line,) = found.lines
    assert (line.verdict, line.a) == ("worse", 0.0)
    lost = sum(not row.is_served for row in some)
    (same,) = beside(none, run(3), metrics=("failure_share",)).lines
    assert same.verdict == "no difference"
    assert same.high is not None
    assert same.high > 0, "no failure among 1,200 does not mean that none is to come"
    assert line.b == lost / 1200


def test_failures_in_one_clump_are_no_proof() -> None:
    """30 failures in a row: the exact interval alone would call it; the blocks know of one incident."""
    clump = [dataclasses.replace(row) for row in run(1)]
    for row in clump[400:430]:
        row.error, row.status, row.first_s = "http_503: no worker", 503, None
    (line,) = beside(run(1), clump, metrics=("failure_share",), block_s=2.0).lines
    exact = comparison.share_difference((0, 1200), (30, 1200), 0.05)
    assert exact[0] > 0
    assert line.verdict == "no difference"


def all_failed(given: list[Row]) -> list[Row]:
    return [dataclasses.replace(row, error="http_503: no worker", status=503, first_s=None) for row in given]


@pytest.mark.parametrize("at_s", [AT_S[:40], AT_S[::30]], ids=["in a row", "all over"])
@pytest.mark.parametrize("is_paired", [True, False])
def test_forty_of_forty_failed_are_a_difference_wherever_they_lie(at_s: list[float], is_paired: bool) -> None:
    none = rows(1, 40, at_s=at_s)
    given = {"metrics": ("failure_share",), "is_paired": is_paired}
    (line,) = beside(none, all_failed(none), **given).lines
    assert (line.a, line.b, line.verdict) == (0.0, 1.0, "worse")
    assert line.low is not None
    assert 0.75 < line.low < 1.0  # 0 of 40 and 40 of 40 each hold 91 % with half of 5 %
    (back,) = beside(all_failed(none), none, **given).lines
    assert back.verdict == "better"
    (same,) = beside(all_failed(none), all_failed(none), **given).lines
    assert same.verdict == "no difference"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_so_few_requests_that_nothing_could_be_told_are_too_few_data(count: int) -> None:
    none = rows(1, count, at_s=AT_S[:: 1200 // count][:count])
    for other in (none, all_failed(none)):
        (line,) = beside(none, other, metrics=("failure_share",)).lines
        assert (line.verdict, line.low, line.high) == ("too few data", None, None)
        assert line.because == (
            f"{count} and {count} requests: even none failed against all failed would be no proof"
        )


def test_an_interval_without_ends_is_too_few_data() -> None:
    few = rows(1, 40, at_s=AT_S[:40])  # in three of 75 blocks: some replicates draw none of them
    (line,) = beside(few, rows(2, 40, at_s=AT_S[:40], scale=1.2), metrics=("latency_p50",)).lines
    assert (line.verdict, line.low, line.high) == ("too few data", None, None)
    assert "no end on either side" in line.because
    assert line.difference is not None


def test_percentiles_need_ten_requests_beyond_them() -> None:
    few = rows(1, 999, at_s=AT_S[:999])
    found = {line.metric: line for line in beside(few, few).lines}
    assert (found["latency_p99"].verdict, found["latency_p90"].verdict) == ("too few data", "no difference")
    assert found["latency_p99"].because == "999 requests, at least 1000"
    tiny = rows(1, 15, at_s=AT_S[:15])
    assert {line.verdict for line in beside(tiny, tiny).lines} <= {"too few data", "no difference"}
    assert verdicts(beside(tiny, tiny))["latency_mean"] == "too few data"


def test_a_percentile_on_failed_requests_is_undefined() -> None:
    found = {line.metric: line for line in beside(run(1), run(2, failed_ratio=0.05)).lines}
    line = found["latency_p99"]
    assert (line.verdict, line.b, line.low) == ("undefined", None, None)
    assert "failed requests in B" in line.because
    assert found["latency_p50"].verdict == "no difference"


def test_latencies_that_stay_correlated_are_too_few_data() -> None:
    a, b = (queued(seed, times(600, seed + 50), service_s=0.098) for seed in (1, 2))
    found = beside(a, b, is_paired=False)
    assert set(verdicts(found).values()) == {"too few data"}
    assert found.intervals == 0
    assert "latencies stay correlated over" in found.lines[0].because
    assert beside(a, b, is_paired=False, block_s=2.0).blocks.too_few == ""


def test_answers_without_tokens_have_whole_latencies_only() -> None:
    plain = dataclasses.replace(side(run(1)), streams=False)
    found = compared(plain, side(run(2)), names=("a", "b"), slo=Slo(), is_paired=True, replicates=200)
    assert {line.metric.partition("_")[0] for line in found.lines} == {"latency", "failure"}


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ((), METRICS),
        (("ttft",), ("ttft_p50", "ttft_p90", "ttft_p99", "ttft_mean")),
        (("goodput", "latency_p99"), ("latency_p99", "goodput")),
    ],
)
def test_metrics_by_name_and_group(names: tuple[str, ...], chosen: tuple[str, ...]) -> None:
    assert comparison.wanted(names) == chosen


@pytest.mark.parametrize("name", ["p99", "failure", "", "latency_p42"])
def test_a_metric_that_is_none(name: str) -> None:
    with pytest.raises(ValueError, match="is none of latency, ttft, tpot, latency_p50"):
        comparison.wanted((name,))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return saved(run(1), tmp_path / "a"), saved(run(2), tmp_path / "b", url="http://other/function/p")


@pytest.mark.slow
def test_two_folders_of_one_plan(folders: tuple[Path, Path]) -> None:
    found = compare(*folders)
    assert found.blocks.is_paired
    assert [line.metric for line in found.lines] == list(METRICS), "the SLO is that of the reports"
    assert found.notes == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 2}, "plans differ: seed 1 and 2"),
        ({"slo": Slo(ttft_s=0.3)}, "SLOs differ: TTFT 200 ms; TTFT 300 ms"),
        ({"target": "raw"}, "plans differ: target 'openai' and 'raw'"),
    ],
)
def test_other_plans_are_refused_unless_forced(
    changes: dict[str, Any], told: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    other = saved(run(2), tmp_path / "c", **changes)
    with pytest.raises(CompareError, match=told):
        compare(folders[0], other)
    found = compare(folders[0], other, is_forced=True, metrics=("latency_mean",))
    assert f"forced: {told}" in found.notes
    assert found.blocks.is_paired == told.startswith("SLOs")


def test_other_times_and_rates_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = saved(rows(2, 600), tmp_path / "c")
    with pytest.raises(CompareError) as refused:
        compare(folders[0], other)
    for told in ("rate_rps 20.0 and 10.0", "requests 1200 and 600", "the times themselves", "--force"):
        assert told in str(refused.value)


def test_an_invalid_run_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = saved(run(2, lag_s=0.2), tmp_path / "c")
    with pytest.raises(CompareError, match=r"B is not valid: send lag p99 is 200\.0 ms"):
        compare(folders[0], other)


@pytest.mark.slow
def test_files_of_requests_alone(tmp_path: Path) -> None:
    a = requestlog.write(run(1), tmp_path / "a.jsonl")
    b = requestlog.write(run(2), tmp_path / "b.jsonl")
    found = compare(a, b, slo=Slo(ttft_s=0.2))
    assert found.blocks.is_paired, "the same requests at the same times"
    assert [line.metric for line in found.lines] == list(METRICS)
    assert "no goodput without an SLO" in compare(a, b).notes[-1]
    shifted = requestlog.write(rows(2, 1200), tmp_path / "c.jsonl")
    with pytest.raises(CompareError, match="the times themselves"):
        compare(a, shifted)
    with pytest.raises(CompareError, match="requests 1200 and 500"):
        compare(a, requestlog.write(rows(2, 500), tmp_path / "d.jsonl"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "missing required field `version`"),
        ("nonsense", "report.json: JSON is malformed"),
        ('{"version": 1, "policy": "x"}', "is no report of `keystage load` of version 2 .it says 1"),
        ('{"version": 2, "plan": {}}', "missing required field"),
    ],
)
def test_what_is_no_report(text: str, told: str, folders: tuple[Path, Path]) -> None:
    (folders[1] / "report.json").write_text(text)
    with pytest.raises(CompareError, match=told):
        compare(*folders)


def test_what_is_not_there(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CompareError, match=r"holds neither report\.json nor requests\.jsonl"):
        compare(folders[0], tmp_path / "empty")
    with pytest.raises(CompareError, match="No such file"):
        compare(tmp_path / "none", folders[1])
    (folders[1] / "requests.jsonl").unlink()
    with pytest.raises(CompareError, match=r"requests\.jsonl: No such file"):
        compare(*folders)


def test_the_command(folders: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = map(str, folders)
    runner = CliRunner()
    shown = runner.invoke(app, ["compare", a, b, "--metric", "latency", "--metric", "goodput"])
    assert shown.exit_code == 0, shown.output
    assert "no difference" in shown.output
    assert "5 intervals, Bonferroni" in " ".join(shown.output.split())
    as_json = runner.invoke(app, ["compare", a, b, "--metric", "latency_p99", "--json", "--seed", "3"])
    found = json.loads(as_json.output)
    assert (found["lines"][0]["metric"], found["seed"], found["confidence"]) == ("latency_p99", 3, 0.95)
    slower = str(saved(run(2, scale=1.5), tmp_path / "slow"))
    judged = ["compare", a, slower, "--metric", "latency_p50", "--fail-if-worse"]
    assert runner.invoke(app, judged).exit_code == 1
    assert runner.invoke(app, [*judged[:1], slower, a, *judged[3:]]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--metric", "p42"], "'p42' is none of"),
        (["--confidence", "1.0"], "--confidence must be between 0 and 1, got 1"),
        (["--block", "0"], f"--block must be above 0 and at most {SPAN_S:g} s, got 0"),
        (["--seed", "-1"], "--seed must be in 0..2^32-1, got -1"),
        (["--slo-ttft", "-1"], "--slo-ttft must be finite and above 0, got -1"),
    ],
)
def test_flags_out_of_bounds(arguments: list[str], told: str, folders: tuple[Path, Path]) -> None:
    refused = CliRunner().invoke(app, ["compare", *map(str, folders), *arguments])
    assert refused.exit_code == 2
    assert told in refused.output


def test_what_was_not_measured_in_both_is_named(tmp_path: Path) -> None:
    plain = [
        saved(run(seed), tmp_path / str(seed), streaming=False, slo=Slo(latency_s=0.5)) for seed in (1, 2)
    ]
    with pytest.raises(CompareError, match="tpot_p50, tpot_p90, tpot_p99, tpot_mean: not measured in both"):
        compare(*plain, metrics=("tpot",))
    found = compare(*plain, metrics=("ttft", "latency_p50"))
    assert [line.metric for line in found.lines] == ["latency_p50"]
    assert found.notes == ["not measured in both runs: ttft_p50, ttft_p90, ttft_p99, ttft_mean"]


def test_a_run_that_serves_nothing_beside_one_that_does(tmp_path: Path) -> None:
    lost = [Row(row.index, row.scheduled_s, row.scheduled_s, error="connect: refused") for row in run(1)]
    given = {"metrics": ("latency_p50", "latency_mean", "failure_share"), "block_s": 1.0}
    found = {line.metric: line for line in beside(run(1), lost, **given).lines}
    assert found["failure_share"].verdict == "worse"
    assert (found["latency_p50"].verdict, found["latency_p50"].b) == ("undefined", None)
    assert found["latency_mean"].because == "0 served requests, at least 20"
    shown = sheet(beside(run(1), lost, **given))
    assert [row[2] for row in shown.rows] == ["failed", "-", "100.00 %"]


def test_a_bound_that_replicates_do_not_give_is_unbounded() -> None:
    """Some 9.5 % failed: p90 is known, but many replicates put it on a failure."""
    some = run(2, failed_ratio=0.095)
    (line,) = beside(run(1), some, metrics=("latency_p90",)).lines
    assert (line.verdict, line.high) == ("worse", None)
    assert line.low is not None
    assert "to unbounded" in sheet(beside(run(1), some, metrics=("latency_p90",))).rows[0][5]


def test_a_mean_is_not_better_because_slow_requests_failed() -> None:
    """B loses its slowest fifth: the mean of what is left is far lower, and says nothing good of B."""
    a, b = run(1), run(1)
    for row in sorted(b, key=lambda row: row.last_s - row.scheduled_s)[-240:]:
        row.status, row.error = 0, "timeout: no whole answer within 1 s"
    [mean] = beside(a, b, metrics=("latency_mean",)).lines
    assert mean.verdict == "undefined"
    assert mean.because == "a mean is of served requests, and B failed more: see failure_share"
    [other] = beside(b, a, metrics=("latency_mean",)).lines
    assert (other.verdict, "A failed more" in other.because) == ("undefined", True)


def test_requests_that_are_missing_from_a_file_are_told(folders: tuple[Path, Path], tmp_path: Path) -> None:
    kept = [row for row in run(1) if row.index not in (7, 8)]
    a = requestlog.write(kept, tmp_path / "a.jsonl")
    b = requestlog.write(kept, tmp_path / "b.jsonl")
    with pytest.raises(
        CompareError, match="A is not whole: 2 requests up to 1199 are not in the file, the first is 7"
    ):
        compare(a, b)
    assert any("B is not whole" in note for note in compare(a, b, is_forced=True).notes)
    lines = (folders[1] / "requests.jsonl").read_bytes().splitlines(keepends=True)
    (folders[1] / "requests.jsonl").write_bytes(b"".join(lines[:1000]))
    with pytest.raises(
        CompareError, match=r"B is not whole: requests\.jsonl has 1000 requests, report\.json 1200"
    ):
        compare(*folders)
