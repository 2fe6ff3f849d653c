"""The start benchmark, really run with little parameters: a ratio within one run, never a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from keystage.bench.frame import BenchError
from keystage.bench.load import run
from keystage.bench.page_cache import drop_from_page_cache, is_cached

pytestmark = pytest.mark.slow


def test_a_fork_is_many_times_faster_than_a_fresh_process() -> None:
    result = run(quick=True, gb=0.03, device="cpu", rounds=1)
    assert result.figures["fork_speedup"].median > 10
    assert result.figures["first_forward_speedup"].median > 5
    ways = {row["way"]: row["runs"] for row in result.rows}
    assert ways == {"fresh process, page cache": 1, "fork from holder": 1, "fork, 4 in a row": 4}


def test_a_file_leaves_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert is_cached(path)
    try:
        drop_from_page_cache(path)
        refusal = ""
    except BenchError as error:  # a file system in memory
        refusal = str(error)
    assert is_cached(path) == (refusal != "")
    assert refusal in ("", f"{path} stays in the page cache: no start from a cold disk here")
