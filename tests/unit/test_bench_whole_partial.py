"""What stays of a benchmark of the whole that is cut short, or whose cells fail."""

from __future__ import annotations

import json
from pathlib import Path

from keystage.bench.frame import BenchResult, Figure
from keystage.bench.whole_partial import finished, keep, note_failure, partial_path

RESULT = BenchResult([{"a": 1}], {"b": Figure([2.0], "what")}, ["note"])


def test_a_run_that_is_cut_short_leaves_its_cells_and_says_so(tmp_path: Path) -> None:
    path = keep("e2e", RESULT, tmp_path / "out", "1 of 2 cells")
    kept = json.loads(path.read_text())
    assert kept["rows"] == [{"a": 1}]
    assert kept["figures"] == {"b": 2.0}
    assert not kept["is_result"]
    assert kept["disturbance"] == "not run to its end: 1 of 2 cells"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_whole_run_leaves_no_partial_file_and_failed_cells_make_it_none(tmp_path: Path) -> None:
    keep("e2e", RESULT, tmp_path, "")
    assert finished("e2e", RESULT, tmp_path, []) == RESULT
    assert not partial_path("e2e", tmp_path).exists()
    failed: list[str] = []
    note_failure(failed, "cv 8", ValueError("gone"))
    made = finished("e2e", RESULT, tmp_path, failed)
    assert made.notes == ["FAILED: cv 8: gone", "note"]
    assert made.disturbance == "1 cells failed"
