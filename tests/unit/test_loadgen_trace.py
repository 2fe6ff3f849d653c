"""The trace reader: both published timestamp forms, and every way a file can be unusable."""

import itertools
from pathlib import Path

import pytest

from keystage.loadgen import trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    "second",
    [
        "2023-11-16 18:17:04.0319600",
        "2023-11-16T18:17:04.0319600Z",
        "2023-11-16 18:17:04.031960+00:00",
        "2023-11-16T20:17:04.031960+0200",
        "2023-11-16 18:17:04.03196 UTC",
    ],
)
def test_every_published_timestamp_form_means_the_same_moment(tmp_path: Path, second: str) -> None:
    path = written(tmp_path, f"{HEADER}2023-11-16 18:17:03.9799600,4808,10\n{second},3180,8\n")
    rows = list(trace.read(path))
    assert rows[0] == trace.TraceRow(0.0, 4808, 10)
    assert rows[1] == trace.TraceRow(0.052, 3180, 8)


def test_seventh_digit_is_kept() -> None:
    earlier = trace.stamp_ticks("2023-11-16 18:17:03.9799600")
    assert trace.stamp_ticks("2023-11-16 18:17:03.9799601") - earlier == 1


def test_crlf_bom_blank_lines_and_a_missing_last_newline_are_tolerated(tmp_path: Path) -> None:
    text = "\ufeff" + HEADER + "2023-11-16 18:17:03.0000000,5,6\r\n\r\n2023-11-16 18:17:05,7,8"
    rows = list(trace.read(written(tmp_path, text.replace("Tokens\n", "Tokens\r\n"))))
    assert [(row.at_s, row.context_tokens, row.generated_tokens) for row in rows] == [(0, 5, 6), (2, 7, 8)]


def test_reading_is_lazy(tmp_path: Path) -> None:
    good = "2023-11-16 18:17:03,1,1\n"
    path = written(tmp_path, HEADER + good * 3 + "garbage\n")
    assert len(list(trace.read(path, limit=3))) == 3
    assert len(list(itertools.islice(trace.read(path), 3))) == 3


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("", 1, "empty"),
        (HEADER, 1, "no rows"),
        ("a,b,c\n1,2,3\n", 1, "'a,b,c'"),
        (b"\x89PNG\r\n\x1a\n\x00\xff\xfe", 1, "not text"),
        (HEADER + "2023-11-16 18:17:03.9799600,4808\n", 2, "expected 3 fields, found 2"),
        (HEADER + "2023-11-16 18:17:03,1,1\nyesterday,4808,10\n", 3, "'yesterday'"),
        (HEADER + "2023-13-16 18:17:03,1,1\n", 2, "'2023-13-16 18:17:03'"),
        (HEADER + "2023-11-16 18:17:03,1.5,1\n", 2, "ContextTokens is not a token count: '1.5'"),
        (HEADER + "2023-11-16 18:17:03,1,-1\n", 2, "GeneratedTokens is not a token count: '-1'"),
        (HEADER + "2023-11-16 18:17:03,1,\n", 2, "GeneratedTokens"),
        (HEADER + "2023-11-16 18:17:03,1,1\n2023-11-16 18:17:02,1,1\n", 3, "earlier"),
        (HEADER + '2023-11-16 18:17:03,1,1\n"' + "x" * 200_000 + "\n", 3, "not CSV"),
    ],
)
def test_unusable_files_name_file_line_and_content(
    tmp_path: Path, text: str | bytes, line: int, found: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(trace.TraceError) as caught:
        list(trace.read(path))
    assert (caught.value.path, caught.value.line) == (path, line)
    assert found in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_what_is_no_file_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "nothing.csv" if kind == "missing" else tmp_path
    with pytest.raises(trace.TraceError, match="cannot be read"):
        list(trace.read(path))


def test_quantile_constants_are_distributions() -> None:
    for values in (trace.AZURE_CONV_CONTEXT_TOKENS, trace.AZURE_CONV_GENERATED_TOKENS):
        assert len(values) == len(trace.QUANTILE_PROBABILITIES)
        assert list(values) == sorted(values)
    assert (trace.QUANTILE_PROBABILITIES[0], trace.QUANTILE_PROBABILITIES[-1]) == (0.0, 1.0)
