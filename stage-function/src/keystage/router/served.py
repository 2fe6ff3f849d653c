"""What clients got of a router: time to answer and to the first token, and whether it was in time. Pure.

Before it: `clients` tells when a request was admitted, had its first token, and was answered. After it:
`router.metrics`. A traced request leaves its trace's id with the bucket it fell into: an exemplar, by which a
slow answer on a dashboard leads to its trace.
"""

from __future__ import annotations

from bisect import bisect_left

from keystage.wire.metric_spec import ANSWER_BOUNDS_S
from keystage.wire.metrics import Exemplar


class Histogram:
    """Observations by bucket.

    Args:
        bounds: upper bounds, ascending.

    Attributes:
        counts: observations in each bucket, the last of them without a bound.
        total: sum of what was observed.
        exemplars: the newest traced observation of each bucket.
    """

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)

    def observe(self, value: float, trace_id: bytes = b"", at_s: float = 0.0) -> None:
        """Counts one.

        Args:
            value: what was observed.
            trace_id: of the trace it belongs to, empty: it is not traced.
            at_s: Unix seconds, told with the trace.
        """
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id:
            self.exemplars[bucket] = Exemplar(trace_id.hex(), value, at_s)


class Served:
    """What was answered.

    Attributes:
        answer: seconds from admission to the end of the answer, of requests answered completely.
        first_token: seconds from admission to the first token, of looping pipelines.
        due: requests with an objective (their own deadline, or the pipeline's) that ended.
        in_time: those of them that were answered completely and met it: goodput is their rate.
    """

    __slots__ = ("answer", "due", "first_token", "in_time")

    def __init__(self) -> None:
        self.answer = Histogram(ANSWER_BOUNDS_S)
        self.first_token = Histogram(ANSWER_BOUNDS_S)
        self.due = 0
        self.in_time = 0

    def ended(self, is_met: bool | None) -> None:
        """A request ended; whether it met its objective, None where it had none."""
        if is_met is not None:
            self.due += 1
            self.in_time += is_met


class Pace:
    """How fast the tokens of one answer came.

    Args:
        begun_s: when its request was admitted.

    Attributes:
        first_s: seconds to the first token, None until it came.
    """

    __slots__ = ("_begun_s", "_tokens", "first_s")

    def __init__(self, begun_s: float) -> None:
        self._begun_s = begun_s
        self._tokens = 0
        self.first_s: float | None = None

    def came(self, tokens: int, now_s: float) -> bool:
        """Tokens came; whether they are the first."""
        self._tokens += tokens
        if self.first_s is not None:
            return False
        self.first_s = now_s - self._begun_s
        return True

    def token_s(self, now_s: float) -> float | None:
        """Seconds per token after the first until now, None where there was one at most."""
        if self.first_s is None or self._tokens < 2:
            return None
        return (now_s - self._begun_s - self.first_s) / (self._tokens - 1)
