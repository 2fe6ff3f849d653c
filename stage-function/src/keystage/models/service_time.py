"""The line l(b) = alpha b + beta through measured times of batches: least squares, not negative.

Symbols: b rows per batch, l(b) seconds, alpha seconds per row, beta seconds per batch. Valid in
the range of batches that was measured. Pure arithmetic: `models.profile` measures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fit(batches: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fits alpha and beta.

    A fit with a negative coefficient is replaced by the best one that has it at 0, since a
    service time grows with its batch and an empty batch costs no less than nothing.

    Args:
        batches: rows per batch, at least two different sizes.
        seconds: time of each batch, above 0.

    Returns:
        (alpha in seconds per row, beta in seconds per batch).

    Raises:
        ValueError: fewer than two different sizes, or lengths that differ.
    """
    if len(batches) != len(seconds) or len(set(batches)) < 2:
        raise ValueError(f"two batch sizes and as many times are needed, got {batches} and {seconds}")
    rows, times = np.asarray(batches, float), np.asarray(seconds, float)
    spread = rows - rows.mean()
    alpha = float(spread @ times / (spread @ spread))
    beta = float(times.mean() - alpha * rows.mean())
    if alpha < 0:
        return 0.0, float(times.mean())
    if beta < 0:
        return float(rows @ times / (rows @ rows)), 0.0
    return alpha, beta
