"""Divides a pipeline's objective among its stages.

Before it: estimated (or profiled) service times. After it: the corrector meets each stage's share.
Shares follow service time along the longest path of the graph; pipelines are chains, so the path
is the whole chain. A share is a sojourn: wait plus service.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystage.controller.domain.snapshot import Slo
from keystage.controller.maths.estimator import is_number
from keystage.controller.policy.settings import PolicySettings


def stage_shares_s(settings: PolicySettings, slo: Slo, services_s: Sequence[float]) -> list[float]:
    """Shares of the deadline in seconds, in proportion to service times (seconds, all > 0)."""
    total_s = sum(services_s)
    if is_number(slo.deadline_s) and slo.deadline_s > 0:
        deadline_s = slo.deadline_s
    else:
        deadline_s = settings.deadline_service_ratio * total_s
    return [deadline_s * s / total_s for s in services_s]


def entry_wait_s(settings: PolicySettings, slo: Slo) -> float:
    """Seconds a session of a looping pipeline may wait for a slot at entry."""
    ttft_s = slo.ttft_s if is_number(slo.ttft_s) and slo.ttft_s > 0 else settings.ttft_s
    return settings.wait_ttft_ratio * ttft_s
