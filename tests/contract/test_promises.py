"""docs/promises.md: every promise has a test that keeps it, and every test that is named exists."""

from __future__ import annotations

import pytest
from support.named_tests import TESTS, missing, named

PAGE = TESTS.parent / "docs" / "promises.md"
PENDING = "no test yet"
"""How a row says that a promise is not kept by a test."""


def rows() -> list[list[str]]:
    """Rows of all tables, without their headers."""
    found: list[list[str]] = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] != "promise" and not cells[0].startswith("---"):
            found.append(cells)
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:60])
def test_a_promise_is_kept_by_tests_that_exist(row: list[str]) -> None:
    kept_by = row[-1]
    assert len(row) in (2, 4)
    assert all(row)
    assert missing(kept_by) == []
    if PENDING in kept_by:
        assert named(kept_by) == []
        return
    assert ", ".join(f"`{test}`" for test in named(kept_by)) == kept_by
    assert named(kept_by)


def test_promises_are_said_once_and_the_page_says_what_is_not_promised() -> None:
    promises = [row[0] for row in rows()]
    assert len(promises) > 40
    assert len(set(promises)) == len(promises)
    assert "## What is not promised" in PAGE.read_text()
