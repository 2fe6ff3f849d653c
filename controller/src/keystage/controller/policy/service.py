"""What a replica of a single-pass stage can do: time of an item, batch size, capacity.

Before it: estimates, and l(b) where a profile gives it. After it: shares, and the demand for replicas.
Batches form eagerly: a free replica takes what waits, up to the largest batch. Nobody waits for a batch
to fill, so there is no formation wait; batches grow with the queue. The steady demand counts capacity at
b*, the largest batch within half the stage's share; a backlog is worked off in full batches.

The profile is of other hardware or other inputs than today's, so it is scaled by one factor, the pace:

    b_now = service_s * rows_rps       items of a batch, since E[l] / (E[l] / b) = b
    pace  = service_s / l(b_now)       measured over profiled; 1 until enough was measured
"""

from __future__ import annotations

import msgspec

from keystage.controller.domain.snapshot import BatchProfile
from keystage.controller.maths import batching
from keystage.controller.maths.estimator import LEAST_S, MOST_S, Estimates
from keystage.controller.policy.settings import PolicySettings

MOST_PACE = 16.0
"""A measured time that is further from its profile than this factor is garbled."""

MOST_BATCH = 1_000_000
"""A larger batch is garbled."""


class Service(msgspec.Struct, frozen=True, gc=False):
    """How one replica serves.

    Attributes:
        alone_s: seconds of a batch of one item.
        alpha_s: seconds per item, at today's pace.
        beta_s: seconds per batch.
        most: largest batch.
        fixed_rps: items a second where no profile tells l(b), else 0.
    """

    alone_s: float
    alpha_s: float = 0.0
    beta_s: float = 0.0
    most: int = 1
    fixed_rps: float = 0.0

    def batch_within(self, share_s: float) -> int:
        """b*: the largest batch within half the share."""
        if self.most == 1:
            return 1
        return batching.largest_batch(self.alpha_s, self.beta_s, self.most, share_s)

    def batch_s(self, batch: int) -> float:
        """l(b)."""
        return self.alone_s if self.fixed_rps else batching.batch_s(self.alpha_s, self.beta_s, batch)

    def rps(self, batch: int) -> float:
        """Items a busy replica finishes a second in batches of this size."""
        return self.fixed_rps or batching.capacity_rps(self.alpha_s, self.beta_s, batch)


def service(settings: PolicySettings, profile: BatchProfile | None, known: Estimates) -> Service:
    """How a replica serves, by profile and measurement; `known` has a service time and a capacity."""
    assert known.service_s is not None
    assert known.capacity_rps is not None
    if profile is None or not is_sane(profile):
        return Service(known.service_s, fixed_rps=known.capacity_rps)
    pace = 1.0
    if known.rows_rps is not None and known.samples >= settings.estimator.services:
        batch = min(float(profile.most), max(1.0, known.service_s * known.rows_rps))
        pace = known.service_s / batching.batch_s(profile.alpha_s, profile.beta_s, batch)
        pace = min(MOST_PACE, max(1 / MOST_PACE, pace))
    alpha_s, beta_s = profile.alpha_s * pace, profile.beta_s * pace
    return Service(alpha_s + beta_s, alpha_s, beta_s, profile.most)


def is_sane(profile: BatchProfile) -> bool:
    """Whether l(b) can be believed."""
    alpha_s, beta_s = profile.alpha_s, profile.beta_s
    if not (1 <= profile.most <= MOST_BATCH and alpha_s >= 0 and beta_s >= 0):
        return False
    return alpha_s + beta_s >= LEAST_S and alpha_s * profile.most + beta_s <= MOST_S
