"""When a single-pass batch starts and how large it is: the `BatchPolicy` port. Pure.

The router asks whenever a stage's queue or its credit changes. `Eager` is the first policy; others
(timeout, deferred, partial SLO) answer the same question with the same inputs.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class BatchState:
    """What a policy may look at.

    Attributes:
        queue: items waiting at the stage.
        oldest_wait_s: how long the first has waited.
        earliest_deadline_s: seconds until the first item's deadline.
        free_slots: credit of the worker the batch would go to.
        max_batch: rows that worker takes at once.
        idle_workers: workers of the stage with nothing in hand, the chosen one among them if it is idle.
    """

    queue: int
    oldest_wait_s: float
    earliest_deadline_s: float
    free_slots: int
    max_batch: int
    idle_workers: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class BatchDecision:
    """How many items to send now, and when to ask again if nothing changes before.

    Attributes:
        size: items to send, 0 to wait.
        ask_again_s: seconds until a timer should fire, None for none.
    """

    size: int
    ask_again_s: float | None = None


class BatchPolicy(Protocol):
    """Decides batches for one pipeline."""

    def decide(self, state: BatchState) -> BatchDecision:
        """Called with at least one item waiting and at least one free slot."""


class Eager:
    """Sends what is there, as much as the worker takes, shared out evenly while several workers are idle.

    A batch takes longer than an item, so two items that come together finish sooner on two idle workers
    than as one batch on one of them; once nobody is idle batches fill up.
    """

    def decide(self, state: BatchState) -> BatchDecision:
        """Never waits."""
        even = -(-state.queue // max(1, state.idle_workers))
        return BatchDecision(min(even, state.free_slots, state.max_batch))
