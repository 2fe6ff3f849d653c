"""Which layers make a stage: the three methods of `keystage split`, as pure arithmetic.

`uniform` and `parameters` follow DeepSpeed's `PipelineModule` (`partition_uniform`,
`partition_balanced`); `time` is `balanced` over measured seconds. Every part gets at least one
layer: the embedding counts with the first layer and the head with the last one, so that no stage
is left with an embedding alone (which balancing over separate items can produce).

Comes after the source is opened and before any parameter is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from keystage.bundle.errors import SplitError


def uniform(items: int, parts: int) -> list[int]:
    """Equal counts; the remainder goes to the first parts, one each.

    Args:
        items: number of layers.
        parts: number of stages, at most `items`.

    Returns:
        `parts + 1` ascending bounds, from 0 to `items`.
    """
    size, rest = divmod(items, parts)
    return [part * size + min(part, rest) for part in range(parts + 1)]


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """The contiguous partition whose heaviest part is lightest (linear partition problem).

    Among those the one with the least sum of squares, then with the latest cuts. Exact dynamic
    programming, O(items^2 * parts).

    Args:
        weights: weight of each layer, not negative.
        parts: number of stages, at most the number of layers.

    Returns:
        `parts + 1` ascending bounds, no part empty.
    """
    items = len(weights)
    total = [0.0, *itertools.accumulate(weights)]
    worst: tuple[float, float] = (math.inf, math.inf)
    best = [[worst] * (items + 1) for _ in range(parts + 1)]
    cut = [[0] * (items + 1) for _ in range(parts + 1)]
    best[0][0] = (0.0, 0.0)
    for part in range(1, parts + 1):
        for end in range(part, items + 1):
            for start in range(part - 1, end):
                heaviest, squares = best[part - 1][start]
                load = total[end] - total[start]
                cost = (max(heaviest, load), squares + load * load)
                if cost <= best[part][end]:
                    best[part][end], cut[part][end] = cost, start
    bounds = [items]
    for part in range(parts, 0, -1):
        bounds.append(cut[part][bounds[-1]])
    return bounds[::-1]


def with_ends(layers: Sequence[float], embedding: float, head: float) -> list[float]:
    """Adds the embedding to the first layer and the final norm and head to the last one."""
    weights = list(layers)
    weights[0] += embedding
    weights[-1] += head
    return weights


def check_stages(stages: int, layers: int) -> None:
    """Refuses a wish that cannot be met.

    Raises:
        SplitError: fewer stages than 1, or more than layers.
    """
    if stages < 1:
        raise SplitError(f"stages must be at least 1, got {stages}")
    if stages > layers:
        raise SplitError(
            f"{stages} stages wanted, but the model has {layers} layers: at most one stage per layer"
        )


def check_bounds(bounds: Sequence[int], layers: int) -> None:
    """Proves that every layer is in exactly one stage and that none is empty.

    Raises:
        SplitError: it is not so.
    """
    if bounds[0] != 0 or bounds[-1] != layers:
        raise SplitError(f"stage bounds {list(bounds)} do not cover layers 0 to {layers - 1}")
    for stage, (first, end) in enumerate(itertools.pairwise(bounds)):
        if end <= first:
            raise SplitError(f"stage {stage} would hold no layer (bounds {list(bounds)})")
