"""Admission: how many requests may wait, and when a refused one should come back. Pure."""

from __future__ import annotations

import dataclasses
import math

from keystage.router.engine import QueueFull


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionBounds:
    """Bounds of the entry queue.

    Attributes:
        queue_items: requests that may wait; memory is not the limit, patience is.
        queue_bytes: bytes (or 4 per token) of their inputs.
        default_deadline_s: for requests without one; within it every proxy on the way must wait.
        max_losses: workers a request may lose before it counts as what kills them.
    """

    queue_items: int = 1024
    queue_bytes: int = 256 * 1024 * 1024
    default_deadline_s: float = 600.0
    max_losses: int = 3


class Gate:
    """Counts what waits and how fast it leaves.

    Args:
        bounds: see `AdmissionBounds`.
    """

    def __init__(self, bounds: AdmissionBounds) -> None:
        self.bounds = bounds
        self.items = 0
        self.bytes = 0
        self._rate_rps = 0.0
        self._last_s: float | None = None

    def enter(self, nbytes: int) -> None:
        """Takes a place in the queue.

        Raises:
            QueueFull: a bound is reached; names it and carries `retry_after_s`.
        """
        bounds = self.bounds
        if self.items >= bounds.queue_items:
            raise QueueFull(
                f"{self.items} requests wait, the bound is {bounds.queue_items}",
                retry_after_s=self.retry_after_s(),
            )
        if self.bytes + nbytes > bounds.queue_bytes:
            raise QueueFull(
                f"{self.bytes} bytes wait, {nbytes} more exceed the bound of {bounds.queue_bytes}",
                retry_after_s=self.retry_after_s(),
            )
        self.items += 1
        self.bytes += nbytes

    def leave(self, nbytes: int) -> None:
        """Gives the place back."""
        self.items -= 1
        self.bytes -= nbytes

    def completed(self, now_s: float) -> None:
        """A request was answered: keeps an exponentially weighted completion rate (ten answers)."""
        if self._last_s is not None:
            gap_s = max(now_s - self._last_s, 1e-6)
            weight = 0.1
            self._rate_rps = 1.0 / ((1 - weight) / max(self._rate_rps, 1e-6) + weight * gap_s)
        else:
            self._rate_rps = 1.0
        self._last_s = now_s

    def retry_after_s(self) -> float:
        """Seconds until half of the queue should have left, between 1 and 60."""
        if self._rate_rps <= 0:
            return 5.0
        return float(min(60, max(1, math.ceil(self.items / 2 / self._rate_rps))))
