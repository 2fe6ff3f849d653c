"""Traces of every format: what is read, selected, repaired, and in which order."""

import gzip
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.traces import (
    COUNTS_2019,
    DURATIONS_2019,
    EVENTS_2021,
    GOOD,
    MEMORY_2019,
    ROWS,
    counts_in,
    events,
    genuine,
    minute_counts,
)

from keystage.loadgen.traces import Invocation, Selection, Trace, TraceError, detect, open_trace
from keystage.loadgen.traces.events import BUFFERED


def opened(folder: Path, text: str, **arguments: Path) -> Trace:
    path = folder / "trace"
    path.write_text(text)
    return open_trace(path, **arguments)


def beside(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "gzip"])
def test_every_format_is_known_by_its_first_line(tmp_path: Path, kind: str, is_packed: bool) -> None:
    data = GOOD[kind].encode()
    path = tmp_path / ("trace.gz" if is_packed else "trace")
    path.write_bytes(gzip.compress(data) if is_packed else data)
    assert detect(path) == kind
    trace = open_trace(path)
    found = list(trace.invocations())
    assert len(found) == ROWS[kind]
    assert found == sorted(found, key=lambda one: one.at_s)
    assert trace.facts.notes == {}
    assert found == list(open_trace(path, kind=kind).invocations())


def test_functions_of_2021_start_at_end_less_duration_and_are_unique_within_their_app(tmp_path: Path) -> None:
    found = list(opened(tmp_path, EVENTS_2021).invocations())
    assert [(one.at_s, one.function, one.duration_s) for one in found] == [
        (1.0, "a1/f1", 0.5),
        (1.5, "a2/f1", 2.5),
        (2.0, "a1/f2", 0.25),
        (9.0, "a1/f1", 0.0),
    ]
    assert {(one.trigger, one.memory_mb, one.context_tokens) for one in found} == {("", None, None)}


def test_requests_have_tokens_and_no_function(tmp_path: Path) -> None:
    assert list(opened(tmp_path, GOOD["mooncake"]).invocations())[1:] == [
        Invocation(1.5, "", "", "", context_tokens=7322, generated_tokens=490),
        Invocation(1.5005, "", "", "", context_tokens=1, generated_tokens=0),
    ]
    azure = list(opened(tmp_path, GOOD["azure-llm"]).invocations())
    assert [(one.at_s, one.context_tokens, one.generated_tokens) for one in azure] == [
        (0.0, 4808, 10),
        (0.052, 3180, 8),
        (3.0, 110, 27),
    ]


@pytest.mark.parametrize("within", ["poisson", "uniform", "gamma:0", "gamma:0.3", "gamma:4", "gamma:100"])
@pytest.mark.parametrize("seed", [0, 1, 2**64])
def test_counts_per_minute_are_the_files(tmp_path: Path, within: str, seed: int) -> None:
    trace = opened(tmp_path, COUNTS_2019)
    assert (trace.facts.first_minute, trace.facts.minutes, trace.span_s) == (480, 3, 180.0)
    found = minute_counts(trace.invocations(within=within, seed=seed), 480)
    assert found == counts_in(trace.path)
    assert found["a2/f3", 481] == 40


@pytest.mark.parametrize("within", ["poisson", "uniform", "gamma:4"])
def test_counts_per_minute_are_the_genuine_files(within: str) -> None:
    path = genuine("azure-functions-2019/sample100_8h_invocations.csv")
    found = minute_counts(open_trace(path).invocations(within=within, seed=7), 480)
    assert found == counts_in(path)
    assert found.total() == 339_657


@pytest.mark.slow
@pytest.mark.parametrize("within", ["poisson", "uniform", "gamma:4"])
def test_blocks_of_the_larger_genuine_file_have_its_counts(within: str) -> None:
    path = genuine("azure-functions-2019/sample500_8h_invocations.csv")
    trace = open_trace(path, durations=genuine("azure-functions-2019/sample500_8h_durations.csv"))
    found: Counter[tuple[str, int]] = Counter()
    for block in trace.blocks(within=within):
        assert (np.diff(block.at_s) >= 0).all()
        assert block.duration_s is not None
        assert (block.duration_s >= 0).all()
        cells = block.function.astype(np.int64) * 1440 + (block.at_s // 60).astype(np.int64)
        for cell, count in zip(*np.unique(cells, return_counts=True), strict=True):
            found[block.functions[cell // 1440].name, 480 + int(cell % 1440)] += int(count)
    assert found == counts_in(path)
    assert found.total() == 3_037_902


def test_the_same_seed_gives_the_same_arrivals_and_another_gives_others(tmp_path: Path) -> None:
    trace = opened(tmp_path, COUNTS_2019)
    first = list(trace.invocations(seed=3))
    assert first == list(trace.invocations(seed=3))
    assert first != list(trace.invocations(seed=4))


@pytest.mark.parametrize("within", ["poisson", "uniform", "gamma:2"])
def test_a_selection_changes_no_other_arrival(tmp_path: Path, within: str) -> None:
    trace = opened(tmp_path, COUNTS_2019, durations=beside(tmp_path, "d", DURATIONS_2019))
    whole = list(trace.invocations(within=within))
    for name in ("a1/f1", "a1/f2", "a2/f3"):
        alone = list(trace.invocations(Selection(functions=(name,)), within=within))
        assert alone == [one for one in whole if one.function == name]
    header, *rows = COUNTS_2019.splitlines()
    turned = opened(tmp_path, "\n".join((header, *reversed(rows))))
    again = Counter((one.at_s, one.function) for one in turned.invocations(within=within))
    assert again == Counter((one.at_s, one.function) for one in whole)


def test_a_window_of_columns_places_its_minutes_as_the_day_does(tmp_path: Path) -> None:
    whole = list(opened(tmp_path, COUNTS_2019).invocations())
    part = COUNTS_2019.replace(",480,", ",").replace(",3,0,2", ",0,2").replace(",1,1,1", ",1,1")
    part = part.replace(",0,40,0", ",40,0").replace(",0,0,0\n", ",0,0\n")
    later = [one.at_s + 60 for one in opened(tmp_path, part).invocations()]
    assert later == pytest.approx([one.at_s for one in whole if one.at_s >= 60], abs=1e-9)


def test_durations_and_memory_are_joined(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        COUNTS_2019,
        durations=beside(tmp_path, "d", DURATIONS_2019),
        memory=beside(tmp_path, "m", MEMORY_2019),
    )
    found = list(trace.invocations())
    assert {one.duration_s for one in found if one.function == "a2/f3"} == {0.005}
    drawn = [one.duration_s for one in found if one.function == "a1/f1"]
    assert all(value is not None and 0.010 <= value <= 0.040 for value in drawn)
    assert len(set(drawn)) == len(drawn)
    assert {one.duration_s for one in found if one.function == "a1/f2"} == {None}
    assert {(one.app, one.memory_mb) for one in found} == {("a1", 128.5), ("a2", None)}
    assert "2 of 4 functions have no row" in trace.facts.notes["no durations"]


def test_drawn_durations_follow_the_percentiles(tmp_path: Path) -> None:
    counts = COUNTS_2019.replace("f1,http,3,0,2", "f1,http,20000,0,0")
    trace = opened(tmp_path, counts, durations=beside(tmp_path, "d", DURATIONS_2019))
    drawn = sorted(
        one.duration_s or 0.0 for one in trace.invocations(Selection(functions=("a1/f1",)), seed=1)
    )
    # 1 %: 10 ms, 25 and 50 %: 20 ms, 75 %: 30 ms, 99 %: 40 ms, straight lines between.
    assert drawn[2500] == pytest.approx(0.010 + 0.010 * (0.125 - 0.01) / 0.24, rel=0.03)
    assert drawn[7500] == pytest.approx(0.020, rel=1e-9)
    assert drawn[12500] == pytest.approx(0.025, rel=0.03)


def test_rows_of_one_function_add_up_and_are_told(tmp_path: Path) -> None:
    trace = opened(tmp_path, COUNTS_2019 + "o1,a1,f1,event,1,0,0\n")
    found = minute_counts(trace.invocations(), 480)
    assert found["a1/f1", 480] == 4
    assert "1 functions have more than one row" in trace.facts.notes["repeated"]
    assert len(list(trace.invocations(Selection(triggers=("event",))))) == 1


@pytest.mark.parametrize(
    ("selection", "functions"),
    [
        (Selection(functions=("f1",)), {"a1/f1"}),
        (Selection(functions=("a1/f1", "a2/f3")), {"a1/f1", "a2/f3"}),
        (Selection(apps=("a1",)), {"a1/f1", "a1/f2"}),
        (Selection(triggers=("http", "queue")), {"a1/f1", "a2/f3"}),
        (Selection(apps=("a1",), triggers=("http",)), {"a1/f1"}),
        (Selection(top=1), {"a2/f3"}),
        (Selection(top=1, apps=("a1",)), {"a1/f1"}),
        (Selection(top=2, from_s=120), {"a1/f1", "a1/f2"}),
        (Selection(top=1, to_s=60), {"a1/f1"}),
        (Selection(top=9), {"a1/f1", "a1/f2", "a2/f3"}),
        (Selection(functions=("f4",)), set()),
        (Selection(functions=("f4",), top=1), set()),
        (Selection(from_s=1e9), set()),
    ],
)
def test_selections_of_2019(tmp_path: Path, selection: Selection, functions: set[str]) -> None:
    assert {one.function for one in opened(tmp_path, COUNTS_2019).invocations(selection)} == functions


@pytest.mark.parametrize(
    ("selection", "starts_s"),
    [
        (Selection(functions=("f1",)), [1.0, 1.5, 9.0]),
        (Selection(functions=("a2/f1",)), [1.5]),
        (Selection(apps=("a1",)), [1.0, 2.0, 9.0]),
        (Selection(top=1), [1.0, 9.0]),
        (Selection(top=2), [1.0, 2.0, 9.0]),
        (Selection(top=1, from_s=1.25, to_s=3.0), [0.75]),
        (Selection(from_s=1.5, to_s=9.0), [0.0, 0.5]),
    ],
)
def test_selections_of_2021(tmp_path: Path, selection: Selection, starts_s: list[float]) -> None:
    assert [one.at_s for one in opened(tmp_path, EVENTS_2021).invocations(selection)] == starts_s


@pytest.mark.parametrize("kind", GOOD)
def test_a_window_is_half_open_and_times_count_from_its_start(tmp_path: Path, kind: str) -> None:
    trace = opened(tmp_path, GOOD[kind])
    whole = [one.at_s for one in trace.invocations()]
    start_s, end_s = whole[1], whole[-1]
    found = [one.at_s for one in trace.invocations(Selection(from_s=start_s, to_s=end_s))]
    assert found == [at_s - start_s for at_s in whole if start_s <= at_s < end_s]
    assert found[0] == 0.0


@pytest.mark.parametrize(
    ("kind", "selection", "found"),
    [
        ("azure-functions-2019", Selection(functions=("f9",)), "has no function 'f9'"),
        ("azure-functions-2019", Selection(triggers=("blob",)), "has no trigger 'blob'"),
        ("azure-functions-2019", Selection(apps=("a1", "a9"), top=1), "has no app 'a9'"),
        ("azure-functions-2021", Selection(apps=("a9",)), "has no app 'a9'"),
        ("azure-functions-2021", Selection(triggers=("http",)), "has no trigger 'http'"),
        ("azure-llm", Selection(top=1), "no functions to select by"),
        ("mooncake", Selection(functions=("f1",)), "no functions to select by"),
    ],
)
def test_names_that_a_trace_does_not_have_are_refused(
    tmp_path: Path, kind: str, selection: Selection, found: str
) -> None:
    with pytest.raises(TraceError, match=found):
        list(opened(tmp_path, GOOD[kind]).invocations(selection))


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"top": 0}, "at least 1, got 0"),
        ({"from_s": -1.0}, "got -1"),
        ({"from_s": float("nan")}, "got nan"),
        ({"from_s": 5.0, "to_s": 5.0}, "after its start at 5 s, got 5"),
        ({"to_s": float("inf")}, "got inf"),
    ],
)
def test_selections_that_mean_nothing_are_refused(arguments: dict[str, float], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        Selection(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "within", ["", "normal", "gamma", "gamma:", "gamma:x", "gamma:-1", "gamma:nan", "gamma:101"]
)
def test_an_unknown_way_within_the_minute_is_refused_at_once(tmp_path: Path, within: str) -> None:
    with pytest.raises(ValueError, match="poisson, uniform or gamma:CV"):
        opened(tmp_path, COUNTS_2019).invocations(within=within)


def test_small_disorder_is_put_right_and_told(tmp_path: Path) -> None:
    starts_s = [float(k) for k in range(3 * BUFFERED)]
    moved = starts_s[:]
    for first in (10, BUFFERED - 5, 2 * BUFFERED + 3):  # also over the buffer's edges
        moved.insert(first, moved.pop(first + 50))
    trace = opened(tmp_path, events(moved))
    assert [one.at_s for one in trace.invocations()] == starts_s
    assert "150 rows were out of order by up to 50.0" in trace.facts.notes["order"]


@pytest.mark.parametrize("kind", ["azure-functions-2021", "mooncake"])
def test_disorder_beyond_the_buffer_is_refused_with_its_line(tmp_path: Path, kind: str) -> None:
    starts_s = [float(k) for k in range(10, 10 + 3 * BUFFERED)]
    starts_s.append(2.0)
    text = events(starts_s)
    if kind == "mooncake":
        rows = [f'{{"timestamp":{1000 * s},"input_length":1,"output_length":1}}' for s in starts_s]
        text = "\n".join(rows)
    with pytest.raises(TraceError, match="sort the file by start") as caught:
        list(opened(tmp_path, text).invocations())
    assert caught.value.line == len(starts_s) + (kind != "mooncake")


def test_starts_before_time_0_are_set_to_0_and_told(tmp_path: Path) -> None:
    trace = opened(tmp_path, EVENTS_2021.replace("1.5,0.5", "1.5,7.5"))
    assert next(trace.invocations()) == Invocation(0.0, "a1/f1", "a1", "", 7.5)
    assert "1 invocations began before time 0" in trace.facts.notes["early"]


def test_rows_are_streamed(tmp_path: Path) -> None:
    """What comes before a bad row is handed on, but for the buffer, and memory does not grow with rows."""
    few, many = 4 * BUFFERED, 16 * BUFFERED
    peaks = []
    for count in (few, many):
        trace = opened(tmp_path, events([0.001 * k for k in range(count)]) + "garbage\n")
        tracemalloc.start()
        invocations = trace.invocations()
        for _ in range(count - 2 * BUFFERED):
            next(invocations)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        with pytest.raises(TraceError) as caught:
            list(invocations)
        assert caught.value.line == count + 2
    assert peaks[1] < 1.3 * peaks[0]


def test_a_file_that_may_have_been_cut_is_told(tmp_path: Path) -> None:
    trace = opened(tmp_path, EVENTS_2021.removesuffix("\n"))
    assert len(list(trace.invocations())) == 4
    assert "line 5, the last, has no line break" in trace.facts.notes["end"]
