"""The report of a simulated run: percentiles with unanswered requests, warm-up, points over time."""

from __future__ import annotations

import io
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from keystage.controller.domain.snapshot import Slo
from keystage.simulator import plots, report, table
from keystage.simulator.api import (
    ArrivalSpec,
    Outcome,
    PipelineOutcome,
    PipelineSpec,
    StageOutcome,
    StageSpec,
    World,
)
from keystage.simulator.run import simulate
from keystage.simulator.watch import Watched

SPEC = PipelineSpec(
    name="p",
    stages=(StageSpec(alpha_s=0.1), StageSpec(alpha_s=0.05)),
    arrivals=ArrivalSpec(rate_rps=5.0, cv=2.0, count=200),
    slo=Slo(deadline_s=0.5),
    tokens=3,
)
WORLD = World(pipelines=(SPEC,), warm_s=2.0)


def outcome() -> Outcome:
    """Ten requests, one a second; the first two are warm-up, the last is unanswered."""
    arrived = np.arange(10.0)
    finished = arrived + np.array([9.0, 9.0, 0.4, 0.4, 0.4, 0.6, 0.8, 1.0, 2.0, math.nan])
    stage = StageOutcome(
        "p-stage-0", 10, 1.5, 0.2, 0.6, 24.0, 1, {"disk": 1}, 1.2, np.array([[0.0, 1, 1], [3, 2, 2]])
    )
    return Outcome((PipelineOutcome("p", arrived, finished, (stage,), 3),), 12.0, 24.0, 24.0, 50, 0.5)


def test_unanswered_requests_are_infinitely_late() -> None:
    found = report.latencies([0.1, 0.2, 0.3, math.inf])
    assert (found.p50, found.p75, found.p90, found.max) == (0.2, 0.3, None, 0.3)
    assert found.mean == pytest.approx(0.2)
    assert report.latencies([]).p99 is None


def test_measures_leave_the_warm_up_out() -> None:
    (pipeline,) = report.reported(WORLD, outcome(), "w", "none", 7).pipelines
    assert (pipeline.arrived, pipeline.unanswered) == (8, 1)
    assert pipeline.cv == pytest.approx(0.0)
    assert pipeline.latency_s.p50 == pytest.approx(0.6)
    within = {line.scale: (line.met_ratio, line.goodput_tps) for line in pipeline.attainment}
    assert within[1.0] == pytest.approx((3 / 8, 3 * 3 / 7))
    assert within[2.0] == pytest.approx((6 / 8, 3 * 6 / 7))
    assert pipeline.stages[0].replicas_mean == pytest.approx(2.0)
    assert pipeline.stages[0].replicas_most == 2


def test_a_report_is_written_and_read_back(tmp_path: Path) -> None:
    made = report.reported(WORLD, outcome(), "w", "none", 7)
    paths = report.write(made, outcome(), tmp_path)
    assert msgspec.json.decode(paths[0].read_bytes(), type=report.Report) == made
    lines = paths[1].read_text().splitlines()
    assert len(lines) == 11
    assert lines[-1] == "p,9,"


def test_the_table_says_never_and_counts_unanswered() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table.render(report.reported(WORLD, outcome(), "w", "none", 7)))
    console.file.close()
    text = console.export_text()
    assert "never" in text
    assert "1 unanswered at the end" in text
    assert "disk 1" in text


def test_a_watched_run_is_the_same_run_and_its_points_are_bounded(tmp_path: Path) -> None:
    plain = simulate(WORLD, Watched(None), 3, log=tmp_path / "a")
    watched = Watched(None, most=16)
    again = simulate(WORLD, watched, 3, log=tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert plain.log_sha256 == again.log_sha256
    times = sorted({point.at_s for point in watched.points})
    assert 8 <= len(times) <= 16
    assert times[0] == 0.0
    steps = np.diff(times)
    assert steps == pytest.approx(np.full(len(steps), steps[0]))
    assert {point.ready for point in watched.points} == {1}
    assert max(point.queue for point in watched.points) > 0


@pytest.mark.slow
def test_plots_are_drawn(tmp_path: Path) -> None:
    watched = Watched(None)
    run = simulate(WORLD, watched, 3)
    made = report.reported(WORLD, run, "w", "none", 3)
    paths = plots.draw(made, report.drawn(run, watched.points), tmp_path)
    assert [p.name for p in paths] == ["latency.png", "arrivals.png", "stages.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)
