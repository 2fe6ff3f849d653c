"""Which of the waiting requests make the next batch (Symphony, section 3.2). Pure.

A batch is always taken from the front of a queue in deadline order, so its first request's deadline binds it
and its size says all. A gathering rule gives up the requests at the front that it will not serve (the queue
keeps them for the scheduler's `Drop`) and returns how many of those behind make the batch.
"""

from __future__ import annotations

from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue


def fill(queue: RequestQueue, profile: LatencyProfile, at_s: float) -> int:
    """From the head while it fits; a head that cannot make it even alone is given up.

    Demoted requests take the places that are left; when they wait alone, see `demoted_batch`.

    Args:
        queue: what waits; hopeless heads leave it.
        profile: from the scheduler's word to the end of a batch, see `model_side`.
        at_s: when the batch would be sent.

    Returns:
        Size of the largest batch that meets its first deadline, 0 when nothing waits.
    """
    while (head := queue.head) is not None:
        waiting, within_s = len(queue), head.deadline_s - at_s
        # Mostly all fit, and nothing need be divided; how one is rounded is the word of `largest_batch`.
        if 1 < waiting <= profile.most and profile.alpha_s * waiting + profile.beta_s <= within_s:
            return waiting
        fits = profile.largest_batch(within_s)
        if fits:
            return min(waiting, fits)
        queue.give_up(1)
    return demoted_batch(queue, profile)


def target(queue: RequestQueue, profile: LatencyProfile, at_s: float, size: int) -> int:
    """Gives up heads prematurely, so that the batch is of the target size (Nexus' early drop).

    The first request with which `size` still fit starts the batch, if so many wait from it on. With fewer
    than `size` waiting nothing is given up that could still be served.

    Args:
        queue: what waits; requests given up leave it.
        profile: from the scheduler's word to the end of a batch.
        at_s: when the batch would be sent.
        size: target, at least 1.

    Returns:
        Size of the batch, 0 when nothing waits.
    """
    fits = fill(queue, profile, at_s)
    spare = queue.in_time - size
    if spare <= 0 or fits >= size:
        return fits
    skipped = 0
    while skipped < spare and profile.largest_batch(queue.at(skipped).deadline_s - at_s) < size:
        skipped += 1
    queue.give_up(skipped)
    return fill(queue, profile, at_s)


def demoted_batch(queue: RequestQueue, profile: LatencyProfile) -> int:
    """Size of a batch of demoted requests alone: no larger than one that would have met the first's deadline.

    Their own deadlines are past saving; a larger batch would only stand longer in the way of newcomers.
    """
    first = queue.first_demoted
    if first is None:
        return 0
    return min(queue.demoted, max(1, profile.largest_batch(first.deadline_s - first.arrived_s)))
