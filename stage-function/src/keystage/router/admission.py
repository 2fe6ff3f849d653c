"""Admission: how many may wait, each tenant's share of that, and refusals that come with it. Pure.

`Gate` bounds what is kept in count and bytes. `entrance` and `lobby` keep who waits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from keystage.router.engine import InvalidRequest, QueueFull, TooLate
from keystage.router.fleet import Fleet


def _even(_tenant: str) -> float:
    return 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionBounds:
    """Bounds of the entry queue.

    Attributes:
        queue_items: requests that may wait; memory is not the limit, patience is.
        queue_bytes: bytes (or 4 per token) of their inputs.
        default_deadline_s: for requests without one; within it every proxy on the way must wait.
        max_losses: workers a request may lose before it counts as what kills them.
        weight_of: of a tenant, above 0.
    """

    queue_items: int = 1024
    queue_bytes: int = 256 * 1024 * 1024
    default_deadline_s: float = 600.0
    max_losses: int = 3
    weight_of: Callable[[str], float] = _even


@dataclasses.dataclass(slots=True)
class _Held:
    """What the gate counts of one tenant."""

    items: int = 0
    bytes: int = 0


class Gate:
    """Counts what is kept, by tenant, and how fast it leaves.

    Args:
        bounds: see `AdmissionBounds`.
    """

    def __init__(self, bounds: AdmissionBounds) -> None:
        self.bounds = bounds
        self.items = 0
        self.bytes = 0
        self.tenants: dict[str, _Held] = {}
        self._rate_rps = 0.0
        self._last_s: float | None = None

    def enter(self, nbytes: int, tenant: str = "") -> None:
        """Takes a place in the queue.

        Raises:
            QueueFull: a bound is reached; names it and carries `retry_after_s`.
        """
        refusal = self.why_full(nbytes)
        if refusal is not None:
            raise refusal
        self.enter_again(nbytes, tenant)

    def why_full(self, nbytes: int) -> QueueFull | None:
        """Why there is no place for one of that size, None: there is."""
        bounds = self.bounds
        if self.items >= bounds.queue_items:
            why = f"{self.items} requests wait, the bound is {bounds.queue_items}"
        elif self.bytes + nbytes > bounds.queue_bytes:
            why = f"{self.bytes} bytes wait, {nbytes} more exceed the bound of {bounds.queue_bytes}"
        else:
            return None
        return QueueFull(why, retry_after_s=self.retry_after_s())

    def enter_again(self, nbytes: int, tenant: str = "") -> None:
        """Counts one that was admitted before; it is not refused."""
        self.items += 1
        self.bytes += nbytes
        held = self.tenants.get(tenant)
        if held is None:
            held = self.tenants[tenant] = _Held()
        held.items += 1
        held.bytes += nbytes

    def leave(self, nbytes: int, tenant: str = "") -> None:
        """Gives the place back."""
        self.items -= 1
        self.bytes -= nbytes
        held = self.tenants[tenant]
        held.items -= 1
        held.bytes -= nbytes
        if not held.items:
            del self.tenants[tenant]

    def over_share(self, tenant: str, nbytes: int = 0, beside: str | None = None) -> float:
        """What a tenant has, with one request more of that size if it is above 0, over its share.

        By weight, among those that have something here, itself, and `beside`. Above 1: it has more.
        """
        weight_of, bounds = self.bounds.weight_of, self.bounds
        weights = sum(map(weight_of, {*self.tenants, tenant, tenant if beside is None else beside}))
        share = weight_of(tenant) / weights
        held = self.tenants.get(tenant, _Held())
        items = (held.items + (nbytes > 0)) / max(1.0, share * bounds.queue_items)
        return max(items, (held.bytes + nbytes) / (share * bounds.queue_bytes))

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


def why_unfit(fleet: Fleet, need: int) -> InvalidRequest | None:
    """Why no worker could ever hold a session of so many tokens, None: one could, or there is none yet."""
    for stage in range(fleet.stages):
        granted = [worker.hello.kv_tokens for _, worker in fleet.of_stage(stage)]
        if granted and need > max(granted):
            return InvalidRequest(
                f"prompt + max_tokens is {need} tokens, stage {stage} has KV room for {max(granted)}",
                param="max_tokens",
            )
    return None


def short_of_time(left_s: float, limit_s: float) -> TooLate:
    """The refusal of a request whose turn has come too late.

    Args:
        left_s: until its deadline.
        limit_s: what it had when it came.
    """
    return TooLate(
        f"its turn came after {limit_s - left_s:.3g} s; {left_s:.3g} s are left of its deadline of "
        f"{limit_s:.3g} s, which is less than requests like it take"
    )
