"""What one model's part of the scheduler knows: its queue, its candidate, its times. Pure.

Symphony's ModelThread (section 4.2): it sees its own model alone, and tells the rank side what its next batch
would be. All sides can work apart from each other; `scheduler` joins them to the rank side.

Times: a word sent at t starts a batch of b at max(t + delay(b), when its replica is free). The policy works
with times of *sending* and with L(b) = l(b) + delay(b), so that it need not know of delays (appendix D).
"""

from __future__ import annotations

from keystage.batching.api import Candidate, Delays, Request
from keystage.batching.arrival_rate import ArrivalRate
from keystage.batching.policies import BatchPolicy
from keystage.batching.profile import ROUNDING_S, LatencyProfile
from keystage.batching.queue import RequestQueue
from keystage.batching.surroundings import Surroundings


class ModelSide:
    """One model.

    Attributes:
        queue: what waits.
        around: what the policy may know beyond it.
        profile: l(b), seconds of a batch on a replica.
        candidate: the next batch as of the last `update`, in times of sending.
        alone_s: from the scheduler's word to the end of a request alone: less before its deadline, and it
            cannot be in time any more.
    """

    __slots__ = (
        "_delays", "_policy", "_rate", "_sent", "_slo_s", "alone_s", "around", "candidate", "profile", "queue"
    )  # fmt: skip

    def __init__(self, profile: LatencyProfile, policy: BatchPolicy, delays: Delays) -> None:
        self._policy = policy
        self._delays = delays
        self._rate = ArrivalRate()
        self._slo_s = 0.0
        self.around = Surroundings(profile)
        self.queue = RequestQueue(self.around)
        self.candidate: Candidate | None = None
        self.set_profile(profile)

    def set_profile(self, profile: LatencyProfile) -> None:
        """The profile is another from now on; `update` is the caller's next step."""
        self.profile = profile
        self.around.set_service(profile)
        delays = self._delays
        self._sent = LatencyProfile(
            profile.alpha_s + delays.data_s, profile.beta_s + delays.control_s, profile.most
        )
        self.alone_s = self._sent.latency_s(1)

    def set_delays(self, delays: Delays) -> None:
        """The delays are others from now on; `update` is the caller's next step."""
        self._delays = delays
        self.set_profile(self.profile)

    def arrive(self, request: Request, now_s: float) -> None:
        """A request comes; `update` is the caller's next step."""
        self.queue.push(request)
        self._slo_s = slo_s = request.deadline_s - request.arrived_s
        if self._rate.count(now_s, slo_s):
            self._set_rate()

    def look(self, now_s: float) -> None:
        """Notices that fewer requests come than before; to be called from time to time."""
        if self._rate.look(now_s, self._slo_s):
            self._set_rate()

    def update(self, now_s: float, earliest_s: float, *, is_granted: bool = False) -> Candidate | None:
        """Computes the candidate anew; what the policy gave up is in `queue.take_given_up`.

        Args:
            now_s: the present.
            earliest_s: no batch can be sent before.
            is_granted: a replica is offered.
        """
        self.around.is_granted = is_granted
        self.candidate = candidate = self._policy.candidate(self.queue, self._sent, now_s, earliest_s)
        return candidate

    def release(self, size: int, now_s: float, free_s: float) -> tuple[list[Request], float]:
        """Takes the next batch out of the queue, for a replica that is free at `free_s`.

        Returns:
            The requests, `size` of them or, where that would miss the first deadline, fewer; and when they
            start.
        """
        head = self.queue.head
        delays = self._delays
        start_s = max(now_s + delays.of(size), free_s)
        if head is not None:
            while size > 1 and start_s + self.profile.latency_s(size) > head.deadline_s + ROUNDING_S:
                size -= 1
                start_s = max(now_s + delays.of(size), free_s)
        return self.queue.pop_front(size), start_s

    def _set_rate(self) -> None:
        rate_rps = self._rate.rate_rps
        around, sent = self.around, self._sent
        replicas = around.replicas
        around.rate_rps = rate_rps
        around.staggered = max(1, sent.largest_batch(self._slo_s * replicas / (replicas + 1)))
        around.set_load(
            rate_rps * self.profile.latency_s(around.staggered) / around.staggered, self._rate.scv
        )
