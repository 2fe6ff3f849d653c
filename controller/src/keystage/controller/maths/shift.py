"""Whether a rate has shifted: a count that chance does not explain.

Before it: arrivals counted in some time, and a long-run rate. After it: the estimator begins its rate
anew, so that a step in traffic is believed at once while a burst that belongs to the traffic is not.

Symbols: m expected count, n counted, s squared CV of the gaps, N arrivals the long-run rate rests on.

    |n - m| > z (sqrt(s m (1 + m/N)) + s)

Counts of a renewal process have variance s m in the long run; m/N adds the error of the rate itself. The
second term is Bernstein's: bursts of a gamma process with s >> 1 have about s arrivals and exponential
tails, so a bound by standard deviations alone would be passed every few seconds.
Range of validity: a bound, not a level of significance; s below 1 counts as 1 (sampling is not exact).
"""

from __future__ import annotations

import math


def is_shift(counted: float, expected: float, scv: float, basis: float, z: float) -> bool:
    """Whether a count speaks for another rate.

    Args:
        counted: n arrivals.
        expected: m arrivals at the rate believed so far.
        scv: squared CV of inter-arrival times.
        basis: N arrivals behind that rate, > 0.
        z: how many deviations are needed.
    """
    scv = max(1.0, scv)
    return abs(counted - expected) > z * (math.sqrt(scv * expected * (1 + expected / basis)) + scv)
