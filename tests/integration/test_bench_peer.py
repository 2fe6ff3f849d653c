"""`keystage bench peer`: a short run has its figures, and refuses a size that memory cannot hold."""

from __future__ import annotations

import math

import pytest

from keystage.bench.frame import BenchError
from keystage.bench.peer import run


def test_a_short_run_has_its_figures() -> None:
    result = run(quick=True, mb=16)
    assert [row["way"] for row in result.rows] == [
        "plain, kept", "keystage", "plain, kept and hashed", "plain, not kept",
    ]  # fmt: skip
    assert all(math.isfinite(row["GB/s"]) and row["GB/s"] > 0 for row in result.rows)
    assert set(result.figures) == {"peer_ratio", "peer_limit_ratio"}
    assert all(len(figure.samples) == 5 for figure in result.figures.values())


def test_more_than_memory_is_refused() -> None:
    with pytest.raises(BenchError, match=r"--mb 1000000000: \d+ bytes needed, \d+ are free"):
        run(mb=1_000_000_000)
