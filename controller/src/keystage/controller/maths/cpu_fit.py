"""What CPU cores are worth to a stage: a least-squares fit of its offline profile (QUART section 5.3).

Before it: `cpu-profile.json` of a bundle (`bundle.api.CpuProfile`). After it: `CpuView.per_core_s` in the
snapshot. The model of a batch's latency, in seconds:

    T = c0 + c1 b + c2 / cores + c3 b bytes / cores + c4 communication + c5 queue + c6 parameters

b items in the batch, bytes of one item's activation. A column that does not vary (parameters within
one stage) is explained by the constant and left out. Of an item served alone, c2 + c3 bytes core-seconds
shrink as 1 / cores. Valid within the cores and batches of the profile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keystage.bundle.api import CpuRow
from keystage.controller.maths.regression import BadProfile, Fit, least_squares

NAMES = ("one", "batch", "per_core", "moved_per_core", "communication", "queue", "parameters")


def fit(rows: Sequence[CpuRow]) -> Fit:
    """Fits one stage's rows.

    Raises:
        BadProfile: too few rows, a value that is not finite, or cores or batch below what can be.
    """
    for i, row in enumerate(rows):
        if not row.cores > 0 or not row.batch >= 1:
            raise BadProfile(
                f"row {i} of the profile: cores must be above 0 and batch at least 1, "
                f"not {row.cores:g} and {row.batch:g}"
            )
    columns = [
        [
            1.0,
            row.batch,
            1 / row.cores,
            row.batch * row.activation_bytes / row.cores,
            row.communication_s,
            row.queue,
            row.parameters,
        ]
        for row in rows
    ]
    table = np.array(columns, dtype=np.float64).reshape(len(rows), len(NAMES))
    return least_squares(NAMES, table, np.array([row.latency_s for row in rows], dtype=np.float64))


def per_core_s(rows: Sequence[CpuRow]) -> tuple[float, float, float] | None:
    """Core-seconds of an item that shrink as 1/cores, with the 95 % interval; None if not to be told.

    Raises:
        BadProfile: see `fit`.
    """
    fitted = fit(rows)
    activation_bytes = float(np.mean([row.activation_bytes for row in rows]))
    weights = {"per_core": 1.0, "moved_per_core": activation_bytes}
    return fitted.combine({name: w for name, w in weights.items() if name in fitted.names} or weights)
