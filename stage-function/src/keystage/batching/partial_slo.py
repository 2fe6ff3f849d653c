"""NeuStream's batching rule: batches within a module's share of the SLO; whose budget is spent, waits. Pure.

NeuStream, section 4.1, Algorithm 1, as a `BatchPolicy`. Symbols: SLO_i, `share_s` here, is the time that one
pass through module i may take of a request's SLO; B_r = sum of SLO_j over the modules executed so far -
(t - t_0) is the request's budget; l(b) is the profile. A batch has at most argmax_b l(b) <= SLO_i requests
and starts at once.

What differs from the algorithm as printed, and why:
- Deadlines are cumulative: d = t_0 + sum of SLO_j, module i included. B_r is taken when the request comes to
  the module, d - SLO_i - arrival: taken at a later t, as printed, it is negative at the first module for all
  that wait at all, and nothing that ever queued would be served. From then on the request's own time counts:
  one that could not end by d even alone is given up, instead of being found out by the next module.
- A batch also ends by the deadline of its first request: time that was lost before makes it smaller.
- A spent budget counts at the front alone, where it would make the batch small for all behind it. Further
  back such a request takes part where there is room: the batch ends by its deadline all the same.
- What is given up is demoted behind the others or refused, as the pipeline says (`batching.api.Drop`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from keystage.batching.api import Candidate, Request
from keystage.batching.gather import demoted_batch
from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue

ROUNDING_S = 1e-9
"""Sums of the same shares in another order may differ by this much."""


class BudgetRequest(Request):
    """A request that brings its own share, where requests of one module differ in it.

    Attributes:
        share_s: partial SLO of this module for this request.
    """

    __slots__ = ("share_s",)

    def __init__(self, number: int, model: int, arrived_s: float, deadline_s: float, share_s: float) -> None:
        super().__init__(number, model, arrived_s, deadline_s)
        self.share_s = share_s


@dataclasses.dataclass(frozen=True, slots=True)
class PartialSlo:
    """NeuStream's Algorithm 1.

    Attributes:
        share_s: partial SLO of the module; 0: each request's own (`BudgetRequest`), or what the request had
            left until its deadline when it came.
    """

    share_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.share_s < math.inf:
            raise ValueError(f"share_s must be at least 0 and finite, it is {self.share_s}")

    def share_of(self, request: Request) -> float:
        """The partial SLO that holds for a request, seconds."""
        if isinstance(request, BudgetRequest):
            return request.share_s
        return self.share_s or request.deadline_s - request.arrived_s

    def budget_s(self, request: Request) -> float:
        """B_r when the request came: below 0 it has overdrawn the shares of the modules before this one."""
        if math.isinf(request.deadline_s):
            return math.inf
        return request.deadline_s - self.share_of(request) - request.arrived_s

    def candidate(
        self, queue: RequestQueue, profile: LatencyProfile, now_s: float, earliest_s: float
    ) -> Candidate | None:
        """As `BatchPolicy` says; starts at once."""
        while (head := queue.head) is not None:
            fits = profile.largest_batch(head.deadline_s - earliest_s)
            if fits and self.budget_s(head) >= -ROUNDING_S:
                # A share that is shorter than one item takes is no reason to serve nobody.
                limit = max(1, profile.largest_batch(self.share_of(head)))
                size = min(fits, limit, len(queue))
                return Candidate(size, earliest_s, head.deadline_s - profile.latency_s(size))
            queue.give_up(1)
        size = demoted_batch(queue, profile)
        return Candidate(size, earliest_s, math.inf) if size else None


def budget_s(executed_s: float, began_s: float, now_s: float) -> float:
    """B_r of a request on its way.

    Args:
        executed_s: sum of the partial SLOs of the modules that it has been through, each visit counted.
        began_s: t_0, when it came in.
        now_s: the present.
    """
    return executed_s - (now_s - began_s)


def partial_slos_s(slo_s: float, services_s: Sequence[float], visits: Sequence[float]) -> list[float]:
    """Divides a request's SLO along its path: SLO_i = SLO l_i / sum of k_j l_j, for each visit.

    Args:
        slo_s: of the whole request.
        services_s: l_i, profiled service time of a visit to each module; times that are none (0, NaN) count
            as the mean of the others.
        visits: k_i, how often the request passes each module; 0 where it does not.

    Returns:
        Partial SLO of a visit, by module; the visits' sum is the SLO.

    Raises:
        ValueError: lengths differ, a number of visits is negative, or the path is empty.
    """
    if len(services_s) != len(visits):
        raise ValueError(f"{len(services_s)} service times for {len(visits)} modules")
    if any(not 0 <= count < math.inf for count in visits) or not sum(visits):
        raise ValueError(f"visits must be at least 0 and one of them above, got {list(visits)}")
    known = [service for service in services_s if math.isfinite(service) and service > 0]
    mean_s = sum(known) / len(known) if known else 1.0
    taken = [service if math.isfinite(service) and service > 0 else mean_s for service in services_s]
    total_s = sum(service * count for service, count in zip(taken, visits, strict=True))
    return [slo_s * service / total_s for service in taken]
