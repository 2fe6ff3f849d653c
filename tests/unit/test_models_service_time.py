"""The service time's line: least squares, with no negative coefficient."""

from __future__ import annotations

import pytest

from keystage.models.service_time import fit


@pytest.mark.parametrize(
    ("batches", "seconds", "expected"),
    [
        ([1, 2, 4, 8], [0.3, 0.5, 0.9, 1.7], (0.2, 0.1)),
        ([1, 2, 4], [1.0, 1.0, 1.0], (0.0, 1.0)),
        ([1, 2, 3], [3.0, 2.0, 1.0], (0.0, 2.0)),
        ([1, 2, 3], [0.0, 1.0, 2.0], (8 / 14, 0.0)),
        ([1, 1, 3], [1.0, 3.0, 4.0], (1.0, 1.0)),
    ],
)
def test_fit(batches: list[int], seconds: list[float], expected: tuple[float, float]) -> None:
    assert fit(batches, seconds) == pytest.approx(expected)


@pytest.mark.parametrize(("batches", "seconds"), [([2, 2], [1.0, 1.0]), ([1, 2], [1.0]), ([], [])])
def test_too_little_to_fit(batches: list[int], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="two batch sizes"):
        fit(batches, seconds)
