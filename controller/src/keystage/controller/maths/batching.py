"""Stages that serve batches: batch size, capacity, formation wait, and what departs.

Before it: a profile of a stage and its share of the objective. After it: `policy.service` takes b*, l(b) and
mu; formation and full-batch sojourns are for stages that wait for batches, which the policy's do not.
Pure arithmetic; it must not know stages.

Symbols: l(b) = alpha b + beta seconds for a batch of b items, alpha seconds per item, beta seconds per
batch, lambda arrivals of items (1/s), c servers, ca2 and cs2 squared CVs of item gaps and batch services.

    b*      = largest b in 1..most with l(b) <= limit (half the share: the other half is for waiting)
    mu      = b / l(b)                       items a server finishes a second, < 1 / alpha
    W_form  = (b - 1) / (2 lambda)           mean wait for the batch to fill
    stable  : lambda < c b / l(b), that is b > lambda beta / (c - lambda alpha), and lambda alpha < c
    batches : rate lambda / b, gaps' scv ca2 / b (sums of b independent gaps), service l(b)
    departures of items: scv = b (1 + cd2) - 1, cd2 the scv of the gaps between batches

Source: QUART section 5.1 and Symphony section 3 for l(b); the rest is elementary: of b items that leave
together b - 1 gaps are 0 and one is a whole batch gap, so E[x^2]/E[x]^2 = b (1 + cd2).
Range of validity: full batches. A stage that starts a batch as soon as a server is free has smaller
batches and no formation wait at low load; these are its values when it is busy.
"""

from __future__ import annotations

import math

from keystage.controller.maths import erlang

HALF_SHARE = 0.5
"""Part of a stage's share a batch may take: an item waits for at most the batch before, then for its own."""


def batch_s(alpha_s: float, beta_s: float, batch: float) -> float:
    """l(b) in seconds.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check_profile(alpha_s, beta_s)
    if not batch >= 1:
        raise ValueError(f"batch must hold >= 1 items, got {batch}")
    return alpha_s * batch + beta_s


def largest_batch(alpha_s: float, beta_s: float, most: int, share_s: float) -> int:
    """b*: the largest batch in 1..most whose time is within half the share; 1 if none is.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check_profile(alpha_s, beta_s)
    if most < 1:
        raise ValueError(f"largest batch must be >= 1 items, got {most}")
    if not share_s >= 0:
        raise ValueError(f"share must be >= 0 s, got {share_s}")
    room_s = HALF_SHARE * share_s - beta_s
    if room_s >= alpha_s * most:
        return most
    if room_s < alpha_s:
        return 1
    return max(1, min(most, math.floor(room_s / alpha_s * (1 + 1e-12))))


def capacity_rps(alpha_s: float, beta_s: float, batch: float) -> float:
    """Items a busy server finishes a second in batches of b: mu = b / l(b)."""
    return batch / batch_s(alpha_s, beta_s, batch)


def item_s(alpha_s: float, beta_s: float, batch: float) -> float:
    """Effective service of an item, l(b) / b seconds: how long it takes a server from others."""
    return batch_s(alpha_s, beta_s, batch) / batch


def formation_s(batch: float, arrival_rps: float) -> float:
    """Mean wait of an item until its batch of b is full, (b - 1) / (2 lambda) seconds.

    Infinite when nothing arrives and the batch needs more than one.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not batch >= 1:
        raise ValueError(f"batch must hold >= 1 items, got {batch}")
    if not 0 <= arrival_rps < math.inf:
        raise ValueError(f"arrival rate must be finite and >= 0 /s, got {arrival_rps}")
    if batch == 1:
        return 0.0
    return (batch - 1) / (2 * arrival_rps) if arrival_rps > 0 else math.inf


def smallest_stable_batch(alpha_s: float, beta_s: float, arrival_rps: float, servers: int) -> int | None:
    """The smallest batch with lambda < c b / l(b); None when no batch size keeps up.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check_profile(alpha_s, beta_s)
    if servers < 1:
        raise ValueError(f"servers must be >= 1, got {servers}")
    if not 0 <= arrival_rps < math.inf:
        raise ValueError(f"arrival rate must be finite and >= 0 /s, got {arrival_rps}")
    spare = servers - arrival_rps * alpha_s
    if spare <= 0:
        return None
    batch = max(1, math.floor(arrival_rps * beta_s / spare) + 1)
    while arrival_rps >= servers * capacity_rps(alpha_s, beta_s, batch):  # the floor above was rounded
        batch += 1
    return batch


def batch_sojourn_s(
    alpha_s: float, beta_s: float, batch: int, arrival_rps: float, servers: int, ca2: float, cs2: float
) -> float:
    """Mean formation + wait + service of an item in full batches; infinite when unstable.

    Batches are the customers of G/G/c: rate lambda / b, gaps' scv ca2 / b, service l(b) with scv cs2.

    Raises:
        ValueError: an argument is out of its range.
    """
    service_s = batch_s(alpha_s, beta_s, batch)
    wait_s = erlang.ggc_wait_s(arrival_rps / batch, service_s, servers, ca2 / batch, cs2)
    return formation_s(batch, arrival_rps) + wait_s + service_s


def departure_scv(batch: float, batch_gap_scv: float = 0.0) -> float:
    """Squared CV of the gaps between items that leave in batches of b.

    Args:
        batch: items that leave together, >= 1.
        batch_gap_scv: squared CV of the gaps between batches (0: steady, which gives b - 1).

    Raises:
        ValueError: an argument is out of its range.
    """
    if not batch >= 1:
        raise ValueError(f"batch must hold >= 1 items, got {batch}")
    if not batch_gap_scv >= 0:
        raise ValueError(f"squared coefficient of variation must be >= 0, got {batch_gap_scv}")
    return batch * (1 + batch_gap_scv) - 1


def _check_profile(alpha_s: float, beta_s: float) -> None:
    if not (0 <= alpha_s < math.inf and 0 <= beta_s < math.inf and alpha_s + beta_s > 0):
        raise ValueError(
            f"profile needs finite alpha_s and beta_s >= 0 that are not both 0, got {alpha_s} and {beta_s}"
        )
