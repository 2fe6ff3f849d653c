"""Damaged trace files of every format: an error that names the line, or a repair that is told."""

import gzip
import os
from pathlib import Path

import pytest
from support.traces import COUNTS_2019, DURATIONS_2019, EVENTS_2021, GOOD, MEMORY_2019

from keystage.loadgen.trace_lines import MAX_LINE_BYTES
from keystage.loadgen.traces import TraceError, open_trace

FUNCTIONS_2019, FUNCTIONS_2021, AZURE, MOONCAKE = GOOD
PNG = b"\x89PNG\r\n\x1a\n\x00\xff\xfe" * 9
FIRST = '"input_length": 6758'


def read(path: Path, kind: str | None = None) -> int:
    return len(list(open_trace(path, kind=kind).invocations()))


@pytest.mark.parametrize(
    ("kind", "before", "after", "line", "found"),
    [
        # Cut in the last line.
        (FUNCTIONS_2019, "f4,http,0,0,0\n", "f4,http,0,0", 5, "expected 7 fields (4 names, minutes 480"),
        (FUNCTIONS_2019, "f4,http,0,0,0\n", "f4,http,0,0,", 5, "minute 482 is not a count of invocations"),
        (FUNCTIONS_2021, "9.0,0.0\n", "9.", 5, "expected 4 fields, found 3"),
        (FUNCTIONS_2021, "9.0,0.0\n", "9.0,", 5, "duration is not a finite number: ''"),
        (AZURE, "110,27\n", "110", 4, "expected 3 fields, found 2"),
        (MOONCAKE, '"output_length": 0}\n', '"outp', 3, "is not a request: Input data was truncated"),
        # Other order.
        (FUNCTIONS_2019, "480,481,482", "480,482,481", 1, "minute column 481 is missing: after 480"),
        (AZURE, "18:17:06.97", "18:17:01.97", 4, "is earlier than the row before it"),
        # No number.
        (FUNCTIONS_2019, "1,1,1", "1,NaN,1", 3, "minute 481 is not a count of invocations: 'NaN'"),
        (FUNCTIONS_2019, "1,1,1", "1,,1", 3, "minute 481 is not a count of invocations: ''"),
        (FUNCTIONS_2019, "1,1,1", "1,1.0,1", 3, "minute 481 is not a count of invocations: '1.0'"),
        (FUNCTIONS_2021, "4.0,2.5", "nan,2.5", 3, "end_timestamp is not a finite number: 'nan'"),
        (FUNCTIONS_2021, "4.0,2.5", "4.0,inf", 3, "duration is not a finite number: 'inf'"),
        (FUNCTIONS_2021, "4.0,2.5", "4.0,1_0", 3, "duration is not a finite number: '1_0'"),
        (AZURE, "3180,8", "NaN,8", 3, "ContextTokens is not a token count: 'NaN'"),
        (MOONCAKE, FIRST, '"input_length": NaN', 1, "is not a request: JSON is malformed"),
        (MOONCAKE, FIRST, '"input_length": null', 1, "Expected `int`, got `null` - at `$.input_length`"),
        # Below 0.
        (FUNCTIONS_2019, "1,1,1", "1,-1,1", 3, "minute 481 is not a count of invocations: '-1'"),
        (FUNCTIONS_2021, "4.0,2.5", "-4.0,2.5", 3, "end_timestamp must be in 0..1e+10, found '-4.0'"),
        (FUNCTIONS_2021, "4.0,2.5", "4.0,-2.5", 3, "duration must be in 0..1e+08, found '-2.5'"),
        (AZURE, "3180,8", "3180,-8", 3, "GeneratedTokens is not a token count: '-8'"),
        (MOONCAKE, FIRST, '"input_length": -1', 1, "Expected `int` >= 0 - at `$.input_length`"),
        (MOONCAKE, '"timestamp": 1500,', '"timestamp": -1,', 2, "Expected `float` >= 0.0 - at `$.timestamp`"),
        # Too large.
        (FUNCTIONS_2019, "1,1,1", "1,10000001,1", 3, "minute 481: at most 10000000, found '10000001'"),
        (FUNCTIONS_2019, "1,1,1", f"1,{10**30},1", 3, "minute 481: at most 10000000, found '1000"),
        (FUNCTIONS_2021, "4.0,2.5", "1e11,2.5", 3, "end_timestamp must be in 0..1e+10, found '1e11'"),
        (FUNCTIONS_2021, "4.0,2.5", "4.0,1e400", 3, "duration is not a finite number: '1e400'"),
        (AZURE, "3180,8", f"{10**10},8", 3, "ContextTokens is not a token count: '10000000000'"),
        (MOONCAKE, FIRST, f'"input_length": {10**10}', 1, "Expected `int` <= 1000000000"),
        (MOONCAKE, FIRST, f'"input_length": {10**40}', 1, "is not a request"),
        (MOONCAKE, '"timestamp": 1500,', '"timestamp": 1e999,', 2, "is not a request"),
        # Wrong columns.
        (FUNCTIONS_2019, "HashFunction,Trigger", "HashFunction,Cause", 1, "expected the header HashOwner"),
        (FUNCTIONS_2019, "480,481,482", "480,481", 2, "expected 6 fields"),
        (FUNCTIONS_2019, ",480,481,482", "", 1, "no minute columns"),
        (FUNCTIONS_2019, "480,481,482", "1439,1440,1441", 1, "minute columns are 1..1440, found '1441'"),
        (FUNCTIONS_2019, "480,481,482", "0,1,2", 1, "minute columns are 1..1440, found '0'"),
        (FUNCTIONS_2019, "480,481,482", "480,480,481", 1, "minute column 481 is missing"),
        (FUNCTIONS_2019, "o1,a1,f2", "o1,,f2", 3, "HashApp is no name: ''"),
        (FUNCTIONS_2021, "app,func", "func,app", 1, "expected the header app,func,end_timestamp,duration"),
        (FUNCTIONS_2021, "a2,f1", "a2,", 3, "func is no name: ''"),
        (FUNCTIONS_2021, "4.0,2.5", "4.0,2.5,1", 3, "expected 4 fields, found 5"),
        (AZURE, "TIMESTAMP,", "TIME,", 1, "expected the header TIMESTAMP,ContextTokens,GeneratedTokens"),
        (MOONCAKE, '"input_length": 7322', '"in": 7322', 2, "missing required field `input_length`"),
        (MOONCAKE, "[0, 2]", '["a"]', 2, "Expected `int`, got `str` - at `$.hash_ids"),
        (MOONCAKE, "[0, 2]", "[" * 100_000, 2, "is not a request"),
        # Quotes that are not closed, control characters.
        (FUNCTIONS_2019, "o1,a1,f2", 'o1,"a1,f2', 3, "is not CSV"),
        (FUNCTIONS_2021, "a2,f1", "a2,f\x00", 3, "is not text: zero byte at 4"),
        (FUNCTIONS_2021, "a2,f1", "a2,f\x1b[2J", 3, "func is no name"),
    ],
)  # fmt: skip
def test_damaged_rows_are_named(
    tmp_path: Path, kind: str, before: str, after: str, line: int, found: str
) -> None:
    assert before in GOOD[kind]
    path = tmp_path / "trace"
    path.write_text(GOOD[kind].replace(before, after))
    with pytest.raises(TraceError) as caught:
        read(path, kind)
    assert caught.value.line == line
    assert found in caught.value.found
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize(
    ("data", "line", "found"),
    [
        (b"", 1, "file is empty"),
        (b"\n\r\n  \n", 1, "file is empty"),
        (PNG, 1, "is not text: byte 0x89 at 0"),
        (b"{}{}{" + b"x" * MAX_LINE_BYTES, 1, f"longer than {MAX_LINE_BYTES} bytes"),
    ],
    ids=["empty", "blank", "binary", "endless line"],
)
def test_files_that_are_no_trace_are_refused(
    tmp_path: Path, kind: str, data: bytes, line: int, found: str
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    for asked in (kind, None):
        with pytest.raises(TraceError) as caught:
            read(path, asked)
        assert caught.value.line == line
        assert found in caught.value.found


@pytest.mark.parametrize("kind", [FUNCTIONS_2019, FUNCTIONS_2021, AZURE])
def test_a_header_alone_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    path.write_text(GOOD[kind].splitlines()[0] + "\n\n")
    with pytest.raises(TraceError, match="line 1: no rows after the header"):
        read(path)


@pytest.mark.parametrize("kind", GOOD)
def test_gzip_files_that_are_cut_or_damaged_are_refused_with_the_line(tmp_path: Path, kind: str) -> None:
    first, *rows = GOOD[kind].splitlines(keepends=True)
    if kind == FUNCTIONS_2021:
        rows = [row.replace("f1", f"f{os.urandom(30).hex()}") for row in rows * 400]
    packed = gzip.compress("".join((first, *rows)).encode())
    path = tmp_path / "trace.gz"
    path.write_bytes(packed[:-12])
    with pytest.raises(TraceError, match="the gzip stream ends here: the file is cut") as caught:
        read(path)
    assert caught.value.line >= 1
    path.write_bytes(packed[: len(packed) // 2] + b"\xff" * 40 + packed[len(packed) // 2 + 40 :])
    with pytest.raises(TraceError):  # what the damage makes of the text, or the stream's check sum
        read(path)
    path.write_bytes(packed + b"and more")
    with pytest.raises(TraceError, match="cannot be read further: Not a gzipped file"):
        read(path)


def test_the_line_of_a_cut_gzip_file_is_the_first_that_is_missing(tmp_path: Path) -> None:
    rows = [f"a{os.urandom(30).hex()},f,{k}.5,0.5\n" for k in range(4000)]
    packed = gzip.compress(("app,func,end_timestamp,duration\n" + "".join(rows)).encode())
    path = tmp_path / "trace"  # gzip is known by its first bytes
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match="the file is cut") as caught:
        read(path)
    assert 1000 < caught.value.line < 3000


def test_a_name_that_promises_gzip_is_held_to_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_text(EVENTS_2021)
    with pytest.raises(TraceError, match="line 1: is no gzip file, though its name says so"):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(TraceError, match="line 1: is empty"):
        read(path)
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(TraceError, match="line 1: file is empty"):
        read(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, found in (
        (tmp_path / "none", "line 0: cannot be read: No such file"),
        (tmp_path, "line 0: cannot be read: it is a folder"),
        (pipe, "line 0: cannot be read: it is no regular file"),
        (Path("a\0b"), "line 0: cannot be read: embedded null"),
    ):
        with pytest.raises(TraceError, match=found):
            read(path)


def test_a_minute_too_full_to_be_placed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(COUNTS_2019.replace("0,40,0", "0,10000000,0"))
    with pytest.raises(TraceError, match=r"minute 481 has 10000001 invocations .* at most 10000000"):
        read(path)


def test_other_files_of_the_2019_set_are_told_from_the_invocations(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(DURATIONS_2019)
    with pytest.raises(TraceError, match="durations and memory are joined to the file of invocations"):
        read(path)
    with pytest.raises(TraceError, match=r"kind must be one of azure-functions-2019, .*, got 'vhive'"):
        read(path, "vhive")


@pytest.mark.parametrize(
    ("name", "before", "after", "line", "found"),
    [
        ("durations", "percentile_Average_25,", "p25,", 1, "a header with one percentile_Average_25"),
        ("durations", ",10,10,20,", ",10,-10,20,", 2, "percentile_Average_1 must be in 0..1e+11, found '-1"),
        ("durations", ",10,10,20,", ",10,,20,", 2, "percentile_Average_1 is not a finite number: ''"),
        ("durations", ",10,10,20,", ",10,NaN,20,", 2, "percentile_Average_1 is not a finite number: 'NaN'"),
        ("durations", ",10,10,20,", ",1e30,10,20,", 2, "percentile_Average_0 must be in 0..1e+11"),
        ("durations", "5,5\n", "5\n", 3, "expected 14 fields, found 13"),
        ("memory", "128.5", "-1", 2, "AverageAllocatedMb must be in 0..1e+09, found '-1'"),
        ("memory", "AverageAllocatedMb,", "Average,", 1, "expected a header with one AverageAllocatedMb"),
        ("memory", MEMORY_2019, "", 1, "file is empty"),
        ("memory", "o1,a1,7,128.5,100\n", "", 1, "no rows after the header"),
    ],
)  # fmt: skip
def test_damaged_joined_files_are_named(
    tmp_path: Path, name: str, before: str, after: str, line: int, found: str
) -> None:
    text = {"durations": DURATIONS_2019, "memory": MEMORY_2019}[name]
    assert before in text
    trace, path = tmp_path / "trace", tmp_path / name
    trace.write_text(COUNTS_2019)
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(TraceError) as caught:
        open_trace(trace, **{name: path})
    assert (caught.value.path, caught.value.line) == (path, line)
    assert found in caught.value.found


def test_joined_files_are_repaired_and_that_is_told(tmp_path: Path) -> None:
    trace, durations, memory = tmp_path / "trace", tmp_path / "durations", tmp_path / "memory"
    trace.write_text(COUNTS_2019)
    row = DURATIONS_2019.splitlines()[2]
    durations.write_text(DURATIONS_2019 + row + "\n" + row.replace("f3", "f4").replace(",5,5,5", ",9,5,5", 1))
    memory.write_text(MEMORY_2019 + "o1,a1,7,1.0,100\n")
    notes = open_trace(trace, durations=durations, memory=memory).facts.notes
    assert "1 row(s) of durations repeat a function" in notes["durations repeated"]
    assert "1 row(s) of memory differ for one app" in notes["memory differing"]
    assert "line 5, the last, has no line break" in notes["end of durations"]


def test_files_are_joined_to_2019_only(tmp_path: Path) -> None:
    trace, memory = tmp_path / "trace", tmp_path / "memory"
    trace.write_text(EVENTS_2021)
    memory.write_text(MEMORY_2019)
    with pytest.raises(TraceError, match="can be joined to azure-functions-2019 only"):
        open_trace(trace, memory=memory)


def test_quoted_fields_and_spaces_and_another_order_of_names_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('Trigger,HashFunction,HashOwner,HashApp,1439,1440\nhttp,"f,1",o1,a1, 1 ,2\r\n')
    found = list(open_trace(path).invocations())
    assert {(one.function, one.trigger) for one in found} == {("a1/f,1", "http")}
    assert len(found) == 3
