"""Ratios, intervals, verdicts and figures of the paper experiment, on made-up scores."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

import pytest
from scipy import stats

from keystage.bench import paper_by_model, paper_figures, paper_tables
from keystage.bench.paper_cells import Cell
from keystage.bench.paper_ratios import GOODPUT, LATENCY, P99, interval, ratio
from keystage.bench.paper_run import PERCENTILES, SLO_RATIOS, Run, Score

TRACE = Cell("trace", 1, 0.0, 100.0, 20.0)
BURSTS = Cell("cv", 1, 8.0, 100.0)
CALM = Cell("cv", 4, 1.0, 100.0)


def score(cell: Cell, policy: str, seed: int, mean_s: float, share: float = 0.5) -> Score:
    return Score(
        run=Run(cell, policy, "A", seed),
        counted=1000,
        unserved=0,
        mean_s=mean_s,
        percentiles_s=tuple(mean_s * rank / 50 for rank in PERCENTILES),
        goodput_tps=tuple(share * r * cell.of.tokens for r in SLO_RATIOS),
        met_ratios=tuple(min(1.0, share * r) for r in SLO_RATIOS),
        queue=mean_s,
        gpu_s=1000.0,
        starts={"disk": 2},
        stage_queues=(1.0,) * 8,
        stage_busy=(0.5,) * 8,
        stage_cvs=(1.0,) * 8,
        events=10,
        wall_s=0.1,
        achieved_cv=1.0,
    )


def many(policy: str, factor: float, share: float = 0.5) -> list[Score]:
    """Three seeds of three cells; seeds differ, the policies' ratio is about `factor`."""
    return [
        score(cell, policy, seed, factor * (1 + seed) * (1.01 if seed == 1 and factor != 1 else 1.0), share)
        for cell in (TRACE, BURSTS, CALM)
        for seed in range(3)
    ]


def test_an_interval_is_students() -> None:
    values = [0.1, 0.3, 0.2, 0.6]
    mean, half = interval(values)
    low, high = stats.t.interval(0.95, 3, loc=mean, scale=stats.sem(values))
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert interval([1.0]) == (1.0, math.inf)


def test_ratios_are_paired_and_geometric() -> None:
    found = ratio(many("keystage", 1.0), many("cocktail", 2.0), LATENCY)
    assert found.mean == pytest.approx(0.5 * 1.01 ** (-1 / 3))
    assert found.low < found.mean < found.high < 1
    assert found.is_won(LATENCY)
    assert not found.is_lost(LATENCY)
    assert len(found.by_seed) == 3


def test_better_means_less_latency_and_more_goodput() -> None:
    slow, poor = ratio(many("keystage", 2.0), many("x", 1.0), P99), ratio(
        many("keystage", 2.0, 0.2), many("x", 1.0, 0.5), GOODPUT
    )  # fmt: skip
    assert slow.is_lost(P99)
    assert poor.mean == pytest.approx(0.4)
    assert poor.is_lost(GOODPUT)


def test_pairs_must_match() -> None:
    with pytest.raises(ValueError, match="9 runs of ours, 8 of theirs"):
        ratio(many("keystage", 1.0), many("x", 1.0)[:-1], LATENCY)


def test_no_response_in_time_counts_as_half_of_one() -> None:
    none = dataclasses.replace(score(BURSTS, "x", 0, 1.0), goodput_tps=(0.0,) * len(SLO_RATIOS))
    assert none.goodput(5.0) == pytest.approx(0.5 * 128 / 100)


def test_rows_put_the_printed_ratios_beside_ours() -> None:
    rows = paper_tables.rows("A", {"keystage": many("keystage", 1.0), "infless": many("infless", 2.0)})
    by_cell = {row["cell"]: row for row in rows}
    assert list(by_cell) == ["trace", "cv 8", "cv 1", "cv all"]
    assert by_cell["trace"]["paper"] == "0.129"
    assert by_cell["cv 8"]["paper_goodput"] == "17.9"
    assert by_cell["trace"]["verdict"] == "++="
    assert len({tuple(row) for row in rows}) == 1


def worse_where_unequal() -> dict[str, list[Score]]:
    """Twice as quick everywhere, but ten times as slow at CV 8, where the rival used other GPU-seconds."""
    theirs = [s for s in many("infless", 2.0) if s.run.cell != BURSTS]
    return {"keystage": many("keystage", 1.0), "infless": theirs + many_at(BURSTS, "infless", 0.1)}


def many_at(cell: Cell, policy: str, factor: float) -> list[Score]:
    return [s for s in many(policy, factor) if s.run.cell == cell]


MISSED = frozenset({(BURSTS, "infless")})


def test_pairs_that_are_not_equal_are_left_out_and_named() -> None:
    scores = worse_where_unequal()
    by_cell = {row["cell"]: row for row in paper_tables.rows("B", scores, MISSED)}
    assert by_cell["cv 8"]["verdict"] == "no equal pair"
    assert by_cell["cv 8"]["latency"] == "-"
    assert by_cell["cv 8"]["left_out"] == "1: BERT-21B"
    assert by_cell["trace"]["left_out"] == ""
    assert by_cell["cv all"]["left_out"] == "1: BERT-21B at cv 8"
    assert by_cell["cv all"]["latency"] == by_cell["cv 1"]["latency"]  # what is left
    assert by_cell["cv all"]["verdict"] == "++="
    (text,) = paper_tables.left_out(scores, MISSED)
    assert "against infless" in text
    assert "1 of 3 pairs: BERT-21B at cv 8" in text


def test_figures_and_verdicts_are_over_equal_pairs() -> None:
    scores = worse_where_unequal()
    figures = paper_tables.figures(scores, "_equal", targets=False, missed=MISSED)
    assert figures["latency_cvs_vs_infless_equal"].median < 1
    assert paper_tables.figures(scores, "", targets=False)["latency_cvs_vs_infless"].median > 1
    assert "goodput_cv8_vs_infless_equal" not in figures
    text = "\n".join(paper_tables.losses("B", scores, MISSED))
    assert "neither won nor lost: table B, cv 8 vs infless" in text
    assert "LOST" not in text
    assert "LOST: table B, cv 8, latency" in "\n".join(paper_tables.losses("B", scores))


def test_by_model_keeps_all_pairs_and_marks_them(tmp_path: Path) -> None:
    scores = worse_where_unequal()
    found = paper_by_model.lines("B", scores, MISSED)
    assert paper_by_model.sentences(found) == []
    paper_by_model.write(tmp_path / "m.csv", found)
    with (tmp_path / "m.csv").open(newline="") as file:
        lines = [row for row in csv.DictReader(file) if row["measure"] == "latency"]
    unequal = [(row["cell"], row["model"]) for row in lines if row["equal"] == "no"]
    assert unequal == [("cv 8", "BERT-21B"), ("cv 8", "all models"), ("cv all", "all models")]
    by_cell = {(row["cell"], row["model"]): float(row["ratio"]) for row in lines}
    assert by_cell["cv all", "all models"] > 1
    assert by_cell["cv 8", "all models"] == pytest.approx(10, rel=0.02)


def test_figures_carry_the_fixed_names() -> None:
    scores = {
        n: many(n, f) for n, f in (("keystage", 1.0), ("infless", 2.0), ("inferline", 3.0), ("cocktail", 1.5))
    }
    names = paper_tables.figures(scores, "", targets=True) | paper_tables.figures(
        scores, "_equal", targets=False
    )
    for rival in ("infless", "inferline", "cocktail"):
        for key in ("latency", "goodput_slo15", "goodput_cv8"):
            for suffix in ("", "_equal"):
                assert f"{key}_vs_{rival}{suffix}" in names
    assert len(names["latency_vs_infless"].samples) == 3
    assert names["latency_vs_infless"].target == "below 0.129 (paper)"
    assert names["latency_vs_infless_equal"].target == "below 1"


def test_lost_cells_and_missed_ratios_are_said() -> None:
    worse = {"keystage": many("keystage", 2.0), "infless": many("infless", 1.0)}
    text = "\n".join(paper_tables.losses("A", worse))
    assert "LOST: table A, trace, latency vs infless" in text
    assert "paper's ratio missed: trace, latency vs infless" in text
    same = {"keystage": many("keystage", 1.0), "infless": many("infless", 1.0)}
    text = "\n".join(paper_tables.losses("B", same))
    assert "not won: table B, cv 8, latency" in text
    assert "cv 1," not in text


def test_runs_are_written_one_a_line(tmp_path: Path) -> None:
    paper_tables.write_scores(tmp_path / "runs.csv", many("keystage", 1.0))
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    assert rows[0]["policy"] == "keystage"
    assert rows[0]["starts"] == "disk:2"
    assert None not in rows[0]


def test_figures_are_drawn(tmp_path: Path) -> None:
    scores = {n: many(n, f) for n, f in (("keystage", 1.0), ("infless", 2.0))}
    paths = paper_figures.draw(tmp_path, scores, "-equal")
    assert [p.name for p in paths] == ["figure-6-equal.png", "figure-7-equal.png", "figure-8-equal.png"]
    path = paper_figures.draw_case_study(
        tmp_path / "c.png", [1.0, 2.0], [0.1, 3.0], [0.5, 0.6], ["a", "b", "c"]
    )
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (*paths, path))


def test_a_loss_of_one_model_shows_though_the_pool_wins(tmp_path: Path) -> None:
    mine = [score(Cell("cv", m, 8.0, 100.0), "keystage", s, 1.0 + 0.01 * s) for m in (1, 3) for s in range(3)]
    factor = {1: 0.5, 3: 20.0}
    theirs = [score(Cell("cv", m, 8.0, 100.0), "infless", s, factor[m]) for m in (1, 3) for s in range(3)]
    scores = {"keystage": mine, "infless": theirs}
    found = paper_by_model.lines("B", scores)
    text = paper_by_model.sentences(found)
    assert [t for t in text if "latency" in t] == [
        "by model, table B, latency lost to infless: BERT-21B 2.02 at cv 8"
    ]
    paper_by_model.write(tmp_path / "m.csv", found)
    assert len((tmp_path / "m.csv").read_text().splitlines()) == 1 + 3 * 3
