"""Service time of a model over batch size, l(b), and what follows from it. Pure.

Everything in `keystage.batching` computes with a `LatencyProfile`; where it comes from (a bundle's
profile, a fit at start-up, a published table) is its maker's business. Symphony, section 2.1.
"""

from __future__ import annotations

import dataclasses
import math

ANY_BATCH = 1 << 20
"""A bound on batch sizes that no device reaches."""

ROUNDING_S = 1e-9
"""Sums of times in another order may differ by this much: far below any clock, far above a float's step."""


class ProfileError(Exception):
    """A profile that is none; names the field, the bound and the value."""


@dataclasses.dataclass(frozen=True, slots=True)
class LatencyProfile:
    """l(b) = alpha_s * b + beta_s seconds for a batch of b, 1 <= b <= most.

    Attributes:
        alpha_s: seconds each item adds.
        beta_s: seconds a batch costs whatever its size.
        most: largest batch that a replica takes.

    Raises:
        ProfileError: a time is negative or no number, both are 0, or `most` is below 1.
    """

    alpha_s: float
    beta_s: float
    most: int = ANY_BATCH

    def __post_init__(self) -> None:
        for name, value in (("alpha_s", self.alpha_s), ("beta_s", self.beta_s)):
            if not math.isfinite(value) or value < 0:
                raise ProfileError(f"{name} must be at least 0 and finite, it is {value}")
        if self.alpha_s + self.beta_s <= 0:
            raise ProfileError("a batch must take time, alpha_s and beta_s are both 0")
        if self.most < 1:
            raise ProfileError(f"most must be at least 1, it is {self.most}")

    def latency_s(self, batch: int) -> float:
        """Seconds of a batch of this size."""
        return self.alpha_s * batch + self.beta_s

    def largest_batch(self, within_s: float) -> int:
        """The largest batch that takes at most so many seconds, 0 when not even one item does."""
        room_s = within_s - self.beta_s
        if room_s < self.alpha_s or room_s < 0:
            return 0
        if self.alpha_s == 0 or room_s >= self.alpha_s * self.most:
            return self.most
        batch = int(room_s / self.alpha_s)
        # Rounding of the division may be off by one either way.
        if self.alpha_s * (batch + 1) + self.beta_s <= within_s:
            return batch + 1
        return batch if self.alpha_s * batch + self.beta_s <= within_s else batch - 1
