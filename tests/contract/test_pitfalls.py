"""tests/PITFALLS.md: every pitfall of comparable systems has tests, and these exist."""

from __future__ import annotations

import pytest
from support.named_tests import TESTS, missing, named

COLUMNS = 5


def rows() -> list[list[str]]:
    lines = (TESTS / "PITFALLS.md").read_text().splitlines()
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| "))
    return [row for row in cells if row[0].isdigit()]


def test_all_are_there_once() -> None:
    found = rows()
    assert [int(row[0]) for row in found] == list(range(1, 38))
    assert {len(row) for row in found} == {COLUMNS}
    assert len({row[2] for row in found}) == len(found)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_what_keeps_it_away_exists(row: list[str]) -> None:
    _, threads, happened, here, tests = row
    assert threads
    assert happened
    assert here
    assert tests == "; ".join(f"`{test}`" for test in named(tests))
    assert named(tests)
    assert missing(tests) == []


def test_a_test_that_is_not_there_is_named() -> None:
    assert missing("`unit/test_none.py::test_a` `contract/test_pitfalls.py::test_all_are_there_once`") == [
        "unit/test_none.py::test_a"
    ]
