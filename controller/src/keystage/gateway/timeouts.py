"""How long each one on a request's way waits, from one setting, so that the inner one gives up first.

Pure. `KEYSTAGE_TIMEOUT_S` is what a function may take (told to it as `exec_timeout` and friends, to
a router as its default deadline). The gateway waits a little longer, so that the function's own
answer about being late gets through; whatever is in front of the gateway must wait longer still.
"""

from __future__ import annotations

GRACE_RATIO = 0.02
MIN_GRACE_S = 0.5
"""A router notices a deadline up to 0.05 s late, on a busy machine more."""
MAX_GRACE_S = 5.0


def silence_s(timeout_s: float) -> float:
    """Seconds without a byte from a replica after which the gateway gives it up.

    Args:
        timeout_s: what a function may take.
    """
    return timeout_s + min(MAX_GRACE_S, max(MIN_GRACE_S, timeout_s * GRACE_RATIO))
