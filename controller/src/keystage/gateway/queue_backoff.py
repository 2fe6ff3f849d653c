"""How long to wait before something is tried again. Pure; used by the queue's runner and callbacks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off with jitter, so that what failed together does not return together.

    Attributes:
        attempts: tries in all.
        base_s: seconds after the first failure, before jitter; doubles with each further one.
        cap_s: longest wait.
    """

    attempts: int
    base_s: float
    cap_s: float

    def delay_s(self, failures: int, draw: float) -> float:
        """Seconds to wait.

        Args:
            failures: how often it has failed, from 1.
            draw: uniform in [0, 1): half of the wait is random.
        """
        # 2 ** 60 is above every cap; larger exponents would overflow.
        full_s = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 60))
        return full_s * (0.5 + 0.5 * draw)
