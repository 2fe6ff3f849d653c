"""KL divergence of a load over nodes against their share of the capacity, and how to keep it small.

Before it: counts of key-stage replicas by node. After it: `policy.placement` adds replicas one at a time
at the least marginal cost; the decision reports the divergence and the least there is.

    D(P || Q)  = sum_j p_j log(p_j / q_j),           p_j = n_j / N, q_j = capacity share (both sum to 1)
    phi_j(n)   = n log(n / q_j)                      nats; sum_j phi_j(n_j) = N D + N log N
    marginal_j = phi_j(n + k) - phi_j(n)             cost of k more on node j

phi is convex, the sum separable: with units of equal size the greedy order is exact (Fox 1966), also under
upper bounds per node and a linear term per node (start times).

Against QUART section 6.2: Eq. 8 with one row per replica and Q uniform is log M for every integral
placement, so it cannot tell spread from clumped; the load per node can. Eq. 9-10 without a projection
leave the simplex (their fixed point is Q / e); with it they find Q (`descend`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def kl(load: Sequence[float], capacity: Sequence[float]) -> float:
    """D(load || capacity) in nats; both are normalised here.

    Args:
        load: per node, >= 0; all zero: nothing is placed and the divergence is 0.
        capacity: per node, >= 0.

    Returns:
        At least 0; infinite where a node without capacity carries load.
    """
    total, room = math.fsum(load), math.fsum(capacity)
    if total <= 0:
        return 0.0
    terms = []
    for n, q in zip(load, capacity, strict=True):
        if n <= 0:
            continue
        if q <= 0:
            return math.inf
        terms.append(n / total * math.log(n * room / (q * total)))
    return max(0.0, math.fsum(terms))


def least_kl(replicas: Mapping[int, int], nodes: Mapping[int, int]) -> float:
    """The least divergence there is of so many replicas on so many nodes, in nats.

    The largest replicas are placed first, each where it costs least; nodes of the same capacity and load
    are taken together. Exact for replicas of one size (Fox 1966), else a bound from above: where one is
    large, the least may be a little lower still.

    Args:
        replicas: number of replicas by units of one (a replica lies on one node), units > 0.
        nodes: number of nodes by capacity in units. A node takes what its capacity holds; only where no node
            has that much room left (units are shared) may a node carry more.
    """
    groups = {(capacity, 0): count for capacity, count in nodes.items() if capacity > 0 and count > 0}
    total = sum(capacity * count for (capacity, _), count in groups.items())
    units = sum(size * max(0, count) for size, count in replicas.items())
    if not groups or units <= 0:
        return 0.0
    for size in sorted(replicas, reverse=True):
        _add_level(groups, size, replicas[size], total)
    terms = [count * phi(load, capacity / total) for (capacity, load), count in groups.items()]
    return max(0.0, math.fsum(terms) / units - math.log(units))


def _add_level(groups: dict[tuple[int, int], int], size: int, count: int, total: int) -> None:
    """Puts `count` replicas of one size on nodes, counted by (capacity, load), least marginal first."""
    while count > 0:
        wide = [group for group in groups if group[0] >= size] or list(groups)
        roomy = [group for group in wide if group[1] + size <= group[0]] or wide
        best = min(roomy, key=lambda group: (marginal(group[1], size, group[0] / total), group))
        capacity, load = best
        taken = min(count, groups[best])
        count -= taken
        groups[best] -= taken
        if not groups[best]:
            del groups[best]
        fuller = (capacity, load + size)
        groups[fuller] = groups.get(fuller, 0) + taken


def phi(units: float, share: float) -> float:
    """Node cost n log(n / q) in nats; infinite where q is 0 and n is not."""
    if units <= 0:
        return 0.0
    return units * math.log(units / share) if share > 0 else math.inf


def marginal(units: float, more: float, share: float) -> float:
    """What `more` units cost on a node that carries `units`, in nats."""
    return phi(units + more, share) - phi(units, share) if share > 0 else math.inf


def fill(
    load: Sequence[int], share: Sequence[float], linear: Sequence[float], room: Sequence[int], units: int
) -> list[int]:
    """Adds units one at a time where they cost least; exact for sum_j phi_j(n_j) + linear_j (n_j - load_j).

    Args:
        load: units there are, per node.
        share: capacity shares.
        linear: cost of a unit on each node beside the divergence, nats.
        room: how many more units each node takes.
        units: how many to add.

    Returns:
        The node of every unit in order; shorter than `units` where the room ends.
    """
    counts, left = list(load), list(room)
    heap = [
        (marginal(counts[j], 1, share[j]) + linear[j], j)
        for j in range(len(counts))
        if left[j] > 0 and share[j] > 0
    ]
    heapq.heapify(heap)
    order: list[int] = []
    while heap and len(order) < units:
        _, j = heap[0]
        order.append(j)
        counts[j] += 1
        left[j] -= 1
        if left[j] > 0:
            heapq.heapreplace(heap, (marginal(counts[j], 1, share[j]) + linear[j], j))
        else:
            heapq.heappop(heap)
    return order


def project(point: Floats) -> Floats:
    """The nearest point of the probability simplex (Held, Wolfe and Crowder 1974), float array [n]."""
    ordered = np.sort(point)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(point) + 1)
    kept = int(np.flatnonzero(ordered > excess)[-1])
    nearest: Floats = np.maximum(point - excess[kept], 0.0)
    return nearest


def descend(share: Floats, rate: float, steps: int) -> Floats:
    """QUART Eq. 9-10 with a projection after each step, from the middle of the simplex: tends to `share`.

    Args:
        share: Q, positive, sums to 1, float array [n].
        rate: alpha.
        steps: iterations.
    """
    point: Floats = np.full(len(share), 1 / len(share))
    for _ in range(steps):
        gradient = 1 + np.log(np.maximum(point, 1e-300) / share)
        point = project(point - rate * gradient)
    return point
