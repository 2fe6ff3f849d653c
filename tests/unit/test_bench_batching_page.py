"""Sweep, table and page of `keystage bench batching`, on runs too small to be results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keystage.bench import batching_report, batching_search, batching_sweep, batching_table
from keystage.bench.batching import _figures, _notes
from keystage.bench.batching_cells import MIXED, Cell
from keystage.bench.batching_models import TABLE_2
from keystage.bench.batching_search import Goodput, Search
from keystage.bench.batching_sweep import CellResult, SweepEffort, below, distribution
from keystage.bench.batching_systems import SYSTEMS, make
from keystage.bench.batching_table import TableEffort, TableRow, shown
from keystage.bench.frame import BenchError, BenchResult, document

COPIES = Cell("1080Ti", "ResNet50V2", 8, 1.0, 50, 1.0)


def result(ratio: float, cell: Cell = COPIES, seeds: int = 3) -> CellResult:
    return CellResult(cell, [1000 * ratio] * seeds, [1000.0] * seeds, is_again=True)


def found(rate_rps: float) -> Goodput:
    return Goodput(rate_rps, 1000, 14, (0.002, 0.007), 0.009, 0.01, 6)


def table_rows() -> list[TableRow]:
    return [
        TableRow(
            row, system, 0.2 if system == "timeout" else None, [found(rate) for rate in (5000.0, 5100.0)]
        )
        for row in TABLE_2
        for system in SYSTEMS
    ]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_finds_a_goodput_below_the_capacity(system: str) -> None:
    row = TABLE_2[1]
    wanted = Search(system, (row.model,), 8, 1.0, 0, batching_search.RunLength(requests=300, each=0), 0.05)
    goodput = batching_search.search(wanted)
    assert 300 < goodput.rate_rps < 1200
    assert goodput.worst_bad_ratio <= 0.01
    assert 0 < goodput.queueing_s[0] <= goodput.queueing_s[1] < row.model.slo_s


def test_a_system_that_is_none_is_refused() -> None:
    with pytest.raises(KeyError):
        make("best", [TABLE_2[0].model], [1.0], 1.0)


def test_runs_of_bursty_and_of_mixed_cells_are_longer() -> None:
    bursty = Cell("1080Ti", "BERT", 8, 1.0, 50, 0.1)
    mixed = Cell("1080Ti", MIXED, 35, 1.0, 0, 1.0)
    assert batching_sweep.length(COPIES, 4_000).requests == 4_000
    assert batching_sweep.length(bursty, 4_000).requests == 20_000
    assert (batching_sweep.length(COPIES, 4_000).each, batching_sweep.length(mixed, 4_000).each) == (0, 1_000)
    # 1,000 of each of 35 at 700 r/s: 50 s, after a warm-up of 5 of the longest SLO.
    warm_s, end_s = batching_sweep.length(mixed, 4_000).window(mixed.models, 700.0, 1 / 35)
    assert (warm_s, end_s - warm_s) == pytest.approx((5 * 0.378, 50.0))


@pytest.mark.slow
def test_a_cell_is_measured_and_measured_anew_when_it_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching_search.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(batching_sweep, "CLOSE_RATIO", 10.0)
    cell = Cell("1080Ti", "BERT", 8, 1.0, 50, 1.0)
    once = batching_sweep.measure([cell], SweepEffort(500, 0.05, 0, 0))
    twice = batching_sweep.measure([cell], SweepEffort(500, 0.05, 2, 600))
    assert (len(once[0].ratios), once[0].is_again) == (1, False)
    assert (len(twice[0].ratios), twice[0].is_again) == (2, True)
    for measured in (once[0], twice[0]):
        # What came at the end of so short a window is served after it.
        assert max(*measured.deferred_rps, *measured.eager_rps) < 1.1 * cell.most_rps
        assert 0.8 < measured.ratio < 1.25


def test_the_lowest_cells_come_first_and_the_distribution_holds_all() -> None:
    results = [result(ratio) for ratio in (1.2, 0.93, 0.89, 1.0, 0.951)]
    assert [round(cell.ratio, 3) for cell in below(results, 0.95)] == [0.89, 0.93]
    spread = distribution(results)
    assert spread["all"] == spread["1080Ti ResNet50V2"]
    assert (spread["all"]["cells"], spread["all"]["least"], spread["all"]["p50"]) == (5, 0.89, 0.951)


def test_where_nothing_holds_neither_is_ahead() -> None:
    assert CellResult(COPIES, [0.0, 5.0], [0.0, 0.0], is_again=True).ratios == [1.0, float("inf")]


def test_figures_count_cells_and_name_ours() -> None:
    rows = table_rows()
    figures = _figures(rows, [result(0.94), result(0.89), result(1.1), result(1.0)])
    assert figures["cells_below_095_ratio"].median == 0.5
    assert figures["cells_below_090"].median == 1
    assert figures["least_ratio"].median == pytest.approx(0.89)
    assert figures["resnet50_rps"].samples == [5000.0, 5100.0]
    assert not any(figure.is_noisy for figure in figures.values())


def test_a_row_stands_beside_the_papers() -> None:
    row = shown(table_rows()[0])
    assert row["goodput r/s"] == 5050
    assert row["of staggered"] == pytest.approx(5050 / 5839.4, abs=1e-4)
    assert (row["paper's r/s"], row["paper's batch"], row["queueing ms, p99"]) == (5264, 14, 7)
    assert shown(table_rows()[3])["system"] == "timeout (0.2)"
    assert [sentence.split(",")[0] for sentence in batching_table.bounds()] == [
        "ResNet50",
        "InceptionResNetV2",
    ]


def test_the_page_is_made_from_its_document(tmp_path: Path) -> None:
    rows, cells = table_rows(), [result(0.94), result(1.1)]
    made = BenchResult(
        [shown(row) for row in rows], _figures(rows, cells), _notes(TableEffort(2, 9, 0.1), cells)
    )
    tables = {"Table": made.rows, "Cells": [batching_sweep.shown(cell) for cell in cells], "Worse": []}
    page = batching_report.write(tmp_path, document("batching", made) | {"tables": tables})
    text = page.read_text()
    assert "| `cells_below_095_ratio` | 0.5 |" in text
    assert "1080Ti ResNet50V2 x 8, 8 GPUs, 50 ms, gamma 1 | 940 | 1000 | 0.94 |" in text
    assert "## Worse\n\nNone." in text
    page.unlink()
    assert batching_report.render(tmp_path).read_text() == text


def test_a_folder_without_a_document_makes_no_page(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"holds no batching\.json"):
        batching_report.render(tmp_path)
    (tmp_path / "batching.json").write_text(json.dumps({"figures": {}}))
    with pytest.raises(BenchError, match="is no document of bench batching"):
        batching_report.render(tmp_path)
