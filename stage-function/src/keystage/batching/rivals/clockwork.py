"""A scheduler like Clockwork's (Gujarati et al., OSDI 2020), for comparison. Pure.

As Symphony describes it (section 2.2): for every batch size of every model there is a candidate, and a free
GPU takes the one whose *latest executable moment* is the earliest, that is, the last moment at which its
start still meets its deadline; candidates whose moment has passed are void. It looks at urgency alone.

Choices of ours, all in its favour: a model's candidates begin at its oldest request that can still be in
time (others are dropped at once and not served late); sizes are any number, not powers of two; the GPU is
told when it is free and not ahead of that, so that a batch is chosen with all that has come by then; there
is no cost of choosing, loading or moving.

Of one model's candidates that can still be met the largest has the earliest moment, d - l(b): one
comparison a model finds the first of all.
"""

from __future__ import annotations

from keystage.batching.rivals.central import EagerScheduler, Group


class ClockworkScheduler(EagerScheduler):
    """Earliest latest moment first."""

    def choose(self, group: Group, now_s: float) -> tuple[int, int] | None:
        """The candidate of the group's models whose latest executable moment comes first."""
        best_s, best = float("inf"), None
        for model, line in self._waiting.items():
            if model not in group.models:
                continue
            size, head = line.fit(now_s), line.queue.head
            if size and head is not None:
                latest_s = head.deadline_s - line.profile.latency_s(size)
                if latest_s < best_s:
                    best_s, best = latest_s, (model, size)
        return best
