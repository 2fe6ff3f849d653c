"""Which heads to give up when more wait than fit: the next few batches, planned for each choice. Pure.

A batch that leaves requests behind decides over the next ones as well: heads given up now make it and those
after it larger, heads kept may be served for nothing in a lull that follows. For each sensible choice the
next `STARTS` batches are played through, with arrivals evenly spaced at the known rate, replicas free when
their batches end, and the target rule from then on; the choice that loses the fewest requests wins. Without
it (`gather.target` alone) the same rate costs a fifth to a third more lost requests on up to eight replicas.

Only for a model that has its replicas to itself: another model's batches cannot be foreseen from here. Work
is bounded: at most `CHOICES` + 2 plays of `STARTS` batches, and none on more than `MOST_REPLICAS` replicas,
where one batch hardly matters to the next.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue
from keystage.batching.surroundings import Surroundings

STARTS = 5
CHOICES = 3
MOST_REPLICAS = 64


def heads_to_give_up(
    queue: RequestQueue, profile: LatencyProfile, at_s: float, fits: int, target: int
) -> int | None:
    """How many heads to give up so that the fewest are lost in all.

    Args:
        queue: what waits; more than `fits` of them in time.
        profile: from the scheduler's word to the end of a batch.
        at_s: when the batch would be sent, to a replica that is free then.
        fits: the batch that fits if none is given up, at least 1.
        target: the batch at which the replicas keep up with the arrivals.

    Returns:
        None when that cannot be told here: use `gather.target`.
    """
    around = queue.around
    if around is None or around.rate_rps <= 0:
        return None
    ends_s = around.ends_if_alone(MOST_REPLICAS)
    if ends_s is None:
        return None
    idle = around.replicas - len(ends_s) - 1
    soonest_s = ([at_s] * idle + heapq.nsmallest(STARTS, ends_s))[:STARTS]
    best, least = 0, -1
    # The target first: of equal choices it is taken.
    for heads, size in _choices(queue, profile, at_s, fits, target):
        free_s = [*soonest_s, at_s + profile.latency_s(size)]
        lost = heads + _lost(queue, profile, at_s, heads + size, free_s, target, around)
        if least < 0 or lost < least:
            best, least = heads, lost
    return best


def _choices(
    queue: RequestQueue, profile: LatencyProfile, at_s: float, fits: int, target: int
) -> Iterator[tuple[int, int]]:
    """(heads to give up, size of the batch then): for the target, for none, for somewhat larger batches."""
    step = max(1, target // 8)
    waiting = queue.in_time
    sizes = [max(fits, target), fits, *(fits + step * i for i in range(1, CHOICES + 1))]
    seen = set()
    for size in sizes:
        heads = queue.first_due(at_s + profile.latency_s(size)) if size > fits else 0
        if heads < waiting and heads not in seen:
            seen.add(heads)
            yield heads, min(waiting - heads, profile.largest_batch(queue.at(heads).deadline_s - at_s))


def _lost(
    queue: RequestQueue,
    profile: LatencyProfile,
    at_s: float,
    first: int,
    free_s: list[float],
    target: int,
    around: Surroundings,
) -> int:
    """Requests lost by the target rule in the next batches, `first` being the first place that is left."""
    waiting, rate_rps, service = queue.in_time, around.rate_rps, around.service
    # Later batches are sent ahead: who is to join them must have come by then.
    sent_s = at_s + profile.latency_s(1) - service.latency_s(1)
    slo_s = queue.at(waiting - 1).deadline_s - queue.at(waiting - 1).arrived_s
    alone_s, target_s = service.latency_s(1), service.latency_s(target)
    heapq.heapify(free_s)
    lost = 0
    for _ in range(STARTS):
        start_s = max(sent_s, free_s[0])
        came = waiting + int((start_s - sent_s) * rate_rps)
        if came <= first:
            start_s = sent_s + (first - waiting + 1) / rate_rps
            came = first + 1
        room_s = 0.0
        while first < came:
            due_s = (
                queue.at(first).deadline_s
                if first < waiting
                else at_s + (first - waiting + 1) / rate_rps + slo_s
            )
            room_s = due_s - start_s
            if room_s >= (target_s if came - first > target else alone_s):
                break
            first += 1
            lost += 1
        size = min(came - first, service.largest_batch(room_s)) if first < came else 0
        if size:
            first += size
            heapq.heapreplace(free_s, start_s + service.latency_s(size))
    return lost
