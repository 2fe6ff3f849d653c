"""What a survey says of a trace: against hand calculation, and against what is published of genuine files."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.traces import COUNTS_2019, DURATIONS_2019, GOOD, MEMORY_2019, events, genuine

from keystage.loadgen.traces import Selection, open_trace
from keystage.loadgen.traces.moments import Series
from keystage.loadgen.traces.survey import Survey, survey
from keystage.loadgen.traces.survey_plots import draw


def surveyed(folder: Path, text: str, selection: Selection | None = None) -> Survey:
    path = folder / "trace"
    path.write_text(text)
    return survey(open_trace(path), selection)


def test_events_against_hand_calculation(tmp_path: Path) -> None:
    # Seconds 0, 0, 1, 3 | 10, 12 after the first: gaps 0, 1, 2, 7, 2.
    found = surveyed(tmp_path, events([5.0, 5.0, 6.0, 8.0, 15.0, 17.0]))
    assert (found.rows, found.first_s, found.last_s, found.window_s) == (6, 5.0, 17.0, 12.0)
    assert found.rate_rps == pytest.approx(5 / 12)
    assert found.gap_cv == pytest.approx(np.std([0, 1, 2, 7, 2]) / 2.4)
    second, ten, minute, _ = found.scales
    counts = np.array([2, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0])  # the bin of the last arrival is not whole
    assert (second.bins, second.peak, second.peak_at_s) == (12, 2, 5.0)
    assert second.mean == pytest.approx(counts.mean())
    assert second.cv == pytest.approx(counts.std() / counts.mean())
    assert second.dispersion == pytest.approx(counts.var() / counts.mean())
    assert (ten.bins, ten.mean, ten.cv, ten.peak) == (1, 4.0, None, 4)
    assert (minute.bins, minute.peak) == (0, 6)
    assert found.arrivals == "times of the file"


def test_counts_rate_is_over_the_columns_and_minutes_are_the_files(tmp_path: Path) -> None:
    found = surveyed(tmp_path, COUNTS_2019)
    assert (found.rows, found.window_s, found.functions, found.apps) == (48, 180.0, 3, 2)
    assert found.rate_rps == pytest.approx(48 / 180)
    minute = found.scales[2]
    assert (minute.bins, minute.mean, minute.peak, minute.peak_at_s) == (3, 16.0, 41, 60.0)
    assert minute.cv == pytest.approx(np.std([4, 41, 3]) / 16)
    assert found.triggers == {"queue": 40, "http": 5, "timer": 3}
    assert [(one.function, one.invocations) for one in found.top] == [
        ("a2/f3", 40),
        ("a1/f1", 5),
        ("a1/f2", 3),
    ]
    assert found.top[0].share_ratio == pytest.approx(40 / 48)
    assert found.arrivals == "poisson within each minute, seed 0"


def test_a_window_is_what_is_described(tmp_path: Path) -> None:
    found = surveyed(tmp_path, COUNTS_2019, Selection(from_s=60, to_s=120))
    assert (found.rows, found.window_s) == (41, 60.0)
    assert surveyed(tmp_path, COUNTS_2019, Selection(from_s=60)).window_s == 120.0


@pytest.mark.parametrize("selection", [Selection(from_s=1e9), Selection(functions=("f4",))])
def test_nothing_selected_is_described_as_such(tmp_path: Path, selection: Selection) -> None:
    found = surveyed(tmp_path, COUNTS_2019, selection)
    assert (found.rows, found.first_s, found.scales, found.top) == (0, None, (), ())
    json.dumps(found.document(), allow_nan=False)
    assert draw(found, tmp_path / "plots") == []


@pytest.mark.parametrize("kind", GOOD)
def test_every_kind_has_a_document_and_plots(tmp_path: Path, kind: str) -> None:
    (tmp_path / "trace").write_text(GOOD[kind])
    joined = {}
    if kind == "azure-functions-2019":
        for name, text in (("durations", DURATIONS_2019), ("memory", MEMORY_2019)):
            joined[name] = tmp_path / name
            joined[name].write_text(text)
    found = survey(open_trace(tmp_path / "trace", **joined))
    document = json.loads(json.dumps(found.document(), allow_nan=False))
    assert document["kind"] == kind
    assert document["rows"] == found.rows
    names = {path.name for path in draw(found, tmp_path / "plots")}
    expected = {"rate.png", "gaps.png"} | ({"durations.png"} if "functions" in kind else {"tokens.png"})
    assert expected <= names
    assert all((tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_a_series_widens_its_bins_and_keeps_the_counts() -> None:
    series = Series(100.0)
    series.add(np.array([100.0, 100.5, 101.0]))
    series.add(np.array([3e11]))
    assert series.counts.sum() == 4
    assert series.counts[0] == 3
    assert series.width_s * series.MOST > 3e11


@pytest.mark.parametrize(
    ("name", "rows", "rate_rps", "gap_cv"),
    [
        ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv", 19_366, 5.53, 1.09),
        ("azure-llm-2023/AzureLLMInferenceTrace_code.csv", 8_819, 2.57, 13.2),
        ("mooncake/conversation_trace.jsonl", 12_031, 3.40, 3.03),
        ("azure-functions-2021/Azure2021_200.csv", 199, 0.165, 1.86),
        ("azure-functions-2019/sample100_8h_invocations.csv", 339_657, 11.79, None),
    ],
)
def test_genuine_files_are_what_is_known_of_them(
    name: str, rows: int, rate_rps: float, gap_cv: float | None
) -> None:
    found = survey(open_trace(genuine(name)))
    assert found.rows == rows
    assert found.rate_rps == pytest.approx(rate_rps, rel=0.005)
    assert gap_cv is None or found.gap_cv == pytest.approx(gap_cv, rel=0.01)
