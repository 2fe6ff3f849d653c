"""Cumulative statistics of a stage, as the controller wants them. Pure; time comes in."""

from __future__ import annotations

from bisect import bisect_left

from keystage.router.api import BATCH_BOUNDS, StageCounters


class StageMeter:
    """Counts one stage's arrivals, waits and services.

    Args:
        stage: stage index.
    """

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.queue = 0
        self.in_flight = 0
        self._arrivals = 0
        self._last_arrival_s: float | None = None
        self._gap_sum_s = 0.0
        self._gap_sq_sum_s2 = 0.0
        self._waits = 0
        self._wait_sum_s = 0.0
        self._services = 0
        self._service_sum_s = 0.0
        self._service_sq_sum_s2 = 0.0
        self._sojourn_sum_s = 0.0
        self._handoff_sum_s = 0.0
        self._due = self._late = self._dropped = 0
        self._batch_sizes = [0] * (len(BATCH_BOUNDS) + 1)
        self._batch_items = 0

    def arrived(self, now_s: float) -> None:
        """An item joined the queue for the first time."""
        if self._last_arrival_s is not None:
            gap_s = now_s - self._last_arrival_s
            self._gap_sum_s += gap_s
            self._gap_sq_sum_s2 += gap_s * gap_s
        self._last_arrival_s = now_s
        self._arrivals += 1

    def waited(self, wait_s: float) -> None:
        """An item left the queue."""
        self._waits += 1
        self._wait_sum_s += wait_s

    def served(self, service_s: float, sojourn_s: float, handoff_s: float = 0.0) -> None:
        """An item was served; `handoff_s` is what its way to and from the worker took."""
        self._services += 1
        self._service_sum_s += service_s
        self._service_sq_sum_s2 += service_s * service_s
        self._sojourn_sum_s += sojourn_s
        self._handoff_sum_s += max(0.0, handoff_s)

    def left(self, *, is_late: bool) -> None:
        """An item with a stage deadline left the stage."""
        self._due += 1
        self._late += is_late

    def given_up(self) -> None:
        """An item with a stage deadline was refused here because of it."""
        self._due += 1
        self._dropped += 1

    def batched(self, size: int) -> None:
        """A batch was sent."""
        self._batch_sizes[bisect_left(BATCH_BOUNDS, size)] += 1
        self._batch_items += size

    def mean_service_s(self) -> float | None:
        """Mean service time so far, None before the first."""
        return self._service_sum_s / self._services if self._services else None

    def counters(self) -> StageCounters:
        """The present values."""
        return StageCounters(
            stage=self.stage,
            arrivals=self._arrivals,
            gap_sum_s=self._gap_sum_s,
            gap_sq_sum_s2=self._gap_sq_sum_s2,
            queue=self.queue,
            in_flight=self.in_flight,
            waits=self._waits,
            wait_sum_s=self._wait_sum_s,
            services=self._services,
            service_sum_s=self._service_sum_s,
            service_sq_sum_s2=self._service_sq_sum_s2,
            sojourn_sum_s=self._sojourn_sum_s,
            due=self._due,
            late=self._late,
            dropped=self._dropped,
            batch_sizes=list(self._batch_sizes),
            batch_items=self._batch_items,
            handoff_sum_s=self._handoff_sum_s,
        )
