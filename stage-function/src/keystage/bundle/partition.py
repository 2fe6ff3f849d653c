"""Which layers make a stage: the three methods of `keystage split`, as pure arithmetic.

`uniform` and `parameters` are those of DeepSpeed's `PipelineModule`: they give what its
`partition_uniform` and `partition_balanced` give (`least_spread`), and `deepspeed_partition` takes
DeepSpeed's own where that is installed. `time` is `balanced` over measured seconds, which is exact:
the slowest stage bounds a pipeline, however fast the fastest one is.

Every part gets at least one layer. The embedding counts with the first layer and the head with the
last one. DeepSpeed balances whatever modules it is given, so that an embedding or a head that is a module
of its own may come to fill a stage alone (GPT-2 in 8 stages: both do); here such a stage cannot come about.

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


def least_spread(weights: Sequence[float], parts: int) -> list[int]:
    """The partition that DeepSpeed's `partition_balanced` gives (0.12.6 to 0.19.8 at least).

    It grows partitions of the first layers part by part and keeps for each the one whose heaviest and
    lightest part differ least, with the latest cut among equals. Since the best partition of fewer
    layers need not be part of the best one of more, the result is good rather than best.

    Args:
        weights: weight of each layer, not negative.
        parts: number of stages, at most the number of layers.

    Returns:
        `parts + 1` ascending bounds, no part empty.
    """
    items = len(weights)
    if items == parts:
        return list(range(parts + 1))
    total = [0.0, *itertools.accumulate(map(float, weights))]
    # Of the first `end` layers in the parts so far: heaviest part, lightest part, cuts before the last part.
    grown: list[tuple[float, float, list[int]] | None] = [None, *((load, load, [0]) for load in total[1:])]
    for part in range(2, parts + 1):
        before, grown = grown, [None] * (items + 1)
        for end in range(part, items + 1):
            least = math.inf
            for start in range(part - 1, end):
                so_far = before[start]
                assert so_far is not None
                load = total[end] - total[start]
                heaviest, lightest = max(so_far[0], load), min(so_far[1], load)
                if heaviest - lightest <= least:
                    least = heaviest - lightest
                    grown[end] = (heaviest, lightest, [*so_far[2], start])
    best = grown[items]
    assert best is not None
    return [*best[2], items]


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
