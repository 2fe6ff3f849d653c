"""The policy of one stage, as router and simulator run it: a chosen policy and three exceptions. Pure.

Made by `router.binding` and `simulator.scheduled` from a `BatchingChoice`; called by the scheduler's model
side.

1. Requests without a deadline are never held back: deferring them by the bound after which they would be
   given up (600 s) would be absurd. They stand behind those with one, ride along in their batches, and
   where they wait alone the policy is eager.
2. Until the stage's service time is known at all, the policy is eager too: its first batches are the fit.
3. Eager batches are shared out evenly while several replicas are idle: a batch takes longer than an item,
   so two items that come together finish sooner on two idle replicas than as one batch on one of them.
"""

from __future__ import annotations

from collections.abc import Callable

from keystage.batching.api import Candidate
from keystage.batching.choice import BatchingChoice
from keystage.batching.partial_slo import BudgetRequest, PartialSlo
from keystage.batching.policies import BatchPolicy, Deferred, Eager, Timeout
from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue

PATIENCE_S = 1e9
"""Deadline of a request without one, from its arrival: it stands behind all others, in order of arrival."""


class StageRequest(BudgetRequest):
    """A request at one stage; its share is the stage's part of its deadline.

    Attributes:
        is_dated: whether its deadline is one that somebody asked for.
        is_demoted: whether it waits behind those that can be in time.
    """

    __slots__ = ("is_dated", "is_demoted")

    def __init__(
        self,
        number: int,
        stage: int,
        arrived_s: float,
        deadline_s: float,
        share_s: float = 0.0,
        *,
        is_dated: bool,
    ) -> None:
        super().__init__(number, stage, arrived_s, deadline_s, share_s)
        self.is_dated = is_dated
        self.is_demoted = False


class StagePolicy:
    """A `BatchPolicy` for one stage.

    Args:
        choice: what the pipeline says.
        idle: idle replicas of the stage now, the one that would get the batch among them.

    Attributes:
        is_known: whether the profile says anything; set by the owner.
        is_gathering: set by the owner while several requests come at one moment: they are one batch, not
            the first one alone and the others behind it.
    """

    __slots__ = ("_choice", "_eager", "_idle", "_inner", "is_gathering", "is_known")

    def __init__(self, choice: BatchingChoice, idle: Callable[[], int]) -> None:
        self._choice = choice
        self._eager = Eager()
        self._inner = policy_of(choice)
        self._idle = idle
        self.is_known = False
        self.is_gathering = False

    def candidate(
        self, queue: RequestQueue, profile: LatencyProfile, now_s: float, earliest_s: float
    ) -> Candidate | None:
        """As `BatchPolicy` says."""
        found = self._candidate(queue, profile, now_s, earliest_s)
        # Computed all the same: what cannot be in time is given up at any rate.
        return None if self.is_gathering else found

    def _candidate(
        self, queue: RequestQueue, profile: LatencyProfile, now_s: float, earliest_s: float
    ) -> Candidate | None:
        if self._choice.policy == "eager":
            return self._even(queue, profile, self._eager.candidate(queue, profile, now_s, earliest_s))
        head = queue.head
        is_planned = self.is_known and not (isinstance(head, StageRequest) and not head.is_dated)
        policy = self._inner if is_planned or self._choice.policy == "timeout" else self._eager
        return policy.candidate(queue, profile, now_s, earliest_s)

    def _even(
        self, queue: RequestQueue, profile: LatencyProfile, whole: Candidate | None
    ) -> Candidate | None:
        """The idle replicas' even share of what waits."""
        if whole is None or whole.size == 1:
            return whole
        share = -(-len(queue) // max(1, self._idle()))
        if share >= whole.size:
            return whole
        latest_s = whole.latest_s + profile.latency_s(whole.size) - profile.latency_s(share)
        return whole._replace(size=share, latest_s=latest_s)


def policy_of(choice: BatchingChoice) -> BatchPolicy:
    """The plain policy of a choice."""
    match choice.policy:
        case "eager":
            return Eager()
        case "timeout":
            return Timeout(choice.timeout_s)
        case "deferred":
            return Deferred()
        case "partial-slo":
            return PartialSlo()
