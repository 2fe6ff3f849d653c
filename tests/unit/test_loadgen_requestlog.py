"""requests.jsonl: written while a run goes, read again, repaired where it was broken off."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.load_reports import rows

from keystage.loadgen import requestlog
from keystage.loadgen.requestlog import RequestLog, RequestLogError
from keystage.loadgen.sender import Row


def test_what_is_written_is_read(tmp_path: Path) -> None:
    of = rows(3, 50, failed_ratio=0.2, error='http_500: "quoted"\nand \u202e\x00 more')
    got, notes = requestlog.read(requestlog.write(of, tmp_path / "sub" / "requests.jsonl"))
    assert (got, notes) == (of, [])


def test_a_line_is_an_object_with_the_rows_fields(tmp_path: Path) -> None:
    (row,) = rows(3, 1)
    line = json.loads(requestlog.write([row], tmp_path / "r.jsonl").read_text())
    assert (line["index"], line["scheduled_s"], line["last_s"]) == (0, row.scheduled_s, row.last_s)
    assert {"sent_s", "first_s", "status", "prompt_tokens", "output_tokens", "error"} <= line.keys()


def test_it_is_there_before_the_run_is_over(tmp_path: Path) -> None:
    of = rows(4, 300)
    with RequestLog(tmp_path / "out" / "requests.jsonl") as log:
        for row in reversed(of):
            log.add(row)
        gate, bound_s = threading.Event(), 30.0
        while bound_s > 0 and len(log.path.read_bytes().splitlines()) < 300:
            gate.wait(0.05)
            bound_s -= 0.05
        assert len(log.path.read_bytes().splitlines()) == 300, "written while the run goes on"
    assert requestlog.read(log.path)[0] == of, "read in the order of the schedule"


def test_a_broken_last_line_is_left_out_and_told(tmp_path: Path) -> None:
    path = requestlog.write(rows(5, 3), tmp_path / "r.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    got, notes = requestlog.read(path)
    assert [row.index for row in got] == [0, 1]
    assert "line 3: broken off" in notes[0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no request"),
        ("\n\n", "holds no request"),
        ("x\n", "line 1: no request"),
        ('{"index":0}\n', "line 1: no request.*scheduled_s"),
        ('{"index":0,"scheduled_s":NaN}\n', "line 1: no request"),
        ('{"index":0,"scheduled_s":-1}\n', "line 1: an index or time below 0"),
        ('{"index":0,"scheduled_s":1}\n{"index":0,"scheduled_s":1}\n', "line 2: request 0 is there already"),
        ("scheduled_s,sent_s\n0.1,0.2\n", "line 1: no request"),
    ],
)
def test_what_is_no_file_of_requests(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(RequestLogError, match=told):
        requestlog.read(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestLogError, match="No such file"):
        requestlog.read(tmp_path / "none")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_at_the_end() -> None:
    log = RequestLog(Path("/dev/full"))
    log.__enter__()
    for row in rows(6, 500):
        log.add(row)
    with pytest.raises(OSError, match=os.strerror(28)):
        log.close()


def test_a_line_without_end_is_refused_before_it_fills_memory() -> None:
    with pytest.raises(RequestLogError, match="line 1: longer than 65536 bytes"):
        requestlog.read(Path("/dev/zero"))


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path: Path) -> None:
    def broken() -> Iterator[Row]:
        yield from rows(3, 20)
        raise KeyboardInterrupt

    before = requestlog.write(rows(3, 10), tmp_path / "r.jsonl").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        requestlog.write(broken(), tmp_path / "r.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]
    assert (tmp_path / "r.jsonl").read_bytes() == before
