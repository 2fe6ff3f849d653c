"""Stage deadlines of a pipeline: its deadline divided along the stages, cumulatively. Pure.

Stage k of n is to be done by arrival + D (l_0 + .. + l_k) / (l_0 + .. + l_n-1). Deadlines count from the
request's arrival, so time that a stage does not use carries on to the next ones, and time that it overdraws
is missing there. The shares are profiled service times, as the controller divides its objective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def cumulative_shares(services_s: Sequence[float]) -> list[float]:
    """The part of a deadline that must be left over when a stage is done, ascending to exactly 1.

    Args:
        services_s: profiled service time of each stage; times that are none (0, NaN) share evenly what the
            others have in the mean.
    """
    known = [s for s in services_s if math.isfinite(s) and s > 0]
    mean_s = sum(known) / len(known) if known else 1.0
    shares: list[float] = []
    total_s = 0.0
    for service_s in services_s:
        total_s += service_s if math.isfinite(service_s) and service_s > 0 else mean_s
        shares.append(total_s)
    ends = [share / total_s for share in shares]
    if ends:
        ends[-1] = 1.0
    return ends


def stage_deadline_s(arrived_s: float, deadline_s: float, share: float) -> float:
    """When a stage must be done with a request; infinite where the request has no deadline.

    Args:
        arrived_s: when the request came to the pipeline.
        deadline_s: when it must be answered.
        share: the stage's entry of `cumulative_shares`.
    """
    if deadline_s == math.inf:
        return math.inf
    return arrived_s + (deadline_s - arrived_s) * share
