"""Divides a pipeline's objective among its stages.

Before it: estimated (or profiled) service times. After it: the corrector meets each stage's share.
Shares follow service time along the longest path of the graph: a stage gets the part of the deadline
that its service has of the longest way through it, so no way through the graph exceeds the deadline, and
a stage beside the longest path has the time that would otherwise be spent waiting for the others.
A share is a sojourn: wait plus service.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystage.controller.domain.snapshot import Slo, StageView
from keystage.controller.maths.estimator import is_number
from keystage.controller.policy.settings import PolicySettings

MOST_VISITS = 10_000.0
"""A ratio of rates beyond that is one of a rate near 0, not of rounds."""

Predecessors = list[tuple[int, ...]]
"""Per stage the places (in the list of stages, ascending, all before its own) of those it waits for."""


def predecessors(stages: Sequence[StageView]) -> Predecessors:
    """The graph of a pipeline; edges that do not lead forwards are not believed."""
    if all(stage.after is None for stage in stages):
        return [(k - 1,) if k else () for k in range(len(stages))]
    place = {stage.stage: k for k, stage in enumerate(stages)}
    graph: Predecessors = []
    for k, stage in enumerate(stages):
        names = stage.after if stage.after is not None else (stages[k - 1].stage,) if k else ()
        graph.append(tuple(sorted({place[n] for n in names if place.get(n, k) < k})))
    return graph


def is_chain(graph: Predecessors) -> bool:
    """Whether every stage takes the output of the one before it, and of no other."""
    return all(before == ((k - 1,) if k else ()) for k, before in enumerate(graph))


def longest_s(graph: Predecessors, services_s: Sequence[float]) -> list[float]:
    """Seconds of service on the longest way through each stage."""
    count = len(services_s)
    if is_chain(graph):
        return [sum(services_s)] * count
    until = [0.0] * count
    for k in range(count):
        until[k] = services_s[k] + max((until[j] for j in graph[k]), default=0.0)
    since = list(services_s)
    for k in range(count - 1, -1, -1):
        for j in graph[k]:
            since[j] = max(since[j], services_s[j] + since[k])
    return [u + s - own for u, s, own in zip(until, since, services_s, strict=True)]


def visits(entries: Sequence[float | None], rates_rps: Sequence[float | None]) -> list[float]:
    """How often a request passes each stage of a stream program: its arrivals over those at entry.

    A stage that loops is visited once a round. Until both rates are known it counts as 1.

    Args:
        entries: arrival rates of the stages where requests come in.
        rates_rps: arrival rate of every stage, rounds counted.
    """
    entry_rps = max((rate for rate in entries if rate is not None), default=0.0)
    if entry_rps <= 0:
        return [1.0] * len(rates_rps)
    ratios = [rate / entry_rps if rate is not None else 1.0 for rate in rates_rps]
    return [min(MOST_VISITS, ratio) if ratio > 0 else 1.0 for ratio in ratios]


def deadline_s(settings: PolicySettings, slo: Slo, longest: Sequence[float]) -> float:
    """The pipeline's deadline in seconds: as stated, else in service times of its longest path."""
    if is_number(slo.deadline_s) and slo.deadline_s > 0:
        return slo.deadline_s
    return settings.deadline_service_ratio * max(longest)


def stage_shares_s(whole_s: float, longest: Sequence[float], services_s: Sequence[float]) -> list[float]:
    """Shares of the deadline in seconds, in proportion to service times (seconds, all > 0)."""
    return [whole_s * s / way for s, way in zip(services_s, longest, strict=True)]


def waiting_before(graph: Predecessors, queues: Sequence[float]) -> list[float]:
    """Items waiting at each stage or before it (branches carry the same items: the fuller one counts)."""
    total: list[float] = []
    for before, queue in zip(graph, queues, strict=True):
        total.append(queue + max((total[j] for j in before), default=0.0))
    return total


def entry_wait_s(settings: PolicySettings, slo: Slo) -> float:
    """Seconds a session of a looping pipeline may wait for a slot at entry."""
    return settings.wait_ttft_ratio * ttft_s(settings, slo)


def ttft_s(settings: PolicySettings, slo: Slo) -> float:
    """Seconds to the first token that a looping pipeline is held to: as stated, else the default."""
    return slo.ttft_s if is_number(slo.ttft_s) and slo.ttft_s > 0 else settings.ttft_s
