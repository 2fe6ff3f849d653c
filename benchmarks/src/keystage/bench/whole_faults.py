"""What must not be in a run of the real platform: requests lost sight of, restarts, processes left over.

Before it: an outcome. After it: sentences, which `e2e`, `mixed` and `soak` put first in their notes. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystage.bench.whole_client import Sent
from keystage.bench.whole_world import Outcome


def faults_of(outcome: Outcome) -> list[str]:
    """The faults, none for a good run: the client's counts by themselves, and beside the router's."""
    found = []
    for served, sent in zip(outcome.plan.served, outcome.sent, strict=True):
        if len(sent.scheduled_s) != len(served.times_s):
            found.append(f"{served.name}: {len(served.times_s)} planned, {len(sent.scheduled_s)} sent")
        if sent.unaccounted:
            found.append(f"{served.name}: {sent.unaccounted} requests are not accounted for")
        found += [f"{served.name}: {text}" for text in _router_faults(sent)]
    if outcome.restarts:
        found.append(f"gateway or controller crashed {outcome.restarts} times")
    if outcome.left_over:
        found.append(f"processes left over: {'; '.join(outcome.left_over)}")
    return found


def _router_faults(sent: Sent) -> list[str]:
    router, found = sent.router, []
    if router.was_restarted:
        return ["its router was started anew"]
    number, served = len(sent.scheduled_s), int(sent.is_served.sum())
    if router.completed < served:
        found.append(f"{served} served, its router knows {router.completed}")
    if router.accepted > number:
        found.append(f"{number} sent, its router took {router.accepted}: something sent them twice")
    # What a router took and did not complete it refused later, or its client had gone.
    ended = sum(router.refused.values()) + sum(sent.failed.values())
    if router.accepted - router.completed > ended:
        found.append(
            f"its router took {router.accepted} and completed {router.completed}, with only {ended} refused "
            "by it or failed at the client"
        )
    return found


def accounted(outcomes: Sequence[Outcome]) -> str:
    """What became of all requests, counted at the client and in the routers, in words."""
    sent = [one for outcome in outcomes for one in outcome.sent]
    return (
        f"requests of the live runs: {sum(len(s.scheduled_s) for s in sent)} sent = "
        f"{sum(int(s.is_served.sum()) for s in sent)} answered + "
        f"{sum(sum(s.refused.values()) for s in sent)} refused + "
        f"{sum(sum(s.failed.values()) for s in sent)} failed or timed out + "
        f"{sum(s.unaccounted for s in sent)} unaccounted for; the routers took "
        f"{sum(s.router.accepted for s in sent)}, completed {sum(s.router.completed for s in sent)}, refused "
        f"{sum(sum(s.router.refused.values()) for s in sent)}"
    )
