"""Arrivals of the paper experiment: dealing, scaling, CVs within a minute, and garbled files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keystage.bench import paper_arrivals as arrivals
from keystage.bench.paper_arrivals import COUNTS, TIMES, PaperTraceError, Trace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four functions over three minutes, and two minutes of gaps."""
    counts, times = tmp_path / COUNTS, tmp_path / TIMES
    counts.parent.mkdir(parents=True)
    times.parent.mkdir(parents=True)
    counts.write_text(
        "o,a,f,t,1,2,3\no,a,f1,http,1,2,3\no,a,f2,http,10,20,30\no,a,f3,http,0,1,0\no,a,f4,http,5,5,5\n"
    )
    starts = [0, 1, 2, 3, 4, 60, 61, 63, 67, 200]
    rows = [f"a,f,{start + 0.5},0.5" for start in reversed(starts)]
    times.write_text("app,func,end_timestamp,duration\n" + "\n".join(rows) + "\n")
    return tmp_path


def test_functions_are_dealt_in_file_order(folder: Path) -> None:
    trace = arrivals.load_trace(2, folder)
    assert trace.minutes.tolist() == [[1, 3, 3], [15, 25, 35]]
    assert "4 functions" in trace.source


def test_gaps_are_relative_to_their_minute(folder: Path) -> None:
    even, uneven = [1, 1, 1, 1], [1 / (7 / 3), 2 / (7 / 3), 4 / (7 / 3)]
    expected = float(np.std([*even, *uneven]))
    assert arrivals.load_trace(2, folder).gap_cv == pytest.approx(expected)


def test_a_named_folder_must_hold_the_files(tmp_path: Path) -> None:
    with pytest.raises(PaperTraceError, match="lacks"):
        arrivals.traces_folder(tmp_path)


def test_garbled_files_are_named_with_the_line(folder: Path) -> None:
    (folder / COUNTS).write_text("o,a,f,t,1\no,a,f1,http,many\n")
    with pytest.raises(PaperTraceError, match="not a number"):
        arrivals.load_trace(2, folder)
    (folder / COUNTS).write_text("o,a,f,t,1\no,a,f1,http,1\no,a\n")
    with pytest.raises(PaperTraceError, match="line 3"):
        arrivals.load_trace(2, folder)


def test_minutes_without_enough_arrivals_give_no_cv() -> None:
    with pytest.raises(PaperTraceError, match="unknown"):
        arrivals.within_minute_cv(np.array([1.0, 2.0, 70.0]))


def test_replay_keeps_the_minutes_shape_and_the_gaps_cv() -> None:
    minutes = np.array([[1.0, 3.0, 2.0, 2.0]])
    found = [arrivals.replayed(Trace(minutes, 2.0, ""), 0, 100.0, 240.0, seed) for seed in range(8)]
    per_minute = np.mean([np.histogram(times, bins=[0, 60, 120, 180, 240])[0] for times in found], axis=0)
    # At CV 2 the count of a minute has a standard deviation of 2 sqrt(n); 4 standard errors over 8 seeds.
    expected = np.array([3000.0, 9000.0, 6000.0, 6000.0])
    assert np.all(np.abs(per_minute - expected) < 4 * 2 * np.sqrt(expected) / np.sqrt(8))
    within = [arrivals.achieved_cv(times[(times >= 120) & (times < 180)]) for times in found]
    assert np.mean(within) == pytest.approx(2.0, abs=0.15)
    assert all(np.all(np.diff(times) >= 0) and times[-1] < 240 for times in found)


def test_seeds_take_windows_of_their_own() -> None:
    minutes = np.array([[1.0, 1.0, 9.0, 9.0]])
    first, second = (arrivals.replayed(Trace(minutes, 1.0, ""), 0, 10.0, 120.0, seed) for seed in (0, 1))
    assert len(second) > 5 * len(first)


def test_bursty_arrivals_have_the_exact_rate() -> None:
    times = arrivals.bursty(50.0, 4.0, 20_000, 1, 3)
    assert len(times) == 20_000
    assert times[-1] == pytest.approx(400.0)
    assert arrivals.achieved_cv(times) == pytest.approx(4.0, rel=0.1)
    assert not np.array_equal(times, arrivals.bursty(50.0, 4.0, 20_000, 2, 3))


def test_the_stand_in_resembles_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "traces_folder", lambda given=None: None)
    trace = arrivals.load_trace(5)
    assert "stand-in" in trace.source
    for row, shape in zip(trace.minutes, arrivals.STAND_IN, strict=True):
        assert row.mean() == pytest.approx(shape.mean, rel=0.15)
        assert row.std() / row.mean() == pytest.approx(shape.cv, rel=0.25)
