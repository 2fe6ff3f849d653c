"""A lifeline that could never be watched is refused before a process hangs on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from keystage.wire.endpoints import EndpointError, check_lifeline


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_the_read_end_of_a_pipe_is_taken(pipe: tuple[int, int]) -> None:
    check_lifeline(pipe[0])
    check_lifeline(None)


def test_the_write_end_a_file_and_a_closed_number_are_refused(pipe: tuple[int, int]) -> None:
    with pytest.raises(EndpointError, match=f"KEYSTAGE_LIFELINE_FD={pipe[1]} is not the read end of a pipe"):
        check_lifeline(pipe[1])
    with Path(os.devnull).open() as file, pytest.raises(EndpointError, match="is not the read end of a pipe"):
        check_lifeline(file.fileno())
    with pytest.raises(EndpointError, match="names no open descriptor"):
        check_lifeline(10**6)
    with pytest.raises(EndpointError, match="names no open descriptor"):
        check_lifeline(2**70)
