"""INFless's batch-aware bounds: how many requests a second an instance should get, and how many instances.

Before it: the rate of a function. After it: `infless` adds keep-alive. Source: INFless (Yang and others,
ASPLOS 2022), section on built-in, non-uniform batching and dispatching:

    r_up = b / t_exec          an instance that is always busy with batches of b
    r_low = b / (t_slo - t_exec)   the slowest rate at which a batch of b fills before its first item is late
    R >= n r_up                scale out for the rest
    R < alpha n r_low + (1 - alpha) n r_up    release instances, alpha = 0.8

Symbols: b batch, t_exec seconds of a batch, t_slo objective in seconds, R requests a second, n instances.
The paper rounds 1 / t_exec down and 1 / (t_slo - t_exec) up to whole batches a second, which is no number
for models that take a second; unrounded here. A batch of one has r_low = 0: nothing needs to fill.
"""

from __future__ import annotations

import dataclasses
import math

from keystage.baselines.seen import batch_within, service_s
from keystage.controller.domain.snapshot import BatchProfile


@dataclasses.dataclass(frozen=True, slots=True)
class RateBounds:
    """Requests a second of one instance.

    Attributes:
        low_rps: r_low.
        high_rps: r_up.
        batch: b.
    """

    low_rps: float
    high_rps: float
    batch: int


def rate_bounds(batch: BatchProfile, slo_s: float) -> RateBounds:
    """Bounds with the largest batch that is served within half of the objective (t_exec <= t_slo / 2).

    Where not even one item is, the batch is one: the instance cannot meet the objective anyway.
    """
    items = batch_within(batch, slo_s / 2)
    exec_s = service_s(batch, items)
    low_rps = items / (slo_s - exec_s) if items > 1 else 0.0
    return RateBounds(low_rps=min(low_rps, items / exec_s), high_rps=items / exec_s, batch=items)


def instances(rate_rps: float, present: int, bounds: RateBounds, alpha_ratio: float) -> int:
    """How many instances there shall be.

    Args:
        rate_rps: R.
        present: n, at least 1.
        bounds: of one instance.
        alpha_ratio: weight of the lower bound in the release test.

    Returns:
        At least 1. Never fewer than carry the rate, and no release while the rate is above the line.
    """
    needed = max(1, math.ceil(rate_rps / bounds.high_rps * (1 - 1e-9)))
    if needed >= present:
        return needed
    line_rps = alpha_ratio * bounds.low_rps + (1 - alpha_ratio) * bounds.high_rps
    if line_rps <= 0:  # batches of one, and the lower bound alone counts: any rate is above the line
        return present if rate_rps > 0 else needed
    kept = math.floor(min(present, rate_rps / line_rps * (1 + 1e-9)))
    return max(needed, kept)
